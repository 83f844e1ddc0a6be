"""Writes out a process' `Measures` into prometheus_client's multiprocess files, with the replica's backend as a label.

Import it only after PROMETHEUS_MULTIPROC_DIR is set (or unset) for good: prometheus_client decides at its import.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from prometheus_client import Counter, Gauge, Histogram

from serve_common.measures import Aggregate, Distribution, Level, Measures, Total
from serve_common.names import BackendTag
from serve_replica_host.adapters.allocated_files import use_allocated_files

use_allocated_files()

_BACKEND: Final = "backend_tag"
_MODES: Final = {
    Aggregate.SUM: "livesum",
    Aggregate.MAX: "livemax",
    Aggregate.MIN: "livemin",
    Aggregate.LATEST: "livemostrecent",
}


def add_to_histogram(histogram: Histogram, counts: Sequence[int], total: float) -> None:
    """Add many observations at once; the public way adds one at a time. ``counts`` are not cumulative."""
    for bucket, count in zip(histogram._buckets, counts, strict=True):  # noqa: SLF001 - see above
        if count:
            bucket.inc(count)
    histogram._sum.inc(total)  # noqa: SLF001 - see above


@final
class MeasureFiles:
    """For one replica; all methods on one thread."""

    def __init__(self, backend_tag: BackendTag, of_process: Measures) -> None:
        self._backend_tag = backend_tag
        self._measures = of_process
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}

    def write(self) -> None:
        """Everything that was counted since the last time."""
        for measure in self._measures.pending():
            if isinstance(measure, Total):
                counter = self._counter(measure)
                for key, value in measure.drain().items():
                    counter.labels(self._backend_tag, *key).inc(value)
            elif isinstance(measure, Level):
                gauge = self._gauge(measure)
                for key, value in measure.drain().items():
                    gauge.labels(self._backend_tag, *key).set(value)
            else:
                histogram = self._histogram(measure)
                for key, observations in measure.drain().items():
                    labelled = histogram.labels(self._backend_tag, *key)
                    add_to_histogram(labelled, observations.counts, observations.total)

    def _counter(self, measure: Total) -> Counter:
        spec = measure.spec
        counter = self._counters.get(spec.name)
        if counter is None:
            counter = Counter(spec.family, spec.text, (_BACKEND, *measure.labels), registry=None)
            self._counters[spec.name] = counter
        return counter

    def _gauge(self, measure: Level) -> Gauge:
        spec = measure.spec
        gauge = self._gauges.get(spec.name)
        if gauge is None:
            gauge = self._gauges[spec.name] = Gauge(
                spec.family,
                spec.text,
                (_BACKEND, *measure.labels),
                multiprocess_mode=_MODES[measure.aggregate],  # type: ignore[arg-type]
                registry=None,
            )
        return gauge

    def _histogram(self, measure: Distribution) -> Histogram:
        spec = measure.spec
        histogram = self._histograms.get(spec.name)
        if histogram is None:
            histogram = self._histograms[spec.name] = Histogram(
                spec.family, spec.text, (_BACKEND, *measure.labels), buckets=spec.buckets, registry=None
            )
        return histogram
