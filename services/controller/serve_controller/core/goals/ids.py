"""Goal ids: how a number is written as one and read back.

Why numbers: they tell the order in which goals were made, and an id that was never given from one that is forgotten.
"""

from __future__ import annotations

from serve_common.names import GoalId


def goal_id_of(number: int) -> GoalId:
    """The id of the goal with that number."""
    return GoalId(f"g{number}")


def number_of(goal_id: GoalId) -> int:
    """The number in a goal's id; 0 for what is no goal id."""
    digits = goal_id.removeprefix("g")
    return (
        int(digits)
        if goal_id.startswith("g") and digits.isascii() and digits.isdigit() and len(digits) < 19
        else 0
    )
