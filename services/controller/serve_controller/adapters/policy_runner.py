"""Runs users' policy functions in processes of their own, one for each app_dir.

Why processes: a function that never returns cannot be ended otherwise, and what it imports must not meet what another
app imports under the same name, nor the controller's secrets.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final, final

import structlog

from serve_common.autoscaling import AutoscalingPolicy
from serve_common.autoscaling_context import AutoscalingContext
from serve_common.tasks import TaskOwner
from serve_controller.adapters.policy_process import START_TIMEOUT_S, PolicyProcess
from serve_controller.policy_child import PolicyRequest
from serve_controller.ports import PolicyAnswer, PolicyFailed

_log = structlog.get_logger(__name__)

CALL_TIMEOUT_S: Final = 2.0
CHILDREN_MAX: Final = 8
_WAIT_S: Final = 10.0
"""For other functions of the same app_dir."""
_CLOSE_TIMEOUT_S: Final = 1.0


@final
class SubprocessPolicies:
    """A `PolicyRunner`."""

    def __init__(
        self, app_root: str, *, call_timeout_s: float = CALL_TIMEOUT_S, children_max: int = CHILDREN_MAX
    ) -> None:
        """``app_root`` is where a relative app_dir begins. Starts nothing yet."""
        self._app_root = app_root
        self._call_timeout_s = call_timeout_s
        self._children_max = children_max
        self._homes: dict[str, _Home] = {}
        """By app_dir, the one used last at the end."""
        self._tasks = TaskOwner("policies")

    async def run(self, policy: AutoscalingPolicy, app_dir: str, context: AutoscalingContext) -> PolicyAnswer:
        """As `PolicyRunner`."""
        directory = str(Path(self._app_root, app_dir)) if app_dir else ""
        home = self._homes.pop(directory, None) or _Home(directory, self._tasks, self._call_timeout_s)
        self._homes[directory] = home
        self._make_room()
        return await home.run(policy, context)

    async def close(self) -> None:
        """End all processes."""
        children = [child for home in self._homes.values() if (child := home.end()) is not None]
        self._homes.clear()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                for child in children:
                    await child.ended()
        except TimeoutError:
            _log.warning("policy_processes_not_ended", count=len(children))
        await self._tasks.close(_CLOSE_TIMEOUT_S)

    def _make_room(self) -> None:
        for directory, home in list(self._homes.items()):
            if len(self._homes) <= self._children_max:
                return
            if not home.is_busy:
                home.end()
                del self._homes[directory]


@final
class _Home:
    """One app_dir, and the process that has imported from it, while there is one."""

    def __init__(self, app_dir: str, tasks: TaskOwner, call_timeout_s: float) -> None:
        self._app_dir = app_dir
        self._tasks = tasks
        self._call_timeout_s = call_timeout_s
        self._waiting = 0
        self._lock = asyncio.Lock()
        self._child: PolicyProcess | None = None

    @property
    def is_busy(self) -> bool:
        return self._waiting > 0

    def end(self) -> PolicyProcess | None:
        """Kill its process, and return it, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
        return child

    async def run(self, policy: AutoscalingPolicy, context: AutoscalingContext) -> PolicyAnswer:
        self._waiting += 1
        try:
            try:
                async with asyncio.timeout(_WAIT_S):
                    await self._lock.acquire()
            except TimeoutError as error:
                raise PolicyFailed(f"other policies in {self._app_dir} take too long") from error
            try:
                return await self._run(policy, context)
            except BaseException:
                if not (self._child is not None and self._child.is_in_step):
                    self.end()
                raise
            finally:
                self._lock.release()
        finally:
            self._waiting -= 1

    async def _run(self, policy: AutoscalingPolicy, context: AutoscalingContext) -> PolicyAnswer:
        path = policy.policy_function
        child = await self._alive()
        imported = await child.ask(PolicyRequest(function=path), START_TIMEOUT_S, f"importing {path}")
        if imported.is_stale:
            self.end()
            child = await self._alive()
            imported = await child.ask(PolicyRequest(function=path), START_TIMEOUT_S, f"importing {path}")
        if imported.error:
            raise PolicyFailed(imported.error)
        request = PolicyRequest(function=path, context=context, kwargs=policy.policy_kwargs)
        reply = await child.ask(request, self._call_timeout_s, path)
        if reply.is_stale:
            raise PolicyFailed(f"{path} was changed while it was asked")
        if reply.error:
            raise PolicyFailed(reply.error)
        return PolicyAnswer(num_replicas=reply.num_replicas, policy_state=reply.policy_state)

    async def _alive(self) -> PolicyProcess:
        child = self._child
        if child is None or child.has_ended:
            self.end()
            child = self._child = await PolicyProcess.start(self._app_dir, self._tasks)
        return child
