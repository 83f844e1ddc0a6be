"""What a replica's own calls through handles wait for, and how many of its spans were dropped."""

from __future__ import annotations

from typing import Final, final

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from serve_common.names import BackendTag
from serve_common.runtime.request_context import CurrentReplica
from serve_common.telemetry.catalogue.proxies import QUEUED_SECONDS
from serve_common.telemetry.catalogue.replicas import HANDLE_QUEUE_DEPTH
from serve_common.telemetry.catalogue.services import SPANS_DROPPED
from serve_common.telemetry.otlp import SpanCounts

_log = structlog.get_logger(__name__)

BACKENDS_MAX: Final = 1000
"""Backends that one process writes metrics for; a series, once written, stays as long as the process."""


@final
class PrometheusHandleMetrics:
    """The queues of this process' handles."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        """``registry`` is of no use in multiprocess mode: the files are what is read."""
        self._seconds: dict[BackendTag, float] = {}
        """As they were last told, for every backend that has series."""
        self._depths: dict[BackendTag, int] = {}
        """As they were last written; what is missing is 0."""
        self._is_full = False
        self._seconds_total = Counter(
            QUEUED_SECONDS.family, QUEUED_SECONDS.text, QUEUED_SECONDS.labels, registry=registry
        )
        self._depth = Gauge(
            HANDLE_QUEUE_DEPTH.family,
            HANDLE_QUEUE_DEPTH.text,
            HANDLE_QUEUE_DEPTH.labels,
            multiprocess_mode="livesum",
            registry=registry,
        )

    def write(self, replica: CurrentReplica) -> None:
        """Write out what has changed since the last time.

        A backend has its series from the moment that its application or a call makes it known, with 0: to Prometheus,
        a counter that first appears with a value has not risen.
        """
        for tag in replica.companions:
            self._knows(tag)
        queues = {} if replica.handle_queues is None else replica.handle_queues()
        for tag, queue in queues.items():
            if not self._knows(tag):
                continue
            before = self._seconds[tag]
            # Much less than before: handles were connected anew, and count from 0. Hardly less: their thread is about
            # to note that a call left the queue a moment ago.
            is_anew = queue.seconds < before / 2
            risen = queue.seconds - (0.0 if is_anew else before)
            if risen > 0 or is_anew:
                self._seconds[tag] = queue.seconds
                self._seconds_total.labels(tag).inc(max(risen, 0.0))
            if queue.depth != self._depths.get(tag, 0):
                self._depths[tag] = queue.depth
                self._depth.labels(tag).set(queue.depth)
        for tag in self._depths.keys() - queues.keys():
            del self._depths[tag]
            self._depth.labels(tag).set(0)

    def _knows(self, tag: BackendTag) -> bool:
        if tag in self._seconds:
            return True
        if len(self._seconds) >= BACKENDS_MAX:
            if not self._is_full:
                self._is_full = True
                _log.warning("handle_metrics_full", backends=BACKENDS_MAX, left_out=tag)
            return False
        self._seconds[tag] = 0.0
        self._seconds_total.labels(tag)
        self._depth.labels(tag)
        return True


def make_handle_metrics() -> PrometheusHandleMetrics:
    """The metrics of this process, in its multiprocess files."""
    return PrometheusHandleMetrics(None)


@final
class PrometheusSpanMetrics:
    """What became of one process' spans."""

    def __init__(self, counts: SpanCounts) -> None:
        self._counts = counts
        self._written: dict[str, int] = {}
        self._dropped = Counter(SPANS_DROPPED.family, SPANS_DROPPED.text, SPANS_DROPPED.labels, registry=None)

    def write(self) -> None:
        """Write out what has changed since the last time; each reason is there from the first time on, with 0."""
        for reason, count in self._counts.dropped_by_reason.items():
            written = self._written.get(reason)
            if written != count:
                self._dropped.labels(reason).inc(count - (written or 0))
                self._written[reason] = count
