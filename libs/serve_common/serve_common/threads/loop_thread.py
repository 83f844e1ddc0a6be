"""A thread that runs one event loop until it is told to stop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar, final

import uvloop

T = TypeVar("T")
_END_TASKS_S: Final = 1.0


@final
class LoopThread:
    """Runs a loop of its own from construction on. The thread never keeps the process alive."""

    def __init__(self, name: str) -> None:
        """``name`` is shown by debuggers; log context of the calling thread is taken over."""
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``work`` on the loop; callable from any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def stop(self, timeout_s: float) -> None:
        """End the loop and wait for the thread; one that is stuck in user code is left behind."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            self.loop.run_until_complete(_end_tasks())
        finally:
            self.loop.close()


async def _end_tasks() -> None:
    """What libraries started and did not end must not outlive its loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_END_TASKS_S)
    await asyncio.sleep(0)  # transports that were closed are let go by the next turn
