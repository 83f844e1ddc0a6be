"""What a function named by ``AutoscalingPolicy(policy_function="module:function")`` is given.

    def policy(context: AutoscalingContext) -> int:
        return math.ceil(context.total_num_requests / 4)

Why it may import little: it runs beside the controller, where models' packages are not installed.
"""

from __future__ import annotations

from serve_common.config.autoscaling import AutoscalingContext, LoadReading

__all__ = ["AutoscalingContext", "LoadReading"]
