"""What the autoscaler saw, wanted and did, for Prometheus; read from the leader's state when it is scraped.

Why a collector: what is not autoscaled any more is gone from the next scrape, and who does not lead shows none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serve_common.names import BackendTag
from serve_common.ports import Clock
from serve_controller.core.autoscaling.values import ScalingStatus, Verdict
from serve_controller.core.objects import Backend
from serve_controller.shell.service import ControllerService


class AutoscalingCollector(Collector):
    """Of every backend that has an ``autoscaling_config``."""

    def __init__(self, current_service: Callable[[], ControllerService | None], clock: Clock) -> None:
        self._current_service = current_service
        self._clock = clock

    def describe(self) -> Iterable[Metric]:
        """Nothing: what there is depends on the backends."""
        return []

    def collect(self) -> Iterable[Metric]:
        """All families with their present values."""
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
        decisions = CounterMetricFamily(
            "serve_autoscaler_decisions",
            "Looks at the load, by what they came to",
            labels=["backend_tag", "verdict"],
        )
        wakeups = CounterMetricFamily(
            "serve_autoscaler_wakeups", "Times that a waiting request woke it from zero", labels=["backend_tag"]
        )
        for tag, (verdicts, count) in autoscaler.counts().items():
            for verdict in Verdict:
                decisions.add_metric([tag, verdict.value], verdicts.get(verdict.value, 0))
            wakeups.add_metric([tag], count)
        yield decisions
        yield wakeups
        readings = CounterMetricFamily(
            "serve_autoscaler_readings",
            "Readings of a load, by where it was read and whether it could be used",
            labels=["source", "outcome"],
        )
        for (source, outcome), count in list(autoscaler.readings.items()):
            readings.add_metric([source, outcome], count)
        yield readings


def _limits(backends: Iterable[Backend]) -> Iterable[Metric]:
    target = _gauge("serve_autoscaler_target_replicas", "Replicas that were decided on")
    low = _gauge("serve_autoscaler_min_replicas", "Configured min_replicas")
    high = _gauge("serve_autoscaler_max_replicas", "Configured max_replicas")
    paused = _gauge("serve_autoscaler_paused", "1 while a user has paused autoscaling")
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
    seen = _gauge(
        "serve_autoscaler_seen_requests",
        "Requests worked on and waiting, over the look-back period, or what the query gave; absent while not known",
    )
    wanted = _gauge(
        "serve_autoscaler_wanted_replicas", "Replicas that the load comes to, before limits and delays"
    )
    age = _gauge("serve_autoscaler_data_age_seconds", "Age of the newest reading that could be used")
    verdict = GaugeMetricFamily(
        "serve_autoscaler_verdict",
        "1 for what the last look at the load came to",
        labels=["backend_tag", "verdict"],
    )
    for tag, status in statuses.items():
        decision = status.decision
        if decision.seen is not None:
            seen.add_metric([tag], decision.seen)
        if decision.wanted is not None:
            wanted.add_metric([tag], decision.wanted)
        if status.read_at is not None:
            age.add_metric([tag], max(0.0, now - status.read_at))
        for each in Verdict:
            verdict.add_metric([tag, each.value], each is decision.verdict)
    return seen, wanted, age, verdict


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=["backend_tag"])
