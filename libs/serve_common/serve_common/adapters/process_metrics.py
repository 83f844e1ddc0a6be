"""The metrics that every service process has: how late its loop is, whether NATS is there, and what it uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import final

from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from serve_common.adapters.bus_identity import has_identity
from serve_common.logs.standard_error import dropped_lines
from serve_common.loop_lag import LoopLag
from serve_common.measures import Observations
from serve_common.metrics_catalogue import MetricKind, MetricSpec
from serve_common.metrics_catalogue.everywhere import (
    BUS_CONNECTED,
    BUS_IDENTITIES,
    LOG_LINES_DROPPED,
    LOOP_LAG,
    REFUSED_MESSAGES,
)
from serve_common.refused_messages import RefusedMessages


def register_process_metrics(
    registry: CollectorRegistry,
    lag: LoopLag,
    connections: Mapping[str, Callable[[], bool]],
    refused: RefusedMessages,
) -> None:
    """Make ``registry`` show them; ``connections`` tell whether they are up, by the label's value."""
    # Those are one more series for each counter, which says when it began and nothing else.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry.register(_ProcessCollector(lag, connections, refused))
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)


def family_of(spec: MetricSpec) -> CounterMetricFamily | GaugeMetricFamily:
    """An empty family of a counter or gauge, to be shown at this scrape."""
    make = CounterMetricFamily if spec.kind is MetricKind.COUNTER else GaugeMetricFamily
    return make(spec.family, spec.text, labels=spec.labels)


def histogram_of(spec: MetricSpec) -> HistogramMetricFamily:
    """An empty family of a histogram."""
    return HistogramMetricFamily(spec.family, spec.text, labels=spec.labels)


def add_observations(
    family: HistogramMetricFamily,
    labels: list[str],
    buckets: Iterable[float],
    counts: list[int],
    total: float,
) -> None:
    """One series of a histogram; ``counts`` are not cumulative and have one more than there are ``buckets``."""
    bounds = [*(str(float(bound)) for bound in buckets), "+Inf"]
    family.add_metric(labels, list(zip(bounds, accumulate(counts), strict=True)), total)


@final
class _ProcessCollector(Collector):
    def __init__(
        self, lag: LoopLag, connections: Mapping[str, Callable[[], bool]], refused: RefusedMessages
    ) -> None:
        self._refused = refused
        self._lag = lag
        self._connections = connections

    def collect(self) -> Iterable[Metric]:
        yield _lag_family(self._lag.observations)
        connected = family_of(BUS_CONNECTED)
        for name, is_connected in self._connections.items():
            connected.add_metric([name], float(is_connected()))
        yield connected
        identities = family_of(BUS_IDENTITIES)
        identities.add_metric([], float(has_identity()))
        yield identities
        dropped = family_of(LOG_LINES_DROPPED)
        for reason, lines in dropped_lines.by_reason().items():
            dropped.add_metric([reason], float(lines))
        yield dropped
        messages = family_of(REFUSED_MESSAGES)
        for kind, count in self._refused.counts.items():
            messages.add_metric([kind], count)
        yield messages


def _lag_family(observations: Observations) -> Metric:
    family = histogram_of(LOOP_LAG)
    add_observations(family, [], LOOP_LAG.buckets, list(observations.counts), observations.total)
    return family
