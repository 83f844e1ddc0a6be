"""The metrics of rollouts for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serve_common.runtime.operations import build_family
from serve_common.telemetry.catalogue.rollouts import (
    ROLLOUT_BAD,
    ROLLOUT_COMPARED,
    ROLLOUT_DECIDED,
    ROLLOUT_GATE,
    ROLLOUT_PAUSED,
    ROLLOUT_SHARE,
    ROLLOUT_STEP,
    ROLLOUT_STEP_SECONDS,
    ROLLOUT_STEPS,
)
from serve_controller.core.observed import ObservedState
from serve_controller.core.rollouts.external import external_results
from serve_controller.core.rollouts.judge import GateResult, GateStatus, alpha_of_step, results
from serve_controller.core.rollouts.record import Rollout, RolloutState
from serve_controller.shell.control_loop import Term


class RolloutCollector(Collector):
    """Metrics of every rollout, read from the leader's state at each scrape; a standby exports none."""

    def __init__(self, current_term: Callable[[], Term | None], now: Callable[[], float]) -> None:
        """``now`` returns seconds since 1970."""
        self._current_term = current_term
        self._now = now

    def describe(self) -> Iterable[Metric]:
        """No static metrics: they depend on the rollouts."""
        return []

    def collect(self) -> Iterable[Metric]:
        """All metric families with their current values."""
        term = self._current_term()
        if term is None:
            return
        rollouts = list(term.checkpoint.rollouts.values())
        yield from _steps([rollout for rollout in rollouts if rollout.is_active], self._now())
        yield from _gates(rollouts, term.observed, self._now())
        yield build_family(
            ROLLOUT_DECIDED,
            (
                ([rollout.backend_tag, rollout.outcome.value], rollout.decided_at)
                for rollout in rollouts
                if rollout.outcome is not None and rollout.decided_at is not None
            ),
        )


def _steps(rollouts: Iterable[Rollout], now: float) -> Iterable[Metric]:
    step, steps, share = build_family(ROLLOUT_STEP), build_family(ROLLOUT_STEPS), build_family(ROLLOUT_SHARE)
    seconds, paused = build_family(ROLLOUT_STEP_SECONDS), build_family(ROLLOUT_PAUSED)
    for rollout in rollouts:
        tag = [rollout.backend_tag]
        by = rollout.traffic_step
        step.add_metric(tag, rollout.step + 1)
        steps.add_metric(tag, len(rollout.steps))
        share.add_metric(tag, 0.0 if by is None or by.is_shadow else by.share)
        seconds.add_metric(tag, max(0.0, now - rollout.in_force_at) if rollout.is_in_force else 0.0)
        paused.add_metric(tag, rollout.state is RolloutState.PAUSED)
    return step, steps, share, seconds, paused


def _gates(rollouts: Iterable[Rollout], observed: ObservedState, now: float) -> Iterable[Metric]:
    gate, compared, bad = (
        build_family(ROLLOUT_GATE),
        build_family(ROLLOUT_COMPARED),
        build_family(ROLLOUT_BAD),
    )
    for rollout in rollouts:
        for result in _results(rollout):
            name, seen = [rollout.backend_tag, result.kind.value], result.seen
            for status in GateStatus:
                gate.add_metric([*name, status.value], status is result.status)
            for version, requests, failed in (
                ("canary", seen.canary, seen.canary_bad),
                ("baseline", seen.baseline, seen.baseline_bad),
            ):
                compared.add_metric([*name, version], requests)
                bad.add_metric([*name, version], failed)
        for external in external_results(rollout, observed, now) if rollout.samples_gates else ():
            for status in GateStatus:
                gate.add_metric([rollout.backend_tag, external.name, status.value], status is external.status)
    return gate, compared, bad


def _results(rollout: Rollout) -> tuple[GateResult, ...]:
    if rollout.judged_step is None:
        return ()
    alpha = alpha_of_step(rollout.config, len(rollout.steps) - 1, rollout.judged_step)
    return results(rollout.gates, rollout.config, alpha)
