"""Waiting for what nobody tells of, and time that passes at once."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

from serve_common.runtime.tasks import raise_if_cancelled


async def eventually(
    is_so: Callable[[], object | Awaitable[object]], *, within_s: float = 30.0, every_s: float = 0.01
) -> None:
    """Ask again and again until ``is_so``; raises TimeoutError after ``within_s`` seconds.

    For what has no event of its own: a log file, a count, another process.
    """
    async with asyncio.timeout(within_s):
        while True:
            found = is_so()
            if inspect.isawaitable(found):
                found = await found
                raise_if_cancelled()  # what asks over NATS may have swallowed it
            if found:
                return
            await asyncio.sleep(every_s)


def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Block until ``condition``: for what only another thread or process knows."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def let_pass(seconds: float) -> None:
    """For the running loop: what is due after a while is due at once, and nothing is due by chance before.

    Timers that are set from now on are as far away as ever.
    """
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds
