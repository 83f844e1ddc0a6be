"""Event loops in threads of their own, and queues from one thread to the loop of another."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Final, Generic, TypeVar, final

import structlog
import uvloop

_log = structlog.get_logger(__name__)

T = TypeVar("T")
_END_TASKS_S: Final = 1.0


@final
class LoopThread:
    """Runs a loop of its own from construction on. The thread never keeps the process alive.

    Why SystemExit and KeyboardInterrupt do not end it: asyncio lets them out of the loop when any task or callback
    raises them, and user code does so in tasks that only it knows of. Code that waits for such a task gets the
    exception anyway; if the loop ended, all other waiters would wait for ever.
    """

    def __init__(self, name: str) -> None:
        """``name`` is shown by debuggers; the calling thread's log context is inherited."""
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
            self._run_until(self._stopped)
            self._run_until(self.loop.create_task(_end_tasks()))
        finally:
            self.loop.close()

    def _end(self) -> None:
        if not self._stopped.done():
            self._stopped.set_result(None)

    def _run_until(self, end: asyncio.Future[None]) -> None:
        """Run the loop until ``end``, whatever else would stop it."""
        while not end.done():
            try:
                self.loop.run_until_complete(end)
            except (SystemExit, KeyboardInterrupt) as error:
                _log.exception("loop_exit_ignored", error=repr(error))
            except RuntimeError:  # the loop's own `stop` was called
                if end.done() or self.loop.is_closed():
                    raise


async def _end_tasks() -> None:
    """Cancel tasks that libraries left running: they must not outlive their loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_END_TASKS_S)
    await asyncio.sleep(0)  # closed transports are released by the next iteration


_HAS_EVENTFD: Final = hasattr(os, "eventfd")  # on Linux


@final
class Mailbox(Generic[T]):
    """A queue: values put by any thread are passed, in order, to ``take`` on the loop's thread.

    Its length is bounded by its users: each puts at most a few values per request in flight.

    Why not `call_soon_threadsafe` for each value: it costs a system call. Under load requests come in bursts, and one
    wake-up moves the whole burst.

    Why an eventfd: what `call_soon_threadsafe` schedules runs one iteration of the loop later, and between two
    iterations the interpreter's lock may go to another thread. A descriptor's reader runs at once; measured, a hop
    takes half the time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[T], None]) -> None:
        """``take`` must not raise."""
        self.loop: Final = loop
        self._take = take
        self._values: deque[T] = deque()
        self._is_waking = False
        self._gathers = False
        self._descriptor = -1
        self._wake = self._wake_by_loop
        if _HAS_EVENTFD and not loop.is_closed():
            descriptor = self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            weakref.finalize(self, os.close, descriptor)
            self._wake = lambda: os.eventfd_write(descriptor, 1)
            # Only its own thread may add to a loop. What is put meanwhile waits in the descriptor.
            loop.call_soon_threadsafe(loop.add_reader, descriptor, self._on_readable)

    def put(self, value: T) -> bool:
        """Queue ``value``; False when the loop is closed, so that it will never be taken."""
        self._values.append(value)
        # Appended before the flag is read, and the loop clears the flag before it reads: nothing is left behind.
        # Two threads that both see it cleared only wake the loop twice.
        if not self._is_waking and not self._gathers:
            if self.loop.is_closed():
                self._values.clear()
                return False
            self._is_waking = True
            self._wake()
        return True

    def put_quietly(self, value: T) -> None:
        """Queue ``value`` without waking the loop: it is taken with the next value, by `wake`, or by `empty`."""
        self._values.append(value)

    def gather(self) -> None:
        """Let everything that is put from now on wait for `wake`; where only one thread puts."""
        self._gathers = True

    def wake(self) -> None:
        """Wake the loop for what was gathered or put quietly."""
        self._gathers = False
        if self._values and not self._is_waking and not self.loop.is_closed():
            self._is_waking = True
            self._wake()

    def empty(self) -> None:
        """Take what is there; on the loop's thread."""
        if self._values:
            self._empty()

    def __len__(self) -> int:
        return len(self._values)

    def close(self) -> None:
        """Stop taking; on the loop's thread, once nothing is put any more."""
        if self._descriptor >= 0:
            self.loop.remove_reader(self._descriptor)

    def _wake_by_loop(self) -> None:
        try:
            self.loop.call_soon_threadsafe(self._empty)
        except RuntimeError:  # the loop is closed: the process ends
            self._values.clear()

    def _on_readable(self) -> None:
        os.eventfd_read(self._descriptor)
        self._empty()

    def _empty(self) -> None:
        self._is_waking = False
        values = self._values
        # Only the current values: an endless stream of values must not starve the loop.
        for _ in range(len(values)):
            self._take(values.popleft())
        if values and not self._is_waking:
            self._is_waking = True
            self._wake()
