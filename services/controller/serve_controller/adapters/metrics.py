"""The controller's metrics for Prometheus."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serve_common.adapters.process_metrics import family_of
from serve_common.metrics_catalogue.controllers import (
    CHECKPOINT_SECONDS,
    CONTROLLER_RECONNECTS,
    DROPPED_CALLS,
    EFFECTS,
    EPOCH,
    GOALS,
    GOALS_ENDED,
    HOSTS,
    LEADER,
    OLDEST_PENDING_GOAL,
    PROXIES,
    RECONCILE_SECONDS,
    REPLICAS,
    REPLICAS_WANTED,
    SNAPSHOT_ID,
    STORE_AVAILABLE,
    STORE_RESTORED,
)
from serve_common.metrics_catalogue.values import MetricSpec
from serve_common.names import ProxyId
from serve_common.refused_messages import RefusedMessages
from serve_common.wires.views import GoalStatus
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import Goal
from serve_controller.core.observed import HostStatus, ObservedState, host_status, is_proxy_live
from serve_controller.core.views import count_replicas
from serve_controller.shell.term import Term

_PROXY_STATUSES: Final = ("live", "leaving", "lost")


class ControllerMetrics:
    """Implements `shell.boundary.Telemetry`; everything about the state itself is read when it is scraped."""

    def __init__(
        self,
        registry: CollectorRegistry,
        current_term: Callable[[], Term | None],
        now: Callable[[], float],
        refused: RefusedMessages,
    ) -> None:
        """``now`` gives seconds since 1970; ``refused`` is shown by `register_process_metrics`."""
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
        """See `Telemetry.effect_performed`."""
        self._effects.labels(effect, error or "ok").inc()
        if effect.startswith("record_"):
            self._checkpoint_seconds.observe(seconds)

    def plan_made(self, seconds: float) -> None:
        """See `Telemetry.plan_made`."""
        self._reconcile_seconds.observe(seconds)

    def message_refused(self, kind: str, sender: str, error: Exception) -> None:
        """See `Telemetry.message_refused`."""
        self._refused.refuse(kind, sender, error)


class _TermCollector(Collector):
    def __init__(self, current_term: Callable[[], Term | None], now: Callable[[], float]) -> None:
        self._current_term = current_term
        self._now = now

    def collect(self) -> Iterable[Metric]:
        term = self._current_term()
        yield _single(LEADER, 0.0 if term is None else 1.0)
        if term is None:
            return
        now, checkpoint, observed = self._now(), term.checkpoint, term.observed
        yield _single(EPOCH, term.epoch)
        yield _single(STORE_AVAILABLE, float(term.is_store_available))
        yield _single(STORE_RESTORED, checkpoint.counters.restored_at)
        yield _single(SNAPSHOT_ID, checkpoint.counters.snapshot)
        yield _replicas(checkpoint)
        yield _replicas_wanted(checkpoint)
        yield _goals(list(checkpoint.goals.values()))
        yield _goals_ended(term.goals_ended)
        pending_s = [now - goal.created_at for goal in checkpoint.pending.values()]
        yield _single(OLDEST_PENDING_GOAL, max(0.0, *pending_s) if pending_s else 0.0)
        yield _hosts(checkpoint, observed, now)
        yield _proxies(checkpoint, observed, now)


def _histogram(spec: MetricSpec, registry: CollectorRegistry) -> Histogram:
    return Histogram(spec.family, spec.text, buckets=spec.buckets, registry=registry)


def _single(spec: MetricSpec, value: float) -> Metric:
    gauge = family_of(spec)
    gauge.add_metric([], value)
    return gauge


def _replicas(checkpoint: Checkpoint) -> Metric:
    gauge = family_of(REPLICAS)
    for row in count_replicas(checkpoint):
        gauge.add_metric([row.backend_tag, row.state], row.count)
    return gauge


def _replicas_wanted(checkpoint: Checkpoint) -> Metric:
    gauge = family_of(REPLICAS_WANTED)
    for tag, backend in checkpoint.backends.items():
        gauge.add_metric([tag], backend.num_wanted)
    return gauge


def _goals(goals: list[Goal]) -> Metric:
    gauge = family_of(GOALS)
    for status in GoalStatus:
        gauge.add_metric([status.value], sum(goal.status is status for goal in goals))
    return gauge


def _goals_ended(ended: Mapping[GoalStatus, int]) -> Metric:
    counter = family_of(GOALS_ENDED)
    for status in GoalStatus:
        if status is not GoalStatus.PENDING:
            counter.add_metric([status.value], ended.get(status, 0))
    return counter


def _hosts(checkpoint: Checkpoint, observed: ObservedState, now: float) -> Metric:
    gauge = family_of(HOSTS)
    host_ids = {*checkpoint.hosts, *observed.hosts}
    counts = Tally(host_status(observed, host_id, now) for host_id in host_ids)
    for status in HostStatus:
        gauge.add_metric([status.value], counts[status])
    return gauge


def _proxies(checkpoint: Checkpoint, observed: ObservedState, now: float) -> Metric:
    gauge = family_of(PROXIES)
    counts = Tally(
        _proxy_status(observed, proxy_id, now) for proxy_id in {*checkpoint.proxies, *observed.proxies}
    )
    for status in _PROXY_STATUSES:
        gauge.add_metric([status], counts[status])
    return gauge


def _proxy_status(observed: ObservedState, proxy_id: ProxyId, now: float) -> str:
    if is_proxy_live(observed, proxy_id, now):
        return "live"
    known = observed.proxies.get(proxy_id)
    return "leaving" if known is not None and known.report.leaving else "lost"
