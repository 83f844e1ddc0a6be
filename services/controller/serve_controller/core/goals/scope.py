"""Which objects a goal owns, and how its end is recorded.

A goal owns keys: a later goal that owns the first of them supersedes it, which must be found without a scan of all
goals.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from serve_common.api.views import GoalStatus
from serve_common.names import BackendTag, EndpointTag, HostId
from serve_common.protocol.reports import ERROR_LENGTH_MAX
from serve_common.protocol.subjects import BACKENDS, ENDPOINTS, backend_key, endpoint_key, parse_key
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.objects import Application, Backend, Goal, GoalKind


def end_goal(draft: Draft, goal: Goal, status: GoalStatus, now: float, error: str = "") -> None:
    """Record a goal's end, of which there is exactly one; the retained part of a user's traceback is bounded."""
    assert goal.status is GoalStatus.PENDING, f"{goal.goal_id} ended already"
    draft.put(msgspec.structs.replace(goal, status=status, error=error[-ERROR_LENGTH_MAX:], finished_at=now))


def application_owned(name: str) -> str:
    """The key owned by a goal of a whole application."""
    return f"applications.{name}"


def host_owned(host_id: HostId) -> str:
    """The key owned by a goal that drains a host."""
    return f"hosts.{host_id}"


def deployment_owned(tag: BackendTag) -> list[str]:
    """The keys owned by a goal of a deployment."""
    return [backend_key(tag), endpoint_key(EndpointTag(tag))]


def backend_keys(owns: Sequence[str]) -> set[str]:
    """The keys of backends among the keys that a goal owns."""
    return {key for key in owns if key.startswith(f"{BACKENDS}.")}


def owned_backends(goal: Goal) -> list[BackendTag]:
    """The backends that a goal owns."""
    return [BackendTag(_tag_in(key)) for key in goal.owns if key.startswith(f"{BACKENDS}.")]


def owned_endpoints(goal: Goal) -> list[EndpointTag]:
    """The endpoints that a goal owns."""
    return [EndpointTag(_tag_in(key)) for key in goal.owns if key.startswith(f"{ENDPOINTS}.")]


def _tag_in(key: str) -> str:
    return parse_key(key)[1]


def pending_goal(draft: Checkpoint, tag: BackendTag) -> Goal | None:
    """The pending goal that owns a backend, if any; there is at most one."""
    for goal_id in sorted(draft.owners.get(backend_key(tag), {})):
        return draft.pending[goal_id]
    return None


def goal_failing_with(draft: Checkpoint, backend: Backend) -> Goal | None:
    """The pending goal that fails with this backend; None for a backend that is to be deleted anyway."""
    goal = pending_goal(draft, backend.backend_tag)
    if goal is None or backend.deleting or backend.backend_tag in deployments_removed_by(draft, goal):
        return None
    return goal


def owned_application(draft: Checkpoint, goal: Goal) -> Application | None:
    """The application that a goal changes as a whole, if any."""
    if goal.kind is not GoalKind.APPLICATION and goal.kind is not GoalKind.DELETE:
        return None
    application = draft.applications.get(goal.subject)
    is_about = application is not None and application_owned(application.name) in goal.owns
    return application if is_about else None


def deployments_removed_by(draft: Checkpoint, goal: Goal) -> list[BackendTag]:
    """Deployments that are deleted from an application when this goal is reached."""
    application = owned_application(draft, goal)
    if application is None or application.deleting:
        return []
    return [tag for tag in owned_backends(goal) if tag not in application.target.deployments]
