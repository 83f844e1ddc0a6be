"""Metrics of a replica's own calls through handles, and of its dropped spans.

Import it only after PROMETHEUS_MULTIPROC_DIR is set (or unset) for good: prometheus_client reads it at its import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from serve_common.names import BackendTag
from serve_common.runtime.request_context import CurrentReplica
from serve_common.telemetry.catalogue.proxies import QUEUED_SECONDS
from serve_common.telemetry.catalogue.replicas import HANDLE_QUEUE_DEPTH
from serve_common.telemetry.catalogue.services import SPANS_DROPPED

if TYPE_CHECKING:
    from serve_common.telemetry.otlp import Counts

_log = structlog.get_logger(__name__)

BACKENDS_MAX: Final = 1000
"""Maximum backends that one process writes metrics for; a series lives as long as the process."""


@final
class PrometheusHandleMetrics:
    """Queue metrics of this process' handles.

    Why the load of other backends is measured in the caller's process: a request that waits for a slot is in no replica
    yet, and only its router knows of it.
    """

    def __init__(self, registry: CollectorRegistry | None) -> None:
        """``registry`` is not needed in multiprocess mode, where the files are read."""
        self._seconds: dict[BackendTag, float] = {}
        """Queued seconds of the handles at the last write, for every backend with series."""
        self._depths: dict[BackendTag, int] = {}
        """Queue depths at the last write; missing ones are 0."""
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
        """Write what has changed since the last call.

        A backend gets its series with 0 as soon as its application or a call makes it known: to Prometheus, a counter
        that first appears with a value has not increased.
        """
        for tag in replica.peer_versions:
            self._ensure_series(tag)
        queues = {} if replica.handle_queues is None else replica.handle_queues()
        for tag, queue in queues.items():
            if not self._ensure_series(tag):
                continue
            before = self._seconds[tag]
            # Much less than before: handles have reconnected, and count from 0. Slightly less: their thread is about
            # to record that a call has just left the queue.
            is_reset = queue.seconds < before / 2
            increase = queue.seconds - (0.0 if is_reset else before)
            if increase > 0 or is_reset:
                self._seconds[tag] = queue.seconds
                self._seconds_total.labels(tag).inc(max(increase, 0.0))
            if queue.depth != self._depths.get(tag, 0):
                self._depths[tag] = queue.depth
                self._depth.labels(tag).set(queue.depth)
        for tag in self._depths.keys() - queues.keys():
            del self._depths[tag]
            self._depth.labels(tag).set(0)

    def _ensure_series(self, tag: BackendTag) -> bool:
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
    """Metrics of one process' spans."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._written: dict[str, int] = {}
        self._dropped = Counter(SPANS_DROPPED.family, SPANS_DROPPED.text, SPANS_DROPPED.labels, registry=None)

    def write(self) -> None:
        """Write what has changed since the last call; each reason exists from the first call on, with 0."""
        for reason, count in self._counts.dropped_by_reason.items():
            written = self._written.get(reason)
            if written != count:
                self._dropped.labels(reason).inc(count - (written or 0))
                self._written[reason] = count
