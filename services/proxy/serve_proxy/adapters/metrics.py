"""The proxy's metrics for Prometheus, read from the running state when they are scraped.

Why a collector: nothing is counted twice, and what was deleted is gone from the next scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from serve_common.dispatch.routes import Routes
from serve_common.dispatch.tallies import BUCKETS_S, EndpointTally
from serve_common.names import BackendTag
from serve_common.routing.router import Router


def register_metrics(registry: CollectorRegistry, routes: Routes, reconnects: Callable[[], int]) -> None:
    """Make ``registry`` show everything; ``reconnects`` counts those to NATS."""
    registry.register(_RoutesCollector(routes, reconnects))
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)


class _RoutesCollector(Collector):
    """Runs in another thread than the loop, so it first copies each table in one step."""

    def __init__(self, routes: Routes, reconnects: Callable[[], int]) -> None:
        self._routes = routes
        self._reconnects = reconnects

    def collect(self) -> Iterable[Metric]:
        """All families with their present values."""
        tallies = [("", self._routes.unmatched)]
        tallies += [(endpoint.tag, endpoint.tally) for endpoint in list(self._routes.endpoints.values())]
        yield from _request_families(tallies)
        yield _shadow_family(tallies)
        depth = GaugeMetricFamily(
            "serve_proxy_queue_depth", "Requests that wait for a replica", labels=["backend_tag"]
        )
        in_flight = GaugeMetricFamily(
            "serve_proxy_in_flight_requests", "Requests sent to replicas", labels=["backend_tag"]
        )
        for backend_tag, router in list(self._routes.routers.items()):
            depth.add_metric([backend_tag], router.queue_depth)
            in_flight.add_metric([backend_tag], router.in_flight)
        yield depth
        yield in_flight
        yield from _protection_families(list(self._routes.routers.items()))
        yield CounterMetricFamily(
            "serve_proxy_nats_reconnects", "Reconnects to NATS", value=self._reconnects()
        )
        yield GaugeMetricFamily(
            "serve_proxy_applied_snapshot_id",
            "Every snapshot up to this id is applied; 0 before the bucket was read",
            value=self._routes.applied_snapshot_id,
        )


def _request_families(tallies: Iterable[tuple[str, EndpointTally]]) -> Iterable[Metric]:
    requests = CounterMetricFamily(
        "serve_proxy_requests", "Requests answered, by status", labels=["endpoint_tag", "method", "code"]
    )
    seconds = HistogramMetricFamily(
        "serve_proxy_request_seconds",
        "Time from the head of a request to its answer",
        labels=["endpoint_tag"],
    )
    bounds = [*(str(bound) for bound in BUCKETS_S), "+Inf"]
    for tag, tally in tallies:
        for (method, code), count in list(tally.counts.items()):
            requests.add_metric([tag, method, str(code)], count)
        seconds_sum = tally.seconds_sum
        cumulated = list(accumulate(tally.bucket_counts))
        seconds.add_metric([tag], list(zip(bounds, cumulated, strict=True)), seconds_sum)
    yield requests
    yield seconds


def _protection_families(routers: Iterable[tuple[BackendTag, Router]]) -> Iterable[Metric]:
    ejections = CounterMetricFamily(
        "serve_proxy_replica_ejections",
        "Times that a replica was left out because it failed again and again",
        labels=["backend_tag"],
    )
    retries = CounterMetricFamily(
        "serve_proxy_retries", "Second sendings of requests whose replica died", labels=["backend_tag"]
    )
    is_open = GaugeMetricFamily(
        "serve_proxy_circuit_open",
        "1 while nothing is sent to the backend because its replicas fail",
        labels=["backend_tag"],
    )
    refusals = CounterMetricFamily(
        "serve_proxy_refused_requests",
        "Requests that were not sent, by what kept them: queue, circuit or retry_budget",
        labels=["backend_tag", "reason"],
    )
    for tag, router in routers:
        ejections.add_metric([tag], router.ejections)
        retries.add_metric([tag], router.retries.spent)
        is_open.add_metric([tag], router.circuit.is_open)
        refusals.add_metric([tag, "queue"], router.queue_refusals)
        refusals.add_metric([tag, "circuit"], router.circuit.refused)
        refusals.add_metric([tag, "retry_budget"], router.retries.refused)
    yield ejections
    yield retries
    yield is_open
    yield refusals


def _shadow_family(tallies: Iterable[tuple[str, EndpointTally]]) -> Metric:
    shadows = CounterMetricFamily(
        "serve_proxy_shadow_requests",
        "Copies of requests for shadow backends, by what became of them",
        labels=["endpoint_tag", "backend_tag", "outcome"],
    )
    for tag, tally in tallies:
        for (backend_tag, outcome), count in list(tally.shadows.items()):
            shadows.add_metric([tag, backend_tag, outcome.value], count)
    return shadows
