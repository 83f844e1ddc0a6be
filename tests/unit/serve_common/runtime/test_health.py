"""How late loops are: measured on the loop itself, or from another thread."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest
from prometheus_client import CollectorRegistry

from serve_common.runtime import health as loop_lag
from serve_common.runtime.health import BusHealthCheck, LoopLag, ThreadLoopLag
from serve_common.runtime.healthcheck import check_url
from serve_common.runtime.operations import OperationsServer, ProcessPages
from serve_common.runtime.settings import OperationsSettings
from serve_common.runtime.tasks import TaskOwner
from serve_common.runtime.threads import LoopThread
from tests.support.waiting import eventually


async def test_a_loop_that_is_blocked_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_lag, "EVERY_S", 0.01)
    lag = LoopLag()
    tasks = TaskOwner("test")
    tasks.start(lag.run(), "lag")
    await asyncio.sleep(0)
    time.sleep(0.15)  # noqa: ASYNC251 - the loop is to be blocked
    await eventually(lambda: sum(lag.observations.counts))
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
        lag.measure()
    time.sleep(0.05)
    free.set()
    assert heard.wait(30)
    lag.measure()
    thread.stop(20)
    assert 0.05 <= seen[0] < 40
    assert len(seen) == 2


# That a pulse that is told to stop stops, though NATS answered its ping in the same moment.


async def test_a_pulse_that_is_cancelled_as_an_answer_comes_ends() -> None:
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def ping(within_s: float) -> None:
        await asyncio.wait_for(answer, within_s)  # as nats-py's flush does

    pulse = BusHealthCheck("bus", is_connected=lambda: True, ping=ping, silent_after_s=400.0)
    running = asyncio.get_running_loop().create_task(pulse.run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    answer.set_result(None)
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=20)
    running.cancel()
    assert done
    with pytest.raises(asyncio.CancelledError):
        await running


# A container is called healthy exactly when its operations port says so.


async def ask(reason: str | None, path: str) -> str | None:
    server = OperationsServer(
        OperationsSettings(host="127.0.0.1", port=0),
        ProcessPages(CollectorRegistry(), readiness_error=lambda: reason),
    )
    await server.start()
    try:
        return await asyncio.to_thread(check_url, f"http://127.0.0.1:{server.port}{path}")
    finally:
        await server.close()


async def test_a_process_is_healthy_when_its_port_says_so() -> None:
    assert await ask(None, "/readyz") is None
    assert await ask(None, "/nothing") is not None
    said = await ask("NATS is not connected", "/readyz")
    assert said is not None
    assert said.endswith("NATS is not connected")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/readyz", "http://127.0.0.1:port/readyz"])
def test_what_cannot_be_asked_is_unhealthy(url: str) -> None:
    assert check_url(url) is not None


def test_the_command_ends_with_1_and_says_why() -> None:
    command = [sys.executable, "-m", "serve_common.runtime.healthcheck", "http://127.0.0.1:1/readyz"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1
    assert "refused" in done.stdout
