"""Rollouts as callers see them."""

from __future__ import annotations

from serve_common.api.queries import GetRollouts
from serve_common.api.rollout_views import DifferencesView, GateView, PassedStepView, RolloutView
from serve_common.errors import NotFound
from serve_common.names import deployment_tag
from serve_common.protocol.reports import RequestCounts
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.observed import ObservedState
from serve_controller.core.rollouts.external import external_results
from serve_controller.core.rollouts.judge import alpha_of_step, requests_needed, results
from serve_controller.core.rollouts.record import Rollout, baseline_tag, canary_tag
from serve_controller.core.views.hosts import paginate


def view_rollouts(
    checkpoint: Checkpoint, observed: ObservedState, now: float, query: GetRollouts
) -> list[RolloutView]:
    """All rollouts in the order of their tags, or that of one deployment. Raises `NotFound` for one without."""
    if query.name is not None:
        tag = deployment_tag(query.name)
        if tag not in checkpoint.rollouts:
            raise NotFound(f"name: {tag!r} has no rollout")
        return [view_rollout(checkpoint.rollouts[tag], observed, now)]
    tags = paginate(checkpoint.rollouts.keys(), query)
    return [view_rollout(checkpoint.rollouts[tag], observed, now) for tag in tags]


def view_rollout(rollout: Rollout, observed: ObservedState, now: float) -> RolloutView:
    """One rollout."""
    return RolloutView(
        backend_tag=rollout.backend_tag,
        goal_id=rollout.goal_id,
        version=rollout.candidate.version,
        state=rollout.state.value,
        outcome="" if rollout.outcome is None else rollout.outcome.value,
        reason=rollout.reason,
        steps=[str(step) for step in rollout.steps],
        step=rollout.step,
        is_in_force=rollout.is_in_force,
        in_force_at=rollout.in_force_at or None,
        gates=[*_gates(rollout), *_external_gates(rollout, observed, now)],
        passed=[
            PassedStepView(step=one.step, passed_at=one.passed_at, requests=one.requests, why=one.why)
            for one in rollout.passed
        ],
        differences=_differences(rollout),
        replica_failures={str(tag): count for tag, count in rollout.failures.items()},
        started_at=rollout.started_at,
        decided_at=rollout.decided_at,
        ended_at=rollout.ended_at,
    )


def _differences(rollout: Rollout) -> DifferencesView | None:
    canary, baseline = canary_tag(rollout.backend_tag), baseline_tag(rollout.backend_tag)
    counted, old = (rollout.counted.get(tag, RequestCounts()) for tag in (canary, baseline))
    if not counted.compared:
        return None
    return DifferencesView(
        compared=counted.compared,
        different=counted.different,
        baseline_different=old.different,
        examples=list(rollout.differences),
    )


def _gates(rollout: Rollout) -> list[GateView]:
    alpha = alpha_of_step(rollout.config, len(rollout.steps) - 1, min(rollout.step, len(rollout.steps) - 2))
    found = results(rollout.gates, rollout.config, alpha)
    return [
        GateView(
            kind=result.kind.value,
            status=result.status.value,
            text=result.text,
            canary_requests=result.seen.canary,
            requests_needed=requests_needed(gate, rollout.config, alpha)
            if rollout.judged_step is not None
            else None,
        )
        for gate, result in zip(rollout.gates, found, strict=True)
    ]


def _external_gates(rollout: Rollout, observed: ObservedState, now: float) -> list[GateView]:
    if not rollout.samples_gates:
        return []
    return [
        GateView(
            kind=result.name,
            status=result.status.value,
            text=result.text,
            is_external=True,
            canary_requests=0,
            requests_needed=None,
        )
        for result in external_results(rollout, observed, now)
    ]
