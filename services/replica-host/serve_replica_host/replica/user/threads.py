"""A thread pool for the user's plain functions.

Why not `concurrent.futures`: its futures, locks and wake-ups of the loop cost more than everything else in a quick
request, and its threads delay the exit of the process. Here only the loop's thread does the accounting, and results of
many threads are returned in bursts.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, final

from serve_common.runtime.threads import Mailbox


@final
class _Job:
    """One call of a function."""

    __slots__ = ("args", "context", "ended", "error", "function", "future", "is_finished", "kwargs", "result")

    def __init__(
        self,
        future: asyncio.Future[Any],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.future = future
        self.context = contextvars.copy_context()
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_finished = False
        self.ended: asyncio.Event | None = None


@final
class PlainThreads:
    """A pool of up to ``threads_max`` threads, started on demand. All methods run on one loop's thread."""

    def __init__(self, threads_max: int) -> None:
        self._threads_max = threads_max
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._unfinished = 0
        self._threads = 0
        self._is_closed = False
        self._done: Mailbox[_Job] | None = None

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function`` in a thread with the context of the caller. Raises what it raises.

        A thread cannot be cancelled: after a cancellation this still waits for the function, which ends soon if it
        waits for a call by handle (`disconnect_propagation`). Raises RuntimeError after `close`.
        """
        if self._is_closed:
            raise RuntimeError("the replica has stopped")
        loop = asyncio.get_running_loop()
        if self._done is None:
            self._done = Mailbox(loop, self._finish)
        if self._unfinished >= self._threads and self._threads < self._threads_max:
            self._start_thread(self._done)
        job = _Job(loop.create_future(), function, args, kwargs)
        self._unfinished += 1
        self._jobs.put(job)
        try:
            return await job.future
        except asyncio.CancelledError:
            await _until_ended(job)
            raise

    def close(self) -> None:
        """Stop the threads after all started and queued calls."""
        self._is_closed = True
        self._close_if_idle()
        for _ in range(self._threads):
            self._jobs.put(None)

    def _close_if_idle(self) -> None:
        if self._is_closed and not self._unfinished and self._done is not None:
            self._done.close()
            self._done = None

    def _start_thread(self, done: Mailbox[_Job]) -> None:
        thread = threading.Thread(
            target=_work, args=(self._jobs, done), name=f"user-{self._threads + 1}", daemon=True
        )
        thread.start()
        self._threads += 1

    def _finish(self, job: _Job) -> None:
        self._unfinished -= 1
        job.is_finished = True
        self._close_if_idle()
        if job.ended is not None:
            job.ended.set()
        future = job.future
        if future.done():
            return  # it was cancelled
        if job.error is None:
            future.set_result(job.result)
        elif isinstance(job.error, StopIteration):  # which futures do not accept
            future.set_exception(RuntimeError(f"StopIteration was raised: {job.error}"))
        else:
            future.set_exception(job.error)


async def _until_ended(job: _Job) -> None:
    """Wait for the thread, ignoring further cancellations."""
    if job.is_finished:
        return
    job.ended = asyncio.Event()
    while not job.ended.is_set():
        try:
            await job.ended.wait()
        except asyncio.CancelledError:
            continue


def _work(jobs: SimpleQueue[_Job | None], done: Mailbox[_Job]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job.result = job.context.run(job.function, *job.args, **job.kwargs)
        except BaseException as error:  # noqa: BLE001 - raised by the user's code; passed to the waiting task
            job.error = error
        done.put(job)
        del job  # its references must not live until the next call
