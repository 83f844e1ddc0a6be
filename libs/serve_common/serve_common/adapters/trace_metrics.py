"""Says among a process' metrics how many spans never reached the receiver of traces.

Why: a trace that lacks spans looks like one whose work was never done, and nothing in it says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serve_common.adapters.otlp import OpenTracing, SpanCounts
from serve_common.adapters.process_metrics import family_of
from serve_common.metrics_catalogue.everywhere import SPANS_DROPPED


def register_trace_metrics(registry: CollectorRegistry, tracing: OpenTracing | None) -> None:
    """Make ``registry`` show them; nothing when tracing is off."""
    if tracing is not None:
        registry.register(_SpansCollector(tracing.counts))


@final
class _SpansCollector(Collector):
    def __init__(self, counts: SpanCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        dropped = family_of(SPANS_DROPPED)
        for reason, count in self._counts.dropped_by_reason.items():
            dropped.add_metric([reason], count)
        yield dropped
