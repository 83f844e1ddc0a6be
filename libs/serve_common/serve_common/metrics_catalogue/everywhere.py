"""What every service process exports under the same name."""

from __future__ import annotations

from typing import Final

from serve_common.metrics_catalogue.replicas import LAG_BUCKETS
from serve_common.metrics_catalogue.values import Exporter, MetricKind, MetricSpec

_SERVICES: Final = (Exporter.PROXY, Exporter.HOST, Exporter.CONTROLLER)

LOOP_LAG: Final = MetricSpec(
    name="serve_loop_lag_seconds",
    kind=MetricKind.HISTOGRAM,
    text="How late the process' event loop comes to what is due, measured four times a second. "
    "A process without enough CPU, or one whose loop is blocked, shows here first.",
    unit="seconds",
    buckets=LAG_BUCKETS,
    exporters=_SERVICES,
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
    exporters=_SERVICES,
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
"""By the client library's own collectors."""
