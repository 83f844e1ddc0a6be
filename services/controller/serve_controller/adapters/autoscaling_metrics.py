"""What the autoscaler saw, wanted and did, for Prometheus; read from the leader's state when it is scraped.

Why a collector: what is not autoscaled any more is gone from the next scrape, and who does not lead shows none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serve_common.adapters.process_metrics import family_of
from serve_common.metrics_catalogue.controllers import (
    DATA_AGE,
    DECISIONS,
    MAX_REPLICAS,
    MIN_REPLICAS,
    PAUSED,
    READINGS,
    SEEN_REQUESTS,
    TARGET_REPLICAS,
    VERDICT,
    WAKEUPS,
    WANTED_REPLICAS,
)
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
        decisions, wakeups = family_of(DECISIONS), family_of(WAKEUPS)
        for tag, (verdicts, count) in autoscaler.counts().items():
            for verdict in Verdict:
                decisions.add_metric([tag, verdict.value], verdicts.get(verdict.value, 0))
            wakeups.add_metric([tag], count)
        yield decisions
        yield wakeups
        readings = family_of(READINGS)
        for (source, outcome), count in list(autoscaler.readings.items()):
            readings.add_metric([source, outcome], count)
        yield readings


def _limits(backends: Iterable[Backend]) -> Iterable[Metric]:
    target, paused = family_of(TARGET_REPLICAS), family_of(PAUSED)
    low, high = family_of(MIN_REPLICAS), family_of(MAX_REPLICAS)
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
    seen, wanted = family_of(SEEN_REQUESTS), family_of(WANTED_REPLICAS)
    age, verdict = family_of(DATA_AGE), family_of(VERDICT)
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
