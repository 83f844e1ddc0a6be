"""Emptying the whole system."""

from __future__ import annotations

from serve_common.names import BackendTag, GoalId
from serve_common.subjects import endpoint_key
from serve_common.wires.commands import ShutdownReply
from serve_common.wires.views import GoalStatus
from serve_controller.core.changes import Kind
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.commands.accepted import Accepted, new_goal
from serve_controller.core.commands.deployments import give_up
from serve_controller.core.goals.ending import end_goal
from serve_controller.core.goals.ids import number_of
from serve_controller.core.goals.scope import deployment_owned
from serve_controller.core.objects import GoalKind

SUBJECT = "everything"


def shutdown(checkpoint: Checkpoint, now: float) -> Accepted:
    """See `Shutdown`. What is being deleted already is answered with the goal that does it."""
    draft = Draft(checkpoint)
    goal_ids: dict[GoalId, None] = {}
    for name in sorted(draft.applications):
        draft.delete((Kind.APPLICATION, name))
    for goal_id in sorted(draft.pending, key=number_of):
        goal = draft.pending[goal_id]
        if goal.kind is GoalKind.APPLICATION:
            # Before its parts go one by one: what is done to a part becomes a goal of the whole while that is pending.
            end_goal(draft, goal, GoalStatus.SUPERSEDED, now, "replaced by shutdown")
    for tag in sorted(draft.backends):
        backend = draft.backends[tag]
        if backend.deleting and backend.goal_id in draft.pending:
            goal_ids[backend.goal_id] = None
            continue
        goal_id = new_goal(draft, GoalKind.DELETE, tag, deployment_owned(tag), now)
        give_up(draft, backend, goal_id)
        goal_ids[goal_id] = None
    for endpoint_tag in sorted(draft.endpoints):
        owned = endpoint_key(endpoint_tag)
        if BackendTag(endpoint_tag) not in draft.backends:
            goal_ids[new_goal(draft, GoalKind.ROUTE, endpoint_tag, [owned], now)] = None
        draft.delete((Kind.ENDPOINT, endpoint_tag))
    return Accepted(
        changes=draft.changes(),
        reply=ShutdownReply(goal_ids=list(goal_ids)),
        subject=SUBJECT,
        goal_id=next(iter(goal_ids), None),
    )
