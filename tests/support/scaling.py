"""Contexts of autoscaling policies, for tests that care for a few of their fields."""

from __future__ import annotations

from typing import Any

import msgspec

from serve_common.config.autoscaling import AutoscalingContext

_CONTEXT = AutoscalingContext(
    deployment_name="a",
    app_name="default",
    current_num_replicas=2,
    target_num_replicas=2,
    total_num_requests=6.0,
    total_queued_requests=8.0,
    capacity_adjusted_min_replicas=1,
    capacity_adjusted_max_replicas=4,
    policy_state={},
    last_scale_up_time=None,
    last_scale_down_time=None,
    current_time=0.0,
)


def build_context(**changes: Any) -> AutoscalingContext:
    """A context of ``default/a`` with two of at most four replicas, and ``changes``."""
    return msgspec.structs.replace(_CONTEXT, **changes)
