"""The argument of a function named by ``AutoscalingPolicy(policy_function="module:function")``.

    def policy(context: AutoscalingContext) -> int:
        return math.ceil(context.total_num_requests / 4)

Such a module must import little: it runs beside the controller, where models' packages are not installed.
"""

from __future__ import annotations

from serve_common.config.autoscaling import AutoscalingContext, LoadPoint

__all__ = ["AutoscalingContext", "LoadPoint"]
