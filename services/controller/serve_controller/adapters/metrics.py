"""The controller's metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from serve_common.wires.views import GoalStatus
from serve_controller.core.objects import Goal
from serve_controller.core.views import count_replicas
from serve_controller.shell.term import Term

_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class ControllerMetrics:
    """Implements `shell.boundary.Telemetry`; everything about the state itself is read when it is scraped."""

    def __init__(self, registry: CollectorRegistry, current_term: Callable[[], Term | None]) -> None:
        self._reconcile_seconds = Histogram(
            "serve_controller_reconcile_seconds",
            "Time to make one plan",
            buckets=_SECONDS,
            registry=registry,
        )
        self._checkpoint_seconds = Histogram(
            "serve_controller_checkpoint_seconds",
            "Time to record one change in Postgres",
            buckets=_SECONDS,
            registry=registry,
        )
        self._effects = Counter(
            "serve_controller_effects_total",
            "Effects performed, by kind and outcome (ok or the error's type)",
            ["effect", "outcome"],
            registry=registry,
        )
        self.nats_reconnects = Counter(
            "serve_controller_nats_reconnects_total", "Reconnects to NATS", registry=registry
        )
        registry.register(_TermCollector(current_term))
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)

    def effect_performed(self, effect: str, seconds: float, error: str | None) -> None:
        """See `Telemetry.effect_performed`."""
        self._effects.labels(effect, error or "ok").inc()
        if effect.startswith("record_"):
            self._checkpoint_seconds.observe(seconds)

    def plan_made(self, seconds: float) -> None:
        """See `Telemetry.plan_made`."""
        self._reconcile_seconds.observe(seconds)


class _TermCollector(Collector):
    def __init__(self, current_term: Callable[[], Term | None]) -> None:
        self._current_term = current_term

    def collect(self) -> Iterable[Metric]:
        term = self._current_term()
        leader = GaugeMetricFamily("serve_controller_leader", "1 while this controller leads")
        leader.add_metric([], 0.0 if term is None else 1.0)
        yield leader
        if term is None:
            return
        yield _gauge("serve_controller_epoch", "Epoch of this leader", term.epoch)
        yield _gauge(
            "serve_controller_store_available", "1 while Postgres answers", float(term.is_store_available)
        )
        yield _replicas(term)
        yield _goals(list(term.checkpoint.goals.values()))


def _gauge(name: str, text: str, value: float) -> Metric:
    gauge = GaugeMetricFamily(name, text)
    gauge.add_metric([], value)
    return gauge


def _replicas(term: Term) -> Metric:
    gauge = GaugeMetricFamily(
        "serve_controller_replicas", "Replicas by backend and state", labels=["backend_tag", "state"]
    )
    for row in count_replicas(term.checkpoint):
        gauge.add_metric([row.backend_tag, row.state], row.count)
    return gauge


def _goals(goals: list[Goal]) -> Metric:
    gauge = GaugeMetricFamily(
        "serve_controller_goals", "Goals that are remembered, by status", labels=["status"]
    )
    for status in GoalStatus:
        gauge.add_metric([status.value], sum(goal.status is status for goal in goals))
    return gauge
