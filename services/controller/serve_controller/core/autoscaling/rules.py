"""What all parts of the policy share: limits, delays, and what an addition does to the memory.

Why apart: a look with a known load, a wake-up and a change of the limits all add replicas, and must leave the same
traces.
"""

from __future__ import annotations

from typing import Final

import msgspec

from serve_common.autoscaling import AutoscalingConfig
from serve_controller.core.autoscaling.values import ScalingState

_LATENESS_MAX_S: Final = 1.0


def within(count: int, config: AutoscalingConfig) -> int:
    """``count`` within the limits."""
    return min(max(count, config.min_replicas), config.max_replicas)


def punctual(delay_s: float, config: AutoscalingConfig) -> float:
    """What must have passed of ``delay_s``: a look that comes milliseconds early must not cost a whole interval."""
    return delay_s - min(0.1 * delay_s, 0.1 * config.metrics_interval_s, _LATENESS_MAX_S)


def to_zero_delay_s(config: AutoscalingConfig) -> float:
    """How long the last replica must not have been wanted."""
    delay_s = config.downscale_to_zero_delay_s
    return config.downscale_delay_s if delay_s is None else delay_s


def grown(state: ScalingState, target: int, now: float) -> ScalingState:
    """``state`` after ``target`` replicas, more than before, were decided on."""
    return msgspec.structs.replace(
        state,
        decided=target,
        up_since=None,
        down_since=None,
        zero_since=None,
        fewer=(),
        last_up_at=now,
        settled_at=None,
    )
