"""How late loops are: measured on the loop itself, or from another thread."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from serve_common.runtime import health as loop_lag
from serve_common.runtime.health import LoopLag, ThreadLoopLag
from serve_common.runtime.tasks import TaskOwner
from serve_common.runtime.threads import LoopThread


async def test_a_loop_that_is_blocked_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_lag, "EVERY_S", 0.01)
    lag = LoopLag()
    tasks = TaskOwner("test")
    tasks.start(lag.run(), "lag")
    await asyncio.sleep(0)
    time.sleep(0.15)  # noqa: ASYNC251 - the loop is to be blocked
    async with asyncio.timeout(30):
        while not sum(lag.observations.counts):  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)
    await tasks.close(1)
    assert lag.observations.total >= 0.13


def test_another_threads_loop_is_asked_once_at_a_time() -> None:
    thread = LoopThread("lag")
    seen: list[float] = []
    heard, free = threading.Event(), threading.Event()

    def observe(seconds: float) -> None:
        seen.append(seconds)
        heard.set()

    lag = ThreadLoopLag(thread.loop, observe)
    thread.loop.call_soon_threadsafe(free.wait, 40)  # as user code that blocks
    for _ in range(3):
        lag.ask()
    time.sleep(0.05)
    free.set()
    assert heard.wait(30)
    lag.ask()
    thread.stop(20)
    assert 0.05 <= seen[0] < 40
    assert len(seen) == 2
