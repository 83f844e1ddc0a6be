"""What the replica host's own process exports, beside its replicas' metrics."""

from __future__ import annotations

from typing import Final

from serve_common.metrics_catalogue.values import Exporter, MetricKind, MetricSpec

START_SECONDS_BUCKETS: Final = (
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    20.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)

_HERE: Final = (Exporter.HOST,)

HOST_INFO: Final = MetricSpec(
    name="serve_host_info",
    kind=MetricKind.GAUGE,
    text="1: says which replica host was scraped. A reading of the load counts only when every host is in it.",
    unit="1",
    labels=("host_id",),
    exporters=_HERE,
)
HOST_REPLICAS: Final = MetricSpec(
    name="serve_host_replicas",
    kind=MetricKind.GAUGE,
    text="Replicas that this host holds, by status.",
    unit="replicas",
    labels=("status",),
    exporters=_HERE,
)
START_SECONDS: Final = MetricSpec(
    name="serve_replica_start_seconds",
    kind=MetricKind.HISTOGRAM,
    text="From the order to start a replica to its constructed code being ready for requests. "
    "spare: its process had been started ahead; cold: not.",
    unit="seconds",
    labels=("backend_tag", "kind"),
    buckets=START_SECONDS_BUCKETS,
    exporters=_HERE,
    when="once a replica has started",
)
REPLICA_ENDS: Final = MetricSpec(
    name="serve_replica_failures_total",
    kind=MetricKind.COUNTER,
    text="Replicas that failed to start, died unasked, or failed their health checks.",
    unit="replicas",
    labels=("backend_tag", "reason"),
    exporters=_HERE,
    when="once a replica has failed",
)
HOST_RECONNECTS: Final = MetricSpec(
    name="serve_host_nats_reconnects_total",
    kind=MetricKind.COUNTER,
    text="Reconnects of the host's own connection to NATS.",
    unit="reconnects",
    exporters=_HERE,
)
METRICS_FILES_LEFT_OUT: Final = MetricSpec(
    name="serve_host_metrics_files_left_out",
    kind=MetricKind.GAUGE,
    text="Files of replicas' metrics of which something is not on this page: unreadable, too large, or with names "
    "that are the host's own. Above 0 some replica's code writes what it should not.",
    unit="files",
    exporters=_HERE,
)

HOST_METRICS: Final = (
    HOST_INFO,
    HOST_REPLICAS,
    START_SECONDS,
    REPLICA_ENDS,
    HOST_RECONNECTS,
    METRICS_FILES_LEFT_OUT,
)
