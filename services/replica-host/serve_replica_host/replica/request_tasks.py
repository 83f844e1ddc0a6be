"""Runs a task for each request, and begins it at once.

Why not `TaskOwner`: a name, a set entry, a callback and two turns of the loop for each request are a large part of what
a quick request costs. Here a task takes its first step when it is started, as Python 3.12's eager tasks do, and one
that is done after it, as most are, needs to be neither held nor watched. It is a real task all the while: the current
one, with a context of its own, and it can be cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Final, final

import structlog

_log = structlog.get_logger(__name__)

_TASK_NAME: Final = "request"


@final
class RequestTasks:
    """Holds the tasks that are not done, reports those that die of an exception. For one loop, on its thread."""

    def __init__(self) -> None:
        self._held: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._first_step: tuple[Callable[..., object], Context | None] | None = None

    def start(self, coro: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        """Run ``coro`` until it first waits; None when it has ended by then."""
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        if asyncio.current_task(loop) is not None:
            # A task cannot step inside another one's step.
            task = asyncio.Task(coro, loop=loop, name=_TASK_NAME)
            return self._hold(task)
        # A new task hands its first step to `call_soon`; here it is taken and made.
        loop.__dict__["call_soon"] = self._catch
        try:
            task = asyncio.Task(coro, loop=loop, name=_TASK_NAME)
        finally:
            del loop.__dict__["call_soon"]
        assert self._first_step is not None, "a task schedules its first step"
        step, context = self._first_step
        self._first_step = None
        if context is None:
            step()
        else:
            context.run(step)
        if task.done():
            self._report(task)
            return None
        return self._hold(task)

    async def close(self, timeout_s: float) -> None:
        """Cancel all tasks and wait at most ``timeout_s`` until they ended; what outlives it is logged."""
        held = list(self._held)
        for task in held:
            task.cancel()
        if not held:
            return
        _, running = await asyncio.wait(held, timeout=timeout_s)
        if running:
            _log.error("requests_did_not_stop", count=len(running), timeout_s=timeout_s)

    def _catch(self, step: Callable[..., object], *_: Any, context: Context | None = None) -> None:
        self._first_step = (step, context)

    def _hold(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._held.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._held.discard(task)
        self._report(task)

    def _report(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        failure = task.exception()
        if failure is not None:
            _log.error("task_failed", task=_TASK_NAME, exc_info=failure)
