"""The only place that starts tasks: every task has an owner that references it, reports its failure and ends it.

Why: asyncio keeps only a weak reference to a task and reports nothing when one dies; a task without an owner can
vanish, or fail silently.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, final

import structlog

_log = structlog.get_logger(__name__)


def cancellations() -> int:
    """How often the running task was cancelled so far, to be passed to `raise_if_cancelled` later."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def raise_if_cancelled(since: int = 0) -> None:
    """Raise a cancellation that was swallowed meanwhile; for loops that must end when they are cancelled.

    Until Python 3.12, ``asyncio.wait_for`` loses a cancellation that comes in the same moment as the result, and
    nats-py waits in it for nearly everything. ``since``: the `cancellations` that the caller's caller knew of, for
    code that must also work while a task that was cancelled cleans up.
    """
    if cancellations() > since:
        raise asyncio.CancelledError


@final
class OwnedTask:
    """A caller's handle of a task that a TaskOwner owns. Not awaitable, so it may be ignored."""

    __slots__ = ("_task",)

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task

    @property
    def is_done(self) -> bool:
        """True once the task returned, failed or was cancelled."""
        return self._task.done()

    def cancel(self) -> None:
        """Ask the task to end; does nothing when it already has."""
        self._task.cancel()


@final
class TaskOwner:
    """Starts tasks, keeps them alive, and reports those that end with an exception.

    A failure is logged as `task_failed`; `on_failure(task name, exception)` is called after that, for owners
    that cannot go on without the task. Other tasks of the same owner are left alone.
    """

    def __init__(self, name: str, *, on_failure: Callable[[str, BaseException], None] | None = None) -> None:
        self._name = name
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def __len__(self) -> int:
        """How many tasks have not ended yet."""
        return len(self._tasks)

    def start(self, coro: Coroutine[Any, Any, Any], name: str) -> OwnedTask:
        """Run `coro` as a task on the running loop; `name` appears in logs.

        Raises RuntimeError after `close`: such a task would have no owner.
        """
        if self._is_closed:
            coro.close()
            raise RuntimeError(f"task owner {self._name!r} is closed; it cannot start {name!r}")
        task = asyncio.create_task(coro, name=f"{self._name}.{name}")  # noqa: TID251 - this is the owner
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return OwnedTask(task)

    async def close(self, timeout_s: float) -> None:
        """Cancel all tasks and wait at most `timeout_s` until they ended; none can be started afterwards.

        Called from one of its own tasks, it leaves that one running. Tasks that outlive the time-out are logged
        as `tasks_did_not_stop` and stay owned until they end.
        """
        self._is_closed = True
        others = self._tasks - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if not others:
            return
        _, running = await asyncio.wait(others, timeout=timeout_s)
        if running:
            _log.error(
                "tasks_did_not_stop",
                owner=self._name,
                tasks=sorted(task.get_name() for task in running),
                timeout_s=timeout_s,
            )

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        failure = task.exception()
        if failure is None:
            return
        _log.error("task_failed", owner=self._name, task=task.get_name(), exc_info=failure)
        if self._on_failure is not None:
            self._on_failure(task.get_name(), failure)
