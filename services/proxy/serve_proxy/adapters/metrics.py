"""The proxy's metrics for Prometheus, read from the running state when they are scraped.

Why a collector: nothing is counted twice, and deleted objects are gone from the next scrape.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol, final

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serve_common.direct.dialing import DirectLinks
from serve_common.dispatch.admission import RequestStats
from serve_common.dispatch.request_body import UploadMemory
from serve_common.dispatch.routes import Routes
from serve_common.names import BackendTag, ProxyId
from serve_common.routing.router import Router
from serve_common.runtime.operations import (
    add_observations,
    build_family,
    build_histogram_family,
    build_single,
)
from serve_common.telemetry.catalogue.proxies import (
    APPLIED_SNAPSHOT_ID,
    BODY_BYTES,
    CAPTURED_REQUESTS,
    CIRCUIT_OPEN,
    COMPARED_RESPONSES,
    CONNECTIONS,
    DIRECT_DIALS,
    DIRECT_FRAMES,
    DIRECT_LINKS,
    DROPPED_PLAIN_CALLS,
    EJECTIONS,
    IN_FLIGHT,
    PROXY_INFO,
    QUEUE_DEPTH,
    QUEUED_SECONDS,
    RECONNECTS,
    REFUSED,
    REFUSED_BODIES,
    REQUEST_SECONDS,
    REQUESTS,
    RETRIES,
    SHADOW_REQUESTS,
)
from serve_common.telemetry.catalogue.services import BUS_PENDING_BYTES, PERMISSION_VIOLATIONS

_Routers = list[tuple[BackendTag, Router]]
_OTHER_CODE = "other"


class DataBus(Protocol):
    """The data connection, as far as metrics need it."""

    @property
    def pending_bytes(self) -> int:
        """Bytes that the operating system has not accepted yet."""
        ...

    @property
    def permission_violations(self) -> int:
        """Operations that the server has refused so far."""
        ...


class CaptureCounts(Protocol):
    """Counts of captured requests, as `Captures` has them."""

    published: int
    dropped: int


@final
class ProxyCollector(Collector):
    """Metrics of this proxy; `RoutesCollector` has those of its endpoints and backends."""

    def __init__(
        self,
        proxy_id: ProxyId,
        routes: Routes,
        bus: DataBus,
        *,
        reconnects: Callable[[], int],
        connections: Callable[[], int],
        dropped_calls: Callable[[], int],
        memory: UploadMemory,
        links: DirectLinks,
        captures: CaptureCounts,
    ) -> None:
        """``reconnects`` counts those to NATS, ``connections`` those of clients.

        ``dropped_calls`` is `Gateway.dropped_calls`; ``memory`` is the memory budget of request bodies.
        ``links`` are the direct links to replicas, ``captures`` what is captured of requests.
        """
        self._proxy_id = proxy_id
        self._routes = routes
        self._bus = bus
        self._reconnects = reconnects
        self._connections = connections
        self._dropped_calls = dropped_calls
        self._memory = memory
        self._links = links
        self._captures = captures

    def collect(self) -> Iterable[Metric]:
        """Metrics without an endpoint or backend label."""
        yield build_family(PROXY_INFO, [([self._proxy_id], 1.0)])
        yield build_single(CONNECTIONS, self._connections())
        yield build_single(DROPPED_PLAIN_CALLS, self._dropped_calls())
        yield build_single(BODY_BYTES, self._memory.admitted_bytes)
        yield build_single(REFUSED_BODIES, self._memory.refused)
        captured = {"published": self._captures.published, "dropped": self._captures.dropped}
        yield build_family(CAPTURED_REQUESTS, [([outcome], count) for outcome, count in captured.items()])
        yield build_single(RECONNECTS, self._reconnects())
        yield build_single(APPLIED_SNAPSHOT_ID, self._routes.applied_snapshot_id)
        yield build_single(BUS_PENDING_BYTES, self._bus.pending_bytes)
        yield build_single(PERMISSION_VIOLATIONS, self._bus.permission_violations)
        links = self._links
        tcp = links.open_tcp_links
        yield build_family(DIRECT_LINKS, [(["unix"], links.open_links - tcp), (["tcp"], tcp)])
        counts = {"opened": links.opened, "failed": links.failed, "lost": links.lost}
        yield build_family(DIRECT_DIALS, [([outcome], count) for outcome, count in counts.items()])
        sent, received = links.count_frames()
        yield build_family(DIRECT_FRAMES, [(["sent"], sent), (["received"], received)])


@final
class RoutesCollector(Collector):
    """Metrics of each endpoint and backend.

    It runs in another thread than the loop, so it first copies each table in one step."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._lock = threading.Lock()
        """Several scrapes may run at once."""
        self._exported_s: dict[BackendTag, tuple[Router, float]] = {}
        """Queued seconds exported last, by backend."""

    def collect(self) -> Iterable[Metric]:
        """Metrics of each endpoint and backend."""
        all_stats = [("", self._routes.unmatched)]
        all_stats += [(endpoint.tag, endpoint.stats) for endpoint in list(self._routes.endpoints.values())]
        yield from _request_families(all_stats)
        yield _shadow_family(all_stats)
        routers = list(self._routes.routers.items())
        yield build_family(QUEUED_SECONDS, self._get_queued_seconds(routers))
        yield build_family(QUEUE_DEPTH, [([tag], router.queue_depth) for tag, router in routers])
        yield build_family(IN_FLIGHT, [([tag], router.in_flight) for tag, router in routers])
        yield from _protection_families(routers)
        yield _compared_family(routers)

    def _get_queued_seconds(self, routers: _Routers) -> list[tuple[list[BackendTag], float]]:
        """Queued seconds by backend; never less than exported before.

        Why: the loop may be about to record that a request left the queue just now; and to Prometheus a counter that
        decreases was reset, so that all of it would count again.
        """
        with self._lock:
            shown = {}
            for tag, router in routers:
                seconds = router.queued_seconds(time.monotonic())
                known, before = self._exported_s.get(tag, (None, 0.0))
                shown[tag] = (router, max(seconds, before) if known is router else seconds)
            self._exported_s = shown
        return [([tag], seconds) for tag, (_, seconds) in shown.items()]


def _request_families(all_stats: Iterable[tuple[str, RequestStats]]) -> Iterable[Metric]:
    requests, seconds = build_family(REQUESTS), build_histogram_family(REQUEST_SECONDS)
    for tag, stats in all_stats:
        for (method, code), count in list(stats.counts.items()):
            requests.add_metric([tag, method, str(code) if code else _OTHER_CODE], count)
        total = stats.seconds_sum
        add_observations(seconds, [tag], REQUEST_SECONDS.buckets, list(stats.bucket_counts), total)
    yield requests
    yield seconds


def _protection_families(routers: _Routers) -> Iterable[Metric]:
    yield build_family(EJECTIONS, [([tag], router.ejections) for tag, router in routers])
    yield build_family(RETRIES, [([tag], router.retries.spent) for tag, router in routers])
    yield build_family(CIRCUIT_OPEN, [([tag], router.circuit.is_open) for tag, router in routers])
    refusals = build_family(REFUSED)
    for tag, router in routers:
        refusals.add_metric([tag, "queue"], router.queue_refusals)
        refusals.add_metric([tag, "circuit"], router.circuit.refused)
        refusals.add_metric([tag, "retry_budget"], router.retries.refused)
        refusals.add_metric([tag, "stopped"], router.stopped_refusals)
        refusals.add_metric([tag, "deaths"], router.lost_twice)
    yield refusals


def _compared_family(routers: _Routers) -> Metric:
    compared = build_family(COMPARED_RESPONSES)
    for tag, router in routers:
        counts = router.request_counts
        if counts is not None and counts.compared:
            compared.add_metric([tag, "different"], counts.different)
            compared.add_metric([tag, "same"], counts.compared - counts.different)
    return compared


def _shadow_family(all_stats: Iterable[tuple[str, RequestStats]]) -> Metric:
    samples = (
        ([tag, backend_tag, outcome.value], count)
        for tag, stats in all_stats
        for (backend_tag, outcome), count in list(stats.shadows.items())
    )
    return build_family(SHADOW_REQUESTS, samples)
