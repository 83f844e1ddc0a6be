"""How a goal's end is recorded, whoever ends it: a success, a failure, or a newer goal.

Why in one place: a goal ends exactly once, and what is kept of a user's traceback is bounded.
"""

from __future__ import annotations

import msgspec

from serve_common.wires.views import GoalStatus
from serve_controller.core.checkpoint import Draft
from serve_controller.core.objects import Goal

ERROR_LENGTH_MAX = 8_000


def end_goal(draft: Draft, goal: Goal, status: GoalStatus, now: float, error: str = "") -> None:
    """Record a goal's end; a goal ends exactly once."""
    assert goal.status is GoalStatus.PENDING, f"{goal.goal_id} ended already"
    draft.put(msgspec.structs.replace(goal, status=status, error=error[-ERROR_LENGTH_MAX:], finished_at=now))
