"""The metrics of a replica's process, of its requests, handles and spans, in prometheus_client's multiprocess files.

Import it only after PROMETHEUS_MULTIPROC_DIR is set (or unset) for good: prometheus_client reads it at its import.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, values
from prometheus_client.mmap_dict import MmapedDict

from serve_common.names import BackendTag
from serve_common.runtime.request_context import CurrentReplica
from serve_common.telemetry.catalogue.proxies import QUEUED_SECONDS
from serve_common.telemetry.catalogue.replicas import (
    HANDLE_QUEUE_DEPTH,
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
from serve_common.telemetry.catalogue.services import SPANS_DROPPED
from serve_common.telemetry.catalogue.specs import MetricSpec
from serve_common.telemetry.metrics import (
    Aggregate,
    LocalCounter,
    LocalGauge,
    LocalHistogram,
    ProcessMetrics,
    process_metrics,
)
from serve_replica_host.ports import Occupancy, RequestMetrics

if TYPE_CHECKING:
    from serve_common.telemetry.otlp import Counts

_log = structlog.get_logger(__name__)

_INITIAL_BYTES: Final = 16 * 1024
"""Initial size of a file; a fourth of the library's, because it is really allocated and most processes need less."""
_RETRY_S: Final = 1.0
"""Seconds between attempts to allocate a file on a full disk."""
_HEAD: Final = struct.Struct("i")
_HEAD_BYTES: Final = 8

_Library: Final[Any] = MmapedDict


@final
class AllocatedDict(_Library):  # type: ignore[misc]
    """Replaces the library's `MmapedDict` for writing. As there, the caller holds the lock.

    Why: the library extends its files without allocating the blocks, and writes to them as to memory. On a full disk
    the kernel then finds no block for a page, and ends the process with SIGBUS. Here all blocks of a file are allocated
    before anything is written; when that fails the values stay in memory, complete, and move into the file once there
    is space.
    """

    def __init__(self, filename: str, read_mode: bool = False) -> None:  # noqa: FBT001, FBT002 - the library's
        assert not read_mode, "files are read without mapping them"
        self._fname = filename
        self._positions: dict[str, int] = {}
        self._used = _HEAD_BYTES
        self._f: Any = None
        """None while the values are in memory only."""
        self._retry_at = 0.0
        self._m: Any = None
        path = Path(filename)
        size = path.stat().st_size if path.exists() else 0
        if size:
            self._f = path.open("a+b")
            self._capacity = size
            self._m = mmap.mmap(self._f.fileno(), size)
            self._used = max(_HEAD.unpack_from(self._m, 0)[0], _HEAD_BYTES)
            for key, _value, _timestamp, position in self._read_all_values():
                self._positions[key] = position
        else:
            self._capacity = _INITIAL_BYTES
            self._m = mmap.mmap(-1, _INITIAL_BYTES)
            self._write_header()
            self._move_to_file()

    def _write_header(self) -> None:
        self._m[: _HEAD.size] = _HEAD.pack(self._used)

    def _init_value(self, key: str) -> None:
        encoded = key.encode()
        padded = encoded + b" " * (8 - (len(encoded) + 4) % 8)
        value = struct.pack(f"i{len(padded)}sdd", len(encoded), padded, 0.0, 0.0)
        capacity = self._capacity
        while self._used + len(value) > capacity:
            capacity *= 2
        if capacity > self._capacity:
            self._grow(capacity)
        self._m[self._used : self._used + len(value)] = value
        self._used += len(value)
        self._write_header()
        self._positions[key] = self._used - 16

    def write_value(self, key: str, value: float, timestamp: float) -> None:
        if self._f is None and time.monotonic() >= self._retry_at:
            self._move_to_file()
        super().write_value(key, value, timestamp)

    def _grow(self, capacity: int) -> None:
        """Grow to ``capacity``, in the file or, on a full disk, in memory; the file then keeps its former values."""
        if self._f is not None:
            try:
                os.posix_fallocate(self._f.fileno(), 0, capacity)
            except OSError:
                pass
            else:
                self._m = mmap.mmap(self._f.fileno(), capacity)
                self._capacity = capacity
                return
            self._f.close()
            self._f = None
        longer = mmap.mmap(-1, capacity)
        longer[: self._used] = self._m[: self._used]
        self._m, self._capacity = longer, capacity
        self._move_to_file()

    def _move_to_file(self) -> None:
        """Write the values to a new file, under another name first: readers must not see a file without a header."""
        path = Path(self._fname)
        fresh = path.with_suffix(".new")
        self._retry_at = time.monotonic() + _RETRY_S
        file = None
        try:
            file = fresh.open("w+b")
            os.posix_fallocate(file.fileno(), 0, self._capacity)
            mapped = mmap.mmap(file.fileno(), self._capacity)
            mapped[: self._used] = self._m[: self._used]
            fresh.replace(path)
        except OSError:
            if file is not None:
                file.close()
                fresh.unlink(missing_ok=True)
            return
        self._m, self._f = mapped, file

    def close(self) -> None:
        if self._m is not None:
            self._m.close()
            self._m = None
        if self._f is not None:
            self._f.close()
            self._f = None


def use_allocated_files() -> None:
    """Use `AllocatedDict` for all of prometheus_client's values in this process, including those of user code."""
    values.MmapedDict = AllocatedDict  # type: ignore[attr-defined]


use_allocated_files()

_BACKEND: Final = "backend_tag"
_MODES: Final = {
    Aggregate.SUM: "livesum",
    Aggregate.MAX: "livemax",
    Aggregate.MIN: "livemin",
    Aggregate.LATEST: "livemostrecent",
}


def add_to_histogram(histogram: Histogram, counts: Sequence[int], total: float) -> None:
    """Add many observations at once; the public API adds one at a time. ``counts`` are not cumulative."""
    for bucket, count in zip(histogram._buckets, counts, strict=True):  # noqa: SLF001 - see above
        if count:
            bucket.inc(count)
    histogram._sum.inc(total)  # noqa: SLF001 - see above


F = TypeVar("F", Counter, Gauge, Histogram)


@final
class LocalMetricsWriter:
    """Writes a process' metrics for one replica; all methods run on one thread."""

    def __init__(self, backend_tag: BackendTag, process_metrics: ProcessMetrics) -> None:
        self._backend_tag = backend_tag
        self._metrics = process_metrics
        self._families: dict[str, Any] = {}

    def write(self) -> None:
        """Write what was counted since the last call."""
        for measure in self._metrics.pending():
            if isinstance(measure, LocalCounter):
                counter = self._family(measure, Counter)
                for key, value in measure.drain().items():
                    counter.labels(self._backend_tag, *key).inc(value)
            elif isinstance(measure, LocalGauge):
                gauge = self._family(measure, Gauge, multiprocess_mode=_MODES[measure.aggregate])
                for key, value in measure.drain().items():
                    gauge.labels(self._backend_tag, *key).set(value)
            else:
                histogram = self._family(measure, Histogram, buckets=measure.spec.buckets)
                for key, observations in measure.drain().items():
                    labelled = histogram.labels(self._backend_tag, *key)
                    add_to_histogram(labelled, observations.counts, observations.total)

    def _family(
        self, measure: LocalCounter | LocalGauge | LocalHistogram, kind: type[F], **options: Any
    ) -> F:
        spec = measure.spec
        family: F | None = self._families.get(spec.name)
        if family is None:
            labels = (_BACKEND, *measure.labels)
            family = kind(spec.family, spec.text, labels, registry=None, **options)
            self._families[spec.name] = family
        return family


OFF_VARIABLE: Final = "MUSTER_UNCOUNTED"
"""Variable with backends whose requests are not counted; used to measure the cost of counting."""

_BOUNDS: Final = REPLICA_REQUEST_SECONDS.buckets
_OTHER_CODE: Final = "other"
_REASONS: Final = ("busy", "draining")


@final
class _Counts:
    """Counts of one write interval, half a second."""

    __slots__ = ("buckets", "refused", "responses", "seconds")

    def __init__(self) -> None:
        self.responses: Tally[int] = Tally()
        self.refused: Tally[str] = Tally()
        self.buckets = [0] * (len(_BOUNDS) + 1)
        self.seconds = 0.0


@final
class PrometheusReplicaMetrics:
    """The request metrics of one replica.

    Why buffered: an update of a file takes several microseconds, and a request needs four of them; at 30,000 requests
    a second that is a third of the time. So plain numbers are counted, and written twice a second.
    """

    def __init__(self, backend_tag: BackendTag, process_metrics: ProcessMetrics) -> None:
        """Creates series that always exist at once, with 0. ``process_metrics`` is written with them."""
        self._backend_tag = backend_tag
        self._files = LocalMetricsWriter(backend_tag, process_metrics)
        self._counts = _Counts()
        self._queued: list[_Counts] = []
        """Counts to be written."""
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

    def count_response(self, status: int, seconds: float) -> None:
        """Count a response that took ``seconds``."""
        counts = self._counts
        counts.responses[status] += 1
        counts.buckets[bisect_left(_BOUNDS, seconds)] += 1
        counts.seconds += seconds

    def count_refused(self, reason: str) -> None:
        """Count a refused request."""
        self._counts.refused[reason] += 1

    def turn(self) -> None:
        """Queue the counts so far for `write`."""
        if self._counts.responses or self._counts.refused:
            self._queued.append(self._counts)
            self._counts = _Counts()

    def write(self, occupancy: Occupancy) -> None:
        """Write the queued counts and the occupancy."""
        queued, self._queued = self._queued, []
        for counts in queued:
            self._write_counts(counts)
        self._set_gauges(occupancy)
        self._files.write()

    def _write_counts(self, counts: _Counts) -> None:
        for status, count in counts.responses.items():
            code = str(status) if 100 <= status <= 999 else _OTHER_CODE
            self._requests_total.labels(self._backend_tag, code).inc(count)
        for reason, count in counts.refused.items():
            self._refused_total.labels(self._backend_tag, reason).inc(count)
        add_to_histogram(self._request_seconds, counts.buckets, counts.seconds)

    def _set_gauges(self, occupancy: Occupancy) -> None:
        # A response sent before the last write may be recorded after it; then nothing is added.
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
    """`RequestMetrics` that count nothing."""

    def count_response(self, status: int, seconds: float) -> None:
        """Does nothing."""

    def count_refused(self, reason: str) -> None:
        """Does nothing."""

    def turn(self) -> None:
        """Does nothing."""

    def write(self, occupancy: Occupancy) -> None:
        """Does nothing."""


def _counter(spec: MetricSpec) -> Counter:
    return Counter(spec.family, spec.text, spec.labels, registry=None)


def make_replica_metrics(backend_tag: BackendTag) -> RequestMetrics:
    """The metrics of this process, in no registry: in multiprocess mode the files are read."""
    if backend_tag in os.environ.get(OFF_VARIABLE, "").split():
        return UncountedRequests()
    return PrometheusReplicaMetrics(backend_tag, process_metrics)


HANDLE_BACKENDS_MAX: Final = 1000
"""Maximum backends that one process writes metrics for; a series lives as long as the process."""


@final
class PrometheusHandleMetrics:
    """Queue metrics of this process' handles.

    Why the load of other backends is measured in the caller's process: a request that waits for a slot is in no replica
    yet, and only its router knows of it.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
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
        if len(self._seconds) >= HANDLE_BACKENDS_MAX:
            if not self._is_full:
                self._is_full = True
                _log.warning("handle_metrics_full", backends=HANDLE_BACKENDS_MAX, left_out=tag)
            return False
        self._seconds[tag] = 0.0
        self._seconds_total.labels(tag)
        self._depth.labels(tag)
        return True


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
