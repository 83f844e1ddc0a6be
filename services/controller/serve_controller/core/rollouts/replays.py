"""Which captured requests are sent again for a rollout: where too few requests come by themselves.

They go to the deployment's endpoints, as any caller's would; proxies send copies of them to canary and baseline, and
compare and count the responses, as those of all requests. Only what was captured before the step began is sent, each
once: a request must not be judged twice.
"""

from __future__ import annotations

import msgspec

from serve_common.names import BackendTag, EndpointTag, GoalId
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.rollouts.judge import GateStatus, alpha_of_step, results
from serve_controller.core.rollouts.record import Rollout, RolloutState


class ReplayRule(msgspec.Struct, frozen=True, kw_only=True):
    """Captured requests of one endpoint that are sent again in one step of a rollout."""

    backend_tag: BackendTag
    goal_id: GoalId
    step: int
    endpoint_tag: EndpointTag
    captured_before: float
    """Seconds since 1970."""
    is_unsafe: bool
    """Whether requests of all methods are sent."""


def get_replays(checkpoint: Checkpoint) -> list[ReplayRule]:
    """What is sent again in the present steps of all rollouts."""
    return [
        ReplayRule(
            backend_tag=rollout.backend_tag,
            goal_id=rollout.goal_id,
            step=rollout.step,
            endpoint_tag=tag,
            captured_before=rollout.in_force_at,
            is_unsafe=rollout.config.replays_all_methods,
        )
        for rollout in checkpoint.rollouts.values()
        if _is_compared(rollout) and rollout.config.replays_captures
        for tag in sorted(checkpoint.used_by.get(rollout.backend_tag, {}))
        if checkpoint.endpoints[tag].target.traffic.get(rollout.backend_tag, 0) > 0
    ]


def is_needed(checkpoint: Checkpoint, rule: ReplayRule) -> bool:
    """Whether the step still needs requests: a paused one does not, nor one that has shown all that it must."""
    rollout = checkpoint.rollouts.get(rule.backend_tag)
    if rollout is None or rollout.state is not RolloutState.RUNNING or not _is_compared(rollout):
        return False
    assert rollout.judged_step is not None
    alpha = alpha_of_step(rollout.config, len(rollout.steps) - 1, rollout.judged_step)
    return any(
        result.status is GateStatus.UNKNOWN for result in results(rollout.gates, rollout.config, alpha)
    )


def _is_compared(rollout: Rollout) -> bool:
    return rollout.judged_step is not None and rollout.steps[rollout.step].is_shadow
