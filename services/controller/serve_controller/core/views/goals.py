"""Goals as callers see them. What a pending one waits for is worked out anew each time: it is never stored."""

from __future__ import annotations

from serve_common.errors import NotFound
from serve_common.names import GoalId
from serve_common.wires.views import GoalStatus, GoalView
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.goals.ids import number_of
from serve_controller.core.goals.waiting import waits_for
from serve_controller.core.observed import ObservedState


def view_goal(checkpoint: Checkpoint, observed: ObservedState, goal_id: GoalId) -> GoalView:
    """One goal. Raises `NotFound`, which tells an id that never was from one that is forgotten."""
    goal = checkpoint.goals.get(goal_id)
    if goal is None:
        if 0 < number_of(goal_id) <= checkpoint.counters.goal:
            raise NotFound(f"goal_id: {goal_id} ended and is forgotten by now")
        raise NotFound(f"goal_id: {goal_id[:80]!r} was never given")
    message = waits_for(checkpoint, observed, goal) if goal.status is GoalStatus.PENDING else ""
    return GoalView(goal_id=goal_id, status=goal.status, error=goal.error, message=message)
