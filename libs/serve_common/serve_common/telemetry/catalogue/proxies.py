"""Metrics of proxies. Read from the live state when scraped, so deleted objects are gone from the next scrape."""

from __future__ import annotations

from typing import Final

from serve_common.telemetry.catalogue.specs import SECONDS_BUCKETS, Exporter, MetricKind, MetricSpec

_HERE: Final = (Exporter.PROXY,)

PROXY_INFO: Final = MetricSpec(
    name="serve_proxy_info",
    kind=MetricKind.GAUGE,
    text="1: says which proxy was scraped. A reading of the load counts only when every proxy is in it.",
    unit="1",
    labels=("proxy_id",),
    exporters=_HERE,
)
REQUESTS: Final = MetricSpec(
    name="serve_proxy_requests_total",
    kind=MetricKind.COUNTER,
    text="Requests answered, by endpoint, method and status; 499: the client went away before its answer. "
    "The endpoint is empty for requests that no route was found for.",
    unit="requests",
    labels=("endpoint_tag", "method", "code"),
    exporters=_HERE,
)
REQUEST_SECONDS: Final = MetricSpec(
    name="serve_proxy_request_seconds",
    kind=MetricKind.HISTOGRAM,
    text="Time from the head of a request to the end of its answer.",
    unit="seconds",
    labels=("endpoint_tag",),
    buckets=SECONDS_BUCKETS,
    exporters=_HERE,
)
SHADOW_REQUESTS: Final = MetricSpec(
    name="serve_proxy_shadow_requests_total",
    kind=MetricKind.COUNTER,
    text="Copies of requests for shadow backends, by what became of them.",
    unit="requests",
    labels=("endpoint_tag", "backend_tag", "outcome"),
    when="once an endpoint has shadows",
    exporters=_HERE,
)
COMPARED_RESPONSES: Final = MetricSpec(
    name="serve_proxy_compared_responses_total",
    kind=MetricKind.COUNTER,
    text="Responses to copies that were compared with the caller's, of a rollout's canary and of its baseline. "
    "different: beyond what is known to vary.",
    unit="responses",
    labels=("backend_tag", "outcome"),
    when="while a rollout is under way, once it has compared some",
    exporters=_HERE,
)
QUEUE_DEPTH: Final = MetricSpec(
    name="serve_proxy_queue_depth",
    kind=MetricKind.GAUGE,
    text="Requests that wait in this proxy for a replica.",
    unit="requests",
    labels=("backend_tag",),
    exporters=_HERE,
)
IN_FLIGHT: Final = MetricSpec(
    name="serve_proxy_in_flight_requests",
    kind=MetricKind.GAUGE,
    text="Requests that this proxy sent to replicas and that have not ended.",
    unit="requests",
    labels=("backend_tag",),
    exporters=_HERE,
)
QUEUED_SECONDS: Final = MetricSpec(
    name="serve_router_queued_seconds_total",
    kind=MetricKind.COUNTER,
    text="Time that requests have waited in the queue of a router (a proxy's, or that of the handles in a replica) "
    "for a replica of this backend, including those that still wait. Its rate is the mean number of queued requests.",
    unit="request-seconds",
    labels=("backend_tag",),
    exporters=(Exporter.PROXY, Exporter.REPLICA),
    when="in replicas that belong to an application, or whose code has called a handle",
)
EJECTIONS: Final = MetricSpec(
    name="serve_proxy_replica_ejections_total",
    kind=MetricKind.COUNTER,
    text="Times that a replica was left out because it failed again and again.",
    unit="ejections",
    labels=("backend_tag",),
    exporters=_HERE,
)
RETRIES: Final = MetricSpec(
    name="serve_proxy_retries_total",
    kind=MetricKind.COUNTER,
    text="Second sendings of requests whose replica died.",
    unit="requests",
    labels=("backend_tag",),
    exporters=_HERE,
)
CIRCUIT_OPEN: Final = MetricSpec(
    name="serve_proxy_circuit_open",
    kind=MetricKind.GAUGE,
    text="1 while nothing is sent to the backend because its replicas fail.",
    unit="1",
    labels=("backend_tag",),
    exporters=_HERE,
)
REFUSED: Final = MetricSpec(
    name="serve_proxy_refused_requests_total",
    kind=MetricKind.COUNTER,
    text="Requests that were not sent (again), by what kept them: a full queue, an open circuit, a spent retry budget, "
    "a backend that a user set to no replicas, or two replicas that died while they had the request.",
    unit="requests",
    labels=("backend_tag", "reason"),
    exporters=_HERE,
)
DROPPED_PLAIN_CALLS: Final = MetricSpec(
    name="serve_proxy_dropped_calls_total",
    kind=MetricKind.COUNTER,
    text="Calls over plain NATS that were dropped because the subject to answer on is no inbox.",
    unit="calls",
    exporters=_HERE,
)
BODY_BYTES: Final = MetricSpec(
    name="serve_proxy_body_bytes",
    kind=MetricKind.GAUGE,
    text="Memory that the bodies of the requests under way may need; at most MUSTER_BODY_MEMORY_MAX.",
    unit="bytes",
    exporters=_HERE,
)
REFUSED_BODIES: Final = MetricSpec(
    name="serve_proxy_refused_bodies_total",
    kind=MetricKind.COUNTER,
    text="Requests that were refused with 503 before their body was read, because the bodies of others take all the "
    "memory that there is for them.",
    unit="requests",
    exporters=_HERE,
)
CAPTURED_REQUESTS: Final = MetricSpec(
    name="serve_proxy_captured_requests_total",
    kind=MetricKind.COUNTER,
    text="Requests that were sampled for a capture: published, or dropped because too many came at once or NATS was "
    "away.",
    unit="requests",
    labels=("outcome",),
    exporters=_HERE,
)
CONNECTIONS: Final = MetricSpec(
    name="serve_proxy_connections",
    kind=MetricKind.GAUGE,
    text="Open HTTP connections of clients; those that became WebSockets included.",
    unit="connections",
    exporters=_HERE,
)
RECONNECTS: Final = MetricSpec(
    name="serve_proxy_nats_reconnects_total",
    kind=MetricKind.COUNTER,
    text="Reconnects to NATS, of both connections.",
    unit="reconnects",
    exporters=_HERE,
)
APPLIED_SNAPSHOT_ID: Final = MetricSpec(
    name="serve_proxy_applied_snapshot_id",
    kind=MetricKind.GAUGE,
    text="Every snapshot up to this id is applied; 0 before the bucket was read.",
    unit="snapshot id",
    exporters=_HERE,
)
DIRECT_LINKS: Final = MetricSpec(
    name="serve_proxy_direct_links",
    kind=MetricKind.GAUGE,
    text="Open direct links to replicas, by transport: on the proxy's machine, and between machines.",
    unit="links",
    labels=("transport",),
    exporters=_HERE,
)
DIRECT_DIALS: Final = MetricSpec(
    name="serve_proxy_direct_dials_total",
    kind=MetricKind.COUNTER,
    text="Direct links that were opened, that could not be, and that ended, by outcome.",
    unit="links",
    labels=("outcome",),
    exporters=_HERE,
)
DIRECT_FRAMES: Final = MetricSpec(
    name="serve_proxy_direct_frames_total",
    kind=MetricKind.COUNTER,
    text="Frames that took direct links, by direction; all others took NATS.",
    unit="frames",
    labels=("direction",),
    exporters=_HERE,
)

PROXY_METRICS: Final = (
    PROXY_INFO,
    REQUESTS,
    REQUEST_SECONDS,
    SHADOW_REQUESTS,
    COMPARED_RESPONSES,
    QUEUE_DEPTH,
    IN_FLIGHT,
    QUEUED_SECONDS,
    REFUSED,
    DROPPED_PLAIN_CALLS,
    BODY_BYTES,
    REFUSED_BODIES,
    CAPTURED_REQUESTS,
    RETRIES,
    EJECTIONS,
    CIRCUIT_OPEN,
    CONNECTIONS,
    APPLIED_SNAPSHOT_ID,
    RECONNECTS,
    DIRECT_LINKS,
    DIRECT_DIALS,
    DIRECT_FRAMES,
)
