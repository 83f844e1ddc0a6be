"""A thread that runs one event loop until it is told to stop.

Why SystemExit and KeyboardInterrupt do not end it: asyncio lets them out of the loop whenever a task or a callback
raises them, and user code does so in tasks that only it knows of. Whoever waits for such a task gets the exception all
the same; a loop that ended would leave everybody else waiting for ever.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar, final

import structlog
import uvloop

_log = structlog.get_logger(__name__)

T = TypeVar("T")
_END_TASKS_S: Final = 1.0


@final
class LoopThread:
    """Runs a loop of its own from construction on. The thread never keeps the process alive."""

    def __init__(self, name: str) -> None:
        """``name`` is shown by debuggers; log context of the calling thread is taken over."""
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._stopped = self.loop.create_future()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``work`` on the loop; callable from any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def stop(self, timeout_s: float) -> None:
        """End the loop and wait for the thread; one that is stuck in user code is left behind."""
        self.loop.call_soon_threadsafe(self._end)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self._turn_until(self._stopped)
            self._turn_until(self.loop.create_task(_end_tasks()))
        finally:
            self.loop.close()

    def _end(self) -> None:
        if not self._stopped.done():
            self._stopped.set_result(None)

    def _turn_until(self, end: asyncio.Future[None]) -> None:
        """Run the loop until ``end``, whatever else would stop it."""
        while not end.done():
            try:
                self.loop.run_until_complete(end)
            except (SystemExit, KeyboardInterrupt) as error:
                _log.exception("loop_exit_ignored", error=repr(error))
            except RuntimeError:  # somebody called `stop` of the loop itself
                if end.done() or self.loop.is_closed():
                    raise


async def _end_tasks() -> None:
    """What libraries started and did not end must not outlive its loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_END_TASKS_S)
    await asyncio.sleep(0)  # transports that were closed are let go by the next turn
