"""Every admin verb as a typed method that survives the death of the controller it was sent to.

Why it retries: a controller that dies is back, or replaced, within seconds, and every verb is idempotent (``deploy``
carries an id that is made once), so a caller need not know that it happened. What is wrong for good is raised at once.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any, Final

import msgspec

from muster.client.ports import NoAnswer, NobodyListens, Requests
from muster.client.replies import read_reply
from serve_common.errors import FencedOut, ServeError, TransientError
from serve_common.names import GoalId
from serve_common.subjects import Subjects
from serve_common.wires.admin import VERBS
from serve_common.wires.commands import ChangeReply, DeleteDeployment, Deploy, Request
from serve_common.wires.queries import (
    GetAllBackends,
    GetAllEndpoints,
    GetDeploymentInfo,
    GetStatus,
    ListDeployments,
    WaitForGoal,
)
from serve_common.wires.views import (
    BackendView,
    DeploymentView,
    EndpointView,
    GoalStatus,
    GoalView,
    StatusView,
)

ATTEMPT_S: Final = 5.0
"""How long one try waits for its answer; a reply lost with its controller costs this much."""
WAIT_SLICE_S: Final = 1.0
"""How long the server holds one question for a goal, so that its progress is shown about every second."""
SLICE_SLACK_S: Final = 2.0

_VERB_OF: Final = {request_type: verb for verb, (request_type, _reply_type) in VERBS.items()}


def _ignore(_what: object) -> None:
    return


class AdminClient:
    """The admin API of one stack. Errors are those of `serve_common.errors`, as the controller raised them."""

    def __init__(
        self,
        requests: Requests,
        subjects: Subjects,
        *,
        retry_for_s: float = 30.0,
        retry_pause_s: float = 0.25,
        on_retry: Callable[[str], None] = _ignore,
    ) -> None:
        """Transient errors are tried again for ``retry_for_s``; ``on_retry`` hears why, for people."""
        self._requests = requests
        self._subjects = subjects
        self._retry_for_s = retry_for_s
        self._retry_pause_s = retry_pause_s
        self._on_retry = on_retry

    async def deploy(self, request: Deploy) -> ChangeReply:
        """Make a deployment be as given; returns when that is recorded, not when it serves."""
        if request.request_id is None:
            request = msgspec.structs.replace(request, request_id=uuid.uuid4().hex)
        reply: ChangeReply = await self._ask(request)
        return reply

    async def delete_deployment(self, name: str) -> ChangeReply:
        """Make a deployment not exist; an unknown name is a success without a goal."""
        reply: ChangeReply = await self._ask(DeleteDeployment(name=name))
        return reply

    async def get_deployment_info(self, name: str) -> DeploymentView:
        """One deployment; raises `NotFound`."""
        reply: DeploymentView = await self._ask(GetDeploymentInfo(name=name))
        return reply

    async def list_deployments(self) -> list[DeploymentView]:
        """All deployments."""
        reply: list[DeploymentView] = await self._ask(ListDeployments())
        return reply

    async def get_all_backends(self) -> list[BackendView]:
        """All backends and their replicas."""
        reply: list[BackendView] = await self._ask(GetAllBackends())
        return reply

    async def get_all_endpoints(self) -> list[EndpointView]:
        """All endpoints and their traffic."""
        reply: list[EndpointView] = await self._ask(GetAllEndpoints())
        return reply

    async def get_status(self) -> StatusView:
        """The whole system."""
        reply: StatusView = await self._ask(GetStatus())
        return reply

    async def wait_for_goal(
        self,
        goal_id: GoalId,
        *,
        deadline_s: float,
        on_progress: Callable[[GoalView], None] = _ignore,
    ) -> GoalView:
        """Wait until a goal ends, for at most ``deadline_s``; a view that is still PENDING means the time is over.

        ``on_progress`` hears every view, about one a second. Raises `NotFound` for an id that is unknown.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + deadline_s
        while True:
            left_s = max(0.0, give_up_at - loop.time())
            slice_s = min(WAIT_SLICE_S, left_s)
            view: GoalView = await self._ask(
                WaitForGoal(goal_id=goal_id, timeout_s=slice_s),
                attempt_s=slice_s + SLICE_SLACK_S,
            )
            on_progress(view)
            if view.status is not GoalStatus.PENDING or loop.time() >= give_up_at:
                return view

    async def _ask(self, request: Request, *, attempt_s: float = ATTEMPT_S) -> Any:
        verb = _VERB_OF[type(request)]
        subject = self._subjects.admin(verb)
        body = msgspec.json.encode(request)
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._retry_for_s
        while True:
            try:
                answer = await self._requests.request(subject, body, timeout_s=attempt_s)
                return read_reply(verb, answer, VERBS[verb][1])
            # Fenced out means for us that another controller leads by now: ask that one.
            except (TransientError, FencedOut) as error:
                if loop.time() + self._retry_pause_s >= give_up_at:
                    raise self._last_word(error) from error
                self._on_retry(str(self._last_word(error)))
            await asyncio.sleep(self._retry_pause_s)

    def _last_word(self, error: ServeError) -> ServeError:
        if isinstance(error, NobodyListens):
            return TransientError(f"no controller answers at {self._requests.where}; is one running?")
        if isinstance(error, NoAnswer):
            return TransientError(f"no controller answered in time at {self._requests.where}: {error}")
        return error
