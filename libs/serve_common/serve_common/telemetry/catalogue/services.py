"""Metrics that every service process exports, and those of the replica host's own process."""

from __future__ import annotations

from typing import Final

from serve_common.telemetry.catalogue.replicas import LAG_BUCKETS
from serve_common.telemetry.catalogue.specs import Exporter, MetricKind, MetricSpec

_SERVICES: Final = (Exporter.PROXY, Exporter.HOST, Exporter.CONTROLLER)
_EVERYWHERE: Final = (*_SERVICES, Exporter.CONSOLE)

LOOP_LAG: Final = MetricSpec(
    name="serve_loop_lag_seconds",
    kind=MetricKind.HISTOGRAM,
    text="How late the process' event loop comes to what is due, measured four times a second. "
    "A process without enough CPU, or one whose loop is blocked, shows here first.",
    unit="seconds",
    buckets=LAG_BUCKETS,
    exporters=_EVERYWHERE,
)
BUS_CONNECTED: Final = MetricSpec(
    name="serve_bus_connected",
    kind=MetricKind.GAUGE,
    text="1 while this connection of the process to NATS is up.",
    unit="1",
    labels=("connection",),
    exporters=_SERVICES,
)
BUS_IDENTITIES: Final = MetricSpec(
    name="serve_bus_identities",
    kind=MetricKind.GAUGE,
    text="1 when the process has an identity of its own at NATS, 0 when it is a plain user as all others of its role "
    "are: then replicas can read and answer each other's requests.",
    unit="1",
    exporters=_SERVICES,
)
BUS_PENDING_BYTES: Final = MetricSpec(
    name="serve_bus_pending_bytes",
    kind=MetricKind.GAUGE,
    text="Bytes for NATS that the operating system has not taken yet, of the data connection.",
    unit="bytes",
    exporters=(Exporter.PROXY,),
)
PERMISSION_VIOLATIONS: Final = MetricSpec(
    name="serve_bus_permission_violations_total",
    kind=MetricKind.COUNTER,
    text="Publishes and subscriptions that NATS refused on the data connection; each is a fault of the installation.",
    unit="messages",
    exporters=(Exporter.PROXY,),
)

SPANS_DROPPED: Final = MetricSpec(
    name="serve_trace_spans_dropped_total",
    kind=MetricKind.COUNTER,
    text="Spans that never reached the receiver of traces, by why. Replicas' are added up on their host.",
    unit="spans",
    labels=("reason",),
    exporters=(Exporter.PROXY, Exporter.CONTROLLER, Exporter.REPLICA),
    when="where tracing is on",
)

LOG_LINES_DROPPED: Final = MetricSpec(
    name="serve_log_lines_dropped_total",
    kind=MetricKind.COUNTER,
    text="Log lines of the process that its standard error never got, by why; of a host also its replicas'. "
    "A full disk shows here, and ends nothing.",
    unit="lines",
    labels=("reason",),
    exporters=_EVERYWHERE,
)

REFUSED_MESSAGES: Final = MetricSpec(
    name="serve_messages_refused_total",
    kind=MetricKind.COUNTER,
    text="Messages from other services that could not be read, broke a bound or could not be taken in, by kind. "
    "What was heard of the sender before stays in force; the log line message_refused names the sender.",
    unit="messages",
    labels=("message",),
    exporters=_SERVICES,
)

EVERYWHERE_METRICS: Final = (
    LOOP_LAG,
    BUS_CONNECTED,
    BUS_IDENTITIES,
    BUS_PENDING_BYTES,
    PERMISSION_VIOLATIONS,
    SPANS_DROPPED,
    LOG_LINES_DROPPED,
    REFUSED_MESSAGES,
)

LIBRARY_GROUPS: Final = {
    "process_*": "CPU seconds, resident and virtual memory, open files and start time of the process, by the client "
    "library; not of replica processes.",
    "python_gc_*": "Collections of Python's garbage collector, by generation; not of replica processes.",
}
"""Metrics of the client library's own collectors."""


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
