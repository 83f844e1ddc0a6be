"""Policy functions of a user's, run beside the controller."""

from __future__ import annotations

from muster import AutoscalingContext


def one_more_each_time(context: AutoscalingContext, *, most: int) -> tuple[int, dict[str, int]]:
    """One more with each look, up to ``most``: it remembers how often it was asked."""
    looks = context.policy_state.get("looks", 0) + 1
    return min(looks, most), {"looks": looks}
