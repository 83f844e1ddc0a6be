"""What replica processes export, on the page of their host, added up over the replicas of a backend.

Why no label for the replica: they come and go, and each would leave series behind for as long as Prometheus keeps them.
Which replica it was is in logs and traces.
"""

from __future__ import annotations

from typing import Final

from serve_common.telemetry.catalogue.specs import SECONDS_BUCKETS, Exporter, MetricKind, MetricSpec

LOAD_SECONDS_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
BATCH_SIZE_BUCKETS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
LAG_BUCKETS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_HERE: Final = (Exporter.REPLICA,)
_CALLS: Final = "where a replica belongs to an application, or its code has called a handle"
_BATCHED: Final = "once a function with `@serve.batch` has run"
_MULTIPLEXED: Final = "once a function with `@serve.multiplexed` was called"

ONGOING_SECONDS: Final = MetricSpec(
    name="serve_replica_ongoing_seconds_total",
    kind=MetricKind.COUNTER,
    text="Time that requests have been in replicas, including those that are still there: streams and WebSockets while "
    "they last, and requests in a replica's waiting room. Its rate over any window is the mean number of ongoing "
    "requests in it. Written twice a second.",
    unit="request-seconds",
    labels=("backend_tag",),
    exporters=_HERE,
)
REPLICA_REQUESTS: Final = MetricSpec(
    name="serve_replica_requests_total",
    kind=MetricKind.COUNTER,
    text="Requests that left a replica, by the HTTP status of the answer; 499: the caller went away.",
    unit="requests",
    labels=("backend_tag", "code"),
    exporters=_HERE,
    when="once a request has ended",
)
REPLICA_REFUSED: Final = MetricSpec(
    name="serve_replica_refused_total",
    kind=MetricKind.COUNTER,
    text="Requests that a replica refused because it was busy or draining; their router tries another one. And frames "
    "that it dropped because the subject to answer on is no inbox.",
    unit="requests",
    labels=("backend_tag", "reason"),
    exporters=_HERE,
)
REPLICA_REQUEST_SECONDS: Final = MetricSpec(
    name="serve_replica_request_seconds",
    kind=MetricKind.HISTOGRAM,
    text="From a request's first frame to its answer's last one, inside the replica.",
    unit="seconds",
    labels=("backend_tag",),
    buckets=SECONDS_BUCKETS,
    exporters=_HERE,
)
REPLICA_IN_FLIGHT: Final = MetricSpec(
    name="serve_replica_in_flight_requests",
    kind=MetricKind.GAUGE,
    text="Requests that replicas work on.",
    unit="requests",
    labels=("backend_tag",),
    exporters=_HERE,
)
REPLICA_LIMIT: Final = MetricSpec(
    name="serve_replica_in_flight_limit",
    kind=MetricKind.GAUGE,
    text="How many requests replicas may work on at once: the sum of their max_concurrent_queries.",
    unit="requests",
    labels=("backend_tag",),
    exporters=_HERE,
)
REPLICA_WAITING: Final = MetricSpec(
    name="serve_replica_waiting_requests",
    kind=MetricKind.GAUGE,
    text="Requests in replicas that wait for one of its slots, because several routers share them.",
    unit="requests",
    labels=("backend_tag",),
    exporters=_HERE,
)
REPLICA_STREAMS: Final = MetricSpec(
    name="serve_replica_streams",
    kind=MetricKind.GAUGE,
    text="Requests in flight whose answer has begun and not ended.",
    unit="requests",
    labels=("backend_tag",),
    exporters=_HERE,
)
REPLICA_SOCKETS: Final = MetricSpec(
    name="serve_replica_websockets",
    kind=MetricKind.GAUGE,
    text="WebSockets that are open.",
    unit="connections",
    labels=("backend_tag",),
    exporters=_HERE,
)
REPLICA_LAG: Final = MetricSpec(
    name="serve_replica_loop_lag_seconds",
    kind=MetricKind.HISTOGRAM,
    text="How late the event loop that user code runs on comes to what is due, measured twice a second. "
    "Long ones mean that user code blocks it: nothing else of that replica goes on meanwhile.",
    unit="seconds",
    labels=("backend_tag",),
    buckets=LAG_BUCKETS,
    exporters=_HERE,
)
REPLICA_CONNECTED: Final = MetricSpec(
    name="serve_replica_bus_connected",
    kind=MetricKind.GAUGE,
    text="Replicas whose data connection to NATS is up.",
    unit="replicas",
    labels=("backend_tag",),
    exporters=_HERE,
)
REPLICA_RECONNECTS: Final = MetricSpec(
    name="serve_replica_nats_reconnects_total",
    kind=MetricKind.COUNTER,
    text="Reconnects of replicas' data connections to NATS.",
    unit="reconnects",
    labels=("backend_tag",),
    exporters=_HERE,
)

HANDLE_QUEUE_DEPTH: Final = MetricSpec(
    name="serve_handle_queue_depth",
    kind=MetricKind.GAUGE,
    text="Calls of user code through handles that wait for a replica of this backend.",
    unit="requests",
    labels=("backend_tag",),
    exporters=_HERE,
    when=_CALLS,
)

BATCH_SIZE: Final = MetricSpec(
    name="serve_batch_size",
    kind=MetricKind.HISTOGRAM,
    text="Items in a batch when it began.",
    unit="items",
    labels=("backend_tag", "function"),
    buckets=BATCH_SIZE_BUCKETS,
    exporters=_HERE,
    when=_BATCHED,
)
BATCH_WAIT_SECONDS: Final = MetricSpec(
    name="serve_batch_wait_seconds",
    kind=MetricKind.HISTOGRAM,
    text="How long the first item of a batch waited for it to begin.",
    unit="seconds",
    labels=("backend_tag", "function"),
    buckets=SECONDS_BUCKETS,
    exporters=_HERE,
    when=_BATCHED,
)
BATCH_SECONDS: Final = MetricSpec(
    name="serve_batch_seconds",
    kind=MetricKind.HISTOGRAM,
    text="How long the batch function ran, to the end of its last stream.",
    unit="seconds",
    labels=("backend_tag", "function"),
    buckets=SECONDS_BUCKETS,
    exporters=_HERE,
    when=_BATCHED,
)

MODELS: Final = MetricSpec(
    name="serve_multiplexed_models",
    kind=MetricKind.GAUGE,
    text="Multiplexed models that are loaded, over all replicas.",
    unit="models",
    labels=("backend_tag",),
    exporters=_HERE,
    when=_MULTIPLEXED,
)
MODEL_LOADS: Final = MetricSpec(
    name="serve_multiplexed_loads_total",
    kind=MetricKind.COUNTER,
    text="Loads of models that ended, by how.",
    unit="loads",
    labels=("backend_tag", "outcome"),
    exporters=_HERE,
    when=_MULTIPLEXED,
)
MODEL_EVICTIONS: Final = MetricSpec(
    name="serve_multiplexed_evictions_total",
    kind=MetricKind.COUNTER,
    text="Models that went because another one needed their place.",
    unit="models",
    labels=("backend_tag",),
    exporters=_HERE,
    when="once a model had to go",
)
MODEL_LOAD_SECONDS: Final = MetricSpec(
    name="serve_multiplexed_load_seconds",
    kind=MetricKind.HISTOGRAM,
    text="How long the user's function took to load a model; the wait for a place is not in it.",
    unit="seconds",
    labels=("backend_tag",),
    buckets=LOAD_SECONDS_BUCKETS,
    exporters=_HERE,
    when=_MULTIPLEXED,
)

REPLICA_METRICS: Final = (
    ONGOING_SECONDS,
    REPLICA_REQUESTS,
    REPLICA_REQUEST_SECONDS,
    REPLICA_REFUSED,
    REPLICA_IN_FLIGHT,
    REPLICA_LIMIT,
    REPLICA_WAITING,
    REPLICA_STREAMS,
    REPLICA_SOCKETS,
    REPLICA_LAG,
    REPLICA_CONNECTED,
    REPLICA_RECONNECTS,
    HANDLE_QUEUE_DEPTH,
    BATCH_SIZE,
    BATCH_WAIT_SECONDS,
    BATCH_SECONDS,
    MODELS,
    MODEL_LOADS,
    MODEL_LOAD_SECONDS,
    MODEL_EVICTIONS,
)
