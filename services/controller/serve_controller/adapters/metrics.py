"""The controller's metrics for Prometheus, those of the autoscaler included."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serve_common.api.views import GoalStatus
from serve_common.clock import Clock
from serve_common.names import BackendTag, ProxyId
from serve_common.runtime.operations import build_family, build_single
from serve_common.telemetry.catalogue.controllers import (
    CHECKPOINT_SECONDS,
    CONTROLLER_RECONNECTS,
    DATA_AGE,
    DECISIONS,
    DROPPED_CALLS,
    EFFECTS,
    EPOCH,
    GOALS,
    GOALS_ENDED,
    HOSTS,
    LEADER,
    MAX_REPLICAS,
    MIN_REPLICAS,
    OLDEST_PENDING_GOAL,
    PAUSED,
    PROXIES,
    READINGS,
    RECONCILE_SECONDS,
    REPLICAS,
    REPLICAS_WANTED,
    SEEN_REQUESTS,
    SNAPSHOT_ID,
    STORE_AVAILABLE,
    STORE_RESTORED,
    TARGET_REPLICAS,
    VERDICT,
    WAKEUPS,
    WANTED_REPLICAS,
)
from serve_common.telemetry.catalogue.specs import MetricSpec
from serve_common.telemetry.log_lines import RefusedMessages
from serve_controller.core.autoscaling.values import ScalingDecisionKind, ScalingStatus
from serve_controller.core.objects import Backend
from serve_controller.core.observed import HostStatus, ObservedState, host_status, is_proxy_live
from serve_controller.core.views.backends import count_replicas
from serve_controller.shell.control_loop import Term
from serve_controller.shell.service import ControllerService


class AutoscalingCollector(Collector):
    """Metrics of every backend that has an ``autoscaling_config``.

    They are read from the leader's state at each scrape: a backend that is no longer autoscaled is gone from the next
    one, and a standby exports none.
    """

    def __init__(self, current_service: Callable[[], ControllerService | None], clock: Clock) -> None:
        self._current_service = current_service
        self._clock = clock

    def describe(self) -> Iterable[Metric]:
        """No static metrics: they depend on the backends."""
        return []

    def collect(self) -> Iterable[Metric]:
        """All metric families with their current values."""
        service = self._current_service()
        term = None if service is None else service.term
        autoscaler = None if service is None else service.autoscaler
        if term is None or autoscaler is None:
            return
        backends = [
            backend
            for backend in list(term.checkpoint.backends.values())
            if not backend.deleting and backend.target.backend_config.autoscaling_config is not None
        ]
        yield from _limits(backends)
        yield from _findings(dict(term.autoscaling), self._clock.now())
        decisions, wakeups = build_family(DECISIONS), build_family(WAKEUPS)
        for tag, (kinds, count) in autoscaler.counts().items():
            for verdict in ScalingDecisionKind:
                decisions.add_metric([tag, verdict.value], kinds.get(verdict.value, 0))
            wakeups.add_metric([tag], count)
        yield decisions
        yield wakeups
        yield build_family(READINGS, list(autoscaler.samples.items()))


def _limits(backends: Iterable[Backend]) -> Iterable[Metric]:
    target, paused = build_family(TARGET_REPLICAS), build_family(PAUSED)
    low, high = build_family(MIN_REPLICAS), build_family(MAX_REPLICAS)
    for backend in backends:
        config = backend.target.backend_config.autoscaling_config
        assert config is not None
        tag = [backend.backend_tag]
        target.add_metric(tag, backend.num_wanted)
        low.add_metric(tag, config.min_replicas)
        high.add_metric(tag, config.max_replicas)
        paused.add_metric(tag, bool(backend.autoscaling_paused))
    return target, low, high, paused


def _findings(statuses: Mapping[BackendTag, ScalingStatus], now: float) -> Iterable[Metric]:
    seen, wanted = build_family(SEEN_REQUESTS), build_family(WANTED_REPLICAS)
    age, verdict = build_family(DATA_AGE), build_family(VERDICT)
    for tag, status in statuses.items():
        decision = status.decision
        if decision.seen is not None:
            seen.add_metric([tag], decision.seen)
        if decision.wanted is not None:
            wanted.add_metric([tag], decision.wanted)
        if status.read_at is not None:
            age.add_metric([tag], max(0.0, now - status.read_at))
        for each in ScalingDecisionKind:
            verdict.add_metric([tag, each.value], each is decision.verdict)
    return seen, wanted, age, verdict


_PROXY_STATUSES: Final = ("live", "leaving", "lost")


class ControllerMetrics:
    """Implements `shell.boundary.Telemetry`; metrics of the state itself are collected when scraped."""

    def __init__(
        self,
        registry: CollectorRegistry,
        current_term: Callable[[], Term | None],
        now: Callable[[], float],
        refused: RefusedMessages,
    ) -> None:
        """``now`` returns seconds since 1970; ``refused`` is exported by `register_process_metrics`."""
        self._refused = refused
        self._reconcile_seconds = _histogram(RECONCILE_SECONDS, registry)
        self._checkpoint_seconds = _histogram(CHECKPOINT_SECONDS, registry)
        self._effects = Counter(EFFECTS.family, EFFECTS.text, EFFECTS.labels, registry=registry)
        self.nats_reconnects = Counter(
            CONTROLLER_RECONNECTS.family, CONTROLLER_RECONNECTS.text, registry=registry
        )
        self.dropped_calls = Counter(DROPPED_CALLS.family, DROPPED_CALLS.text, registry=registry)
        registry.register(_TermCollector(current_term, now))

    def effect_performed(self, effect: str, seconds: float, error: str | None) -> None:
        """Count the effect and observe its duration."""
        self._effects.labels(effect, error or "ok").inc()
        if effect.startswith("record_"):
            self._checkpoint_seconds.observe(seconds)

    def plan_made(self, seconds: float) -> None:
        """Observe the duration of a plan."""
        self._reconcile_seconds.observe(seconds)

    def message_refused(self, kind: str, sender: str, error: Exception) -> None:
        """Count and log a refused message."""
        self._refused.refuse(kind, sender, error)


class _TermCollector(Collector):
    def __init__(self, current_term: Callable[[], Term | None], now: Callable[[], float]) -> None:
        self._current_term = current_term
        self._now = now

    def collect(self) -> Iterable[Metric]:
        term = self._current_term()
        yield build_single(LEADER, 0.0 if term is None else 1.0)
        if term is None:
            return
        now, checkpoint, observed = self._now(), term.checkpoint, term.observed
        yield build_single(EPOCH, term.epoch)
        yield build_single(STORE_AVAILABLE, float(term.is_store_available))
        yield build_single(STORE_RESTORED, checkpoint.counters.restored_at)
        yield build_single(SNAPSHOT_ID, checkpoint.counters.snapshot)
        counts = count_replicas(checkpoint)
        yield build_family(REPLICAS, (([tag, state.value], count) for tag, state, count in counts))
        backends = checkpoint.backends.items()
        yield build_family(REPLICAS_WANTED, (([tag], backend.num_wanted) for tag, backend in backends))
        goals = Tally(goal.status for goal in checkpoint.goals.values())
        yield build_family(GOALS, (([status.value], goals[status]) for status in GoalStatus))
        ended = [status for status in GoalStatus if status is not GoalStatus.PENDING]
        yield build_family(
            GOALS_ENDED, (([status.value], term.goals_ended.get(status, 0)) for status in ended)
        )
        pending_s = [now - goal.created_at for goal in checkpoint.pending.values()]
        yield build_single(OLDEST_PENDING_GOAL, max(0.0, *pending_s) if pending_s else 0.0)
        hosts = Tally(host_status(observed, each, now) for each in {*checkpoint.hosts, *observed.hosts})
        yield build_family(HOSTS, (([status.value], hosts[status]) for status in HostStatus))
        proxies = Tally(
            _proxy_status(observed, each, now) for each in {*checkpoint.proxies, *observed.proxies}
        )
        yield build_family(PROXIES, (([status], proxies[status]) for status in _PROXY_STATUSES))


def _histogram(spec: MetricSpec, registry: CollectorRegistry) -> Histogram:
    return Histogram(spec.family, spec.text, buckets=spec.buckets, registry=registry)


def _proxy_status(observed: ObservedState, proxy_id: ProxyId, now: float) -> str:
    if is_proxy_live(observed, proxy_id, now):
        return "live"
    known = observed.proxies.get(proxy_id)
    return "leaving" if known is not None and known.report.leaving else "lost"
