"""Ray Serve's default autoscaling policy, for policies that build on it; its name there is the module's here.

Such as::

    def policy(ctx: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        wanted, state = default_autoscaling_policy(ctx)
        return max(wanted, 2 if is_daytime(ctx.current_time) else 1), state
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from muster.sdk.absent import absent
from serve_common.config.autoscaling import AutoscalingContext
from serve_common.errors import BadField

__all__ = ["default_autoscaling_policy", "replica_queue_length_autoscaling_policy"]


def replica_queue_length_autoscaling_policy(ctx: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """The number of replicas, before factors, delays and limits, with which each has ``target_ongoing_requests``.

    Raises `BadField` for a context without a configuration.
    """
    if ctx.config is None:
        raise BadField("ctx.config", "must be set")
    if ctx.current_num_replicas:
        return ctx.total_num_requests / ctx.config.get_target_ongoing_requests(), {}
    if ctx.total_num_requests > 0:
        return max(math.ceil(ctx.config.get_upscaling_factor()), ctx.target_num_replicas), ctx.policy_state
    return ctx.target_num_replicas, {}


default_autoscaling_policy = replica_queue_length_autoscaling_policy


if not TYPE_CHECKING:  # a checker would take it for any name

    def __getattr__(name: str) -> object:
        return absent("autoscaling_policy", name)
