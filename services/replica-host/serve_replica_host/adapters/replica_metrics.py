"""What a replica's process counts, in prometheus_client's multiprocess files, which its host serves.

Why buffered: a file update takes several microseconds, and a request needs four of them; at 30,000 requests a second
that is a third of the time. So plain numbers are counted, and written out twice a second.

Import it only after PROMETHEUS_MULTIPROC_DIR is set (or unset) for good: prometheus_client decides at its import.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter as Tally
from typing import Final, final

from prometheus_client import Counter, Gauge, Histogram

from serve_common.measures import Measures, measures
from serve_common.metrics_catalogue import MetricSpec
from serve_common.metrics_catalogue.replicas import (
    ONGOING_SECONDS,
    REPLICA_CONNECTED,
    REPLICA_IN_FLIGHT,
    REPLICA_LIMIT,
    REPLICA_RECONNECTS,
    REPLICA_REFUSED,
    REPLICA_REQUEST_SECONDS,
    REPLICA_REQUESTS,
    REPLICA_SOCKETS,
    REPLICA_STREAMS,
    REPLICA_WAITING,
)
from serve_common.names import BackendTag
from serve_replica_host.adapters.measure_files import MeasureFiles, add_to_histogram
from serve_replica_host.ports import Occupancy, RequestMetrics

OFF_VARIABLE: Final = "SERVE_UNCOUNTED"
"""Backends whose replicas count no requests, as proxies have it: for measuring what counting costs."""

_BOUNDS: Final = REPLICA_REQUEST_SECONDS.buckets
_OTHER_CODE: Final = "other"
_REASONS: Final = ("busy", "draining")


@final
class _Counts:
    """Of half a second."""

    __slots__ = ("answered", "buckets", "refused", "seconds")

    def __init__(self) -> None:
        self.answered: Tally[int] = Tally()
        self.refused: Tally[str] = Tally()
        self.buckets = [0] * (len(_BOUNDS) + 1)
        self.seconds = 0.0


@final
class PrometheusReplicaMetrics:
    """The counts of one replica."""

    def __init__(self, backend_tag: BackendTag, of_process: Measures) -> None:
        """What always is there is there at once, with 0. ``of_process`` is written out with it."""
        self._backend_tag = backend_tag
        self._files = MeasureFiles(backend_tag, of_process)
        self._counts = _Counts()
        self._turned: list[_Counts] = []
        """What is to be written."""
        self._ongoing_s = 0.0
        self._reconnects = 0
        self._requests_total = _counter(REPLICA_REQUESTS)
        self._refused_total = _counter(REPLICA_REFUSED)
        for reason in _REASONS:
            self._refused_total.labels(backend_tag, reason)
        self._ongoing_total = _counter(ONGOING_SECONDS).labels(backend_tag)
        self._reconnects_total = _counter(REPLICA_RECONNECTS).labels(backend_tag)
        self._request_seconds = Histogram(
            REPLICA_REQUEST_SECONDS.family,
            REPLICA_REQUEST_SECONDS.text,
            REPLICA_REQUEST_SECONDS.labels,
            buckets=_BOUNDS,
            registry=None,
        ).labels(backend_tag)
        self._in_flight = self._gauge(REPLICA_IN_FLIGHT)
        self._limit = self._gauge(REPLICA_LIMIT)
        self._waiting = self._gauge(REPLICA_WAITING)
        self._streams = self._gauge(REPLICA_STREAMS)
        self._sockets = self._gauge(REPLICA_SOCKETS)
        self._connected = self._gauge(REPLICA_CONNECTED)

    def count_answered(self, status: int, seconds: float) -> None:
        """As `RequestMetrics`."""
        counts = self._counts
        counts.answered[status] += 1
        counts.buckets[bisect_left(_BOUNDS, seconds)] += 1
        counts.seconds += seconds

    def count_refused(self, reason: str) -> None:
        """As `RequestMetrics`."""
        self._counts.refused[reason] += 1

    def turn(self) -> None:
        """As `RequestMetrics`."""
        if self._counts.answered or self._counts.refused:
            self._turned.append(self._counts)
            self._counts = _Counts()

    def write(self, occupancy: Occupancy) -> None:
        """As `RequestMetrics`."""
        turned, self._turned = self._turned, []
        for counts in turned:
            self._add(counts)
        self._show(occupancy)
        self._files.write()

    def _add(self, counts: _Counts) -> None:
        for status, count in counts.answered.items():
            code = str(status) if 100 <= status <= 999 else _OTHER_CODE
            self._requests_total.labels(self._backend_tag, code).inc(count)
        for reason, count in counts.refused.items():
            self._refused_total.labels(self._backend_tag, reason).inc(count)
        add_to_histogram(self._request_seconds, counts.buckets, counts.seconds)

    def _show(self, occupancy: Occupancy) -> None:
        # An answer may have left before the last look, and be taken note of after it; then nothing is added.
        if occupancy.ongoing_s > self._ongoing_s:
            self._ongoing_total.inc(occupancy.ongoing_s - self._ongoing_s)
            self._ongoing_s = occupancy.ongoing_s
        if occupancy.reconnects > self._reconnects:
            self._reconnects_total.inc(occupancy.reconnects - self._reconnects)
            self._reconnects = occupancy.reconnects
        self._in_flight.set(occupancy.in_flight)
        self._limit.set(occupancy.limit)
        self._waiting.set(occupancy.waiting)
        self._streams.set(occupancy.streams)
        self._sockets.set(occupancy.sockets)
        self._connected.set(float(occupancy.is_connected))

    def _gauge(self, spec: MetricSpec) -> Gauge:
        gauge = Gauge(spec.family, spec.text, spec.labels, multiprocess_mode="livesum", registry=None)
        return gauge.labels(self._backend_tag)


@final
class UncountedRequests:
    """Counts nothing."""

    def count_answered(self, status: int, seconds: float) -> None:
        """As `RequestMetrics`."""

    def count_refused(self, reason: str) -> None:
        """As `RequestMetrics`."""

    def turn(self) -> None:
        """As `RequestMetrics`."""

    def write(self, occupancy: Occupancy) -> None:
        """As `RequestMetrics`."""


def _counter(spec: MetricSpec) -> Counter:
    return Counter(spec.family, spec.text, spec.labels, registry=None)


def make_replica_metrics(backend_tag: BackendTag) -> RequestMetrics:
    """The metrics of this process, in no registry: in multiprocess mode the files are what is read."""
    if backend_tag in os.environ.get(OFF_VARIABLE, "").split():
        return UncountedRequests()
    return PrometheusReplicaMetrics(backend_tag, measures)
