"""What a replica's process counts, in prometheus_client's multiprocess files, which its host serves.

Why buffered: a file update takes several microseconds, and a request needs four of them; at 30,000 requests a second
that is a third of the time. So plain numbers are counted, and written out twice a second.

Import it only after PROMETHEUS_MULTIPROC_DIR is set (or unset) for good: prometheus_client decides at its import.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Tally
from typing import Final, final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from serve_common.names import BackendTag

SECONDS_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0
)  # fmt: skip


@final
class PrometheusReplicaMetrics:
    """The counts of one replica."""

    def __init__(self, backend_tag: BackendTag, registry: CollectorRegistry) -> None:
        self._backend_tag = backend_tag
        self._answered: Tally[int] = Tally()
        self._refused: Tally[str] = Tally()
        self._buckets = [0] * (len(SECONDS_BUCKETS) + 1)
        self._seconds = 0.0
        self._requests_total = Counter(
            "serve_replica_requests_total",
            "Requests that left a replica, by the HTTP status of the answer (499: the caller went away)",
            ["backend_tag", "code"],
            registry=registry,
        )
        self._refused_total = Counter(
            "serve_replica_refused_total",
            "Requests that a replica refused because it was busy or draining",
            ["backend_tag", "reason"],
            registry=registry,
        )
        self._request_seconds = Histogram(
            "serve_replica_request_seconds",
            "From a request's first frame to its answer's last one, inside the replica",
            ["backend_tag"],
            buckets=SECONDS_BUCKETS,
            registry=registry,
        ).labels(backend_tag)
        self._in_flight = Gauge(
            "serve_replica_in_flight_requests",
            "Requests that replicas work on",
            ["backend_tag"],
            multiprocess_mode="livesum",
            registry=registry,
        ).labels(backend_tag)

    def count_answered(self, status: int, seconds: float) -> None:
        """As `RequestMetrics`."""
        self._answered[status] += 1
        self._buckets[bisect_left(SECONDS_BUCKETS, seconds)] += 1
        self._seconds += seconds

    def count_refused(self, reason: str) -> None:
        """As `RequestMetrics`."""
        self._refused[reason] += 1

    def write(self, in_flight: int) -> None:
        """Write out what was counted since the last time."""
        for status, count in self._answered.items():
            self._requests_total.labels(self._backend_tag, str(status)).inc(count)
        for reason, count in self._refused.items():
            self._refused_total.labels(self._backend_tag, reason).inc(count)
        if self._answered:
            # The public way adds one observation at a time.
            histogram = self._request_seconds
            for bucket, count in zip(histogram._buckets, self._buckets, strict=True):  # noqa: SLF001 - see above
                if count:
                    bucket.inc(count)
            histogram._sum.inc(self._seconds)  # noqa: SLF001 - see above
        self._in_flight.set(in_flight)
        self._answered.clear()
        self._refused.clear()
        self._buckets = [0] * len(self._buckets)
        self._seconds = 0.0


def make_replica_metrics(backend_tag: BackendTag) -> PrometheusReplicaMetrics:
    """The metrics of this process. Their registry is of no use in multiprocess mode: the files are what is read."""
    return PrometheusReplicaMetrics(backend_tag, CollectorRegistry())
