"""Metrics of NATS servers, exported by the leading controller, which reads them from the servers' monitoring ports.

Why the controller and no exporter beside the server: one process less to run, and it is configured with the servers.
"""

from __future__ import annotations

from typing import Final

from serve_common.telemetry.catalogue.specs import Exporter, MetricKind, MetricSpec

_WHEN: Final = "while it leads and the server could be read last"
_JETSTREAM: Final = f"{_WHEN}, with JetStream"


def _gauge(name: str, text: str, unit: str, *, when: str = _WHEN) -> MetricSpec:
    return MetricSpec(
        name=name,
        kind=MetricKind.GAUGE,
        text=text,
        unit=unit,
        labels=("server",),
        when=when,
        exporters=(Exporter.CONTROLLER,),
    )


def _counter(name: str, text: str, unit: str, *, when: str = _WHEN) -> MetricSpec:
    return MetricSpec(
        name=name,
        kind=MetricKind.COUNTER,
        text=text,
        unit=unit,
        labels=("server",),
        when=when,
        exporters=(Exporter.CONTROLLER,),
    )


NATS_UP: Final = _gauge(
    "serve_nats_up",
    "1 when the server's monitoring port answered last as it should; while it is 0, its other metrics are absent.",
    "1",
    when="while it leads",
)
NATS_HEALTHY: Final = _gauge(
    "serve_nats_healthy",
    "1 while the server says at /healthz that it is well; 0 also when JetStream was given up, as with a full disk.",
    "1",
)
NATS_START_TIME: Final = _gauge(
    "serve_nats_start_time_seconds", "When the server started, since 1970.", "seconds"
)
NATS_CONNECTIONS: Final = _gauge("serve_nats_connections", "Open connections of clients.", "connections")
NATS_CONNECTIONS_LIMIT: Final = _gauge(
    "serve_nats_connections_limit", "How many the server takes; absent without a limit.", "connections"
)
NATS_CONNECTIONS_OPENED: Final = _counter(
    "serve_nats_connections_opened_total", "Connections that were opened.", "connections"
)
NATS_SUBSCRIPTIONS: Final = _gauge(
    "serve_nats_subscriptions", "Subscriptions, the server's own included.", "subscriptions"
)
NATS_SLOW_CONSUMERS: Final = _counter(
    "serve_nats_slow_consumers_total",
    "Connections that the server cut because they read too slowly; what waited for them is lost.",
    "connections",
)
NATS_STALE_CONNECTIONS: Final = _counter(
    "serve_nats_stale_connections_total", "Connections that the server cut because pings went unanswered.",
    "connections",
)  # fmt: skip
NATS_STALLED_CLIENTS: Final = _counter(
    "serve_nats_stalled_clients_total",
    "Times that the server held up who publishes, because a receiver reads slowly.",
    "stalls",
)
NATS_RECEIVED_MESSAGES: Final = _counter(
    "serve_nats_received_messages_total", "Messages that came to the server.", "messages"
)
NATS_SENT_MESSAGES: Final = _counter(
    "serve_nats_sent_messages_total", "Messages that the server delivered.", "messages"
)
NATS_RECEIVED_BYTES: Final = _counter(
    "serve_nats_received_bytes_total", "Bytes of the messages that came to the server.", "bytes"
)
NATS_SENT_BYTES: Final = _counter(
    "serve_nats_sent_bytes_total", "Bytes of the messages that the server delivered.", "bytes"
)
NATS_MEMORY: Final = _gauge("serve_nats_memory_bytes", "Resident memory of the server.", "bytes")
NATS_CPUS_USED: Final = _gauge("serve_nats_cpus_used", "CPUs that the server keeps busy.", "CPUs")
NATS_CPUS: Final = _gauge("serve_nats_cpus", "CPUs that the server may use.", "CPUs")

JETSTREAM_STORAGE: Final = _gauge(
    "serve_nats_jetstream_storage_bytes", "Bytes on disk in JetStream.", "bytes", when=_JETSTREAM
)
JETSTREAM_STORAGE_LIMIT: Final = _gauge(
    "serve_nats_jetstream_storage_limit_bytes",
    "How many JetStream may have on disk; beyond it the bucket takes no snapshot.",
    "bytes",
    when=_JETSTREAM,
)
JETSTREAM_MEMORY: Final = _gauge(
    "serve_nats_jetstream_memory_bytes", "Bytes of streams in memory.", "bytes", when=_JETSTREAM
)
JETSTREAM_MEMORY_LIMIT: Final = _gauge(
    "serve_nats_jetstream_memory_limit_bytes", "How many they may be.", "bytes", when=_JETSTREAM
)
JETSTREAM_REQUESTS: Final = _counter(
    "serve_nats_jetstream_api_requests_total", "Requests to JetStream's API.", "requests", when=_JETSTREAM
)
JETSTREAM_ERRORS: Final = _counter(
    "serve_nats_jetstream_api_errors_total",
    "Requests to JetStream's API that it answered with an error; some are ordinary, such as asking for what is not "
    "there.",
    "requests",
    when=_JETSTREAM,
)
JETSTREAM_STREAMS: Final = _gauge(
    "serve_nats_jetstream_streams", "Streams, buckets included.", "streams", when=_JETSTREAM
)
JETSTREAM_CONSUMERS: Final = _gauge(
    "serve_nats_jetstream_consumers",
    "Consumers of all streams: each process that watches the bucket has one.",
    "consumers",
    when=_JETSTREAM,
)

NATS_METRICS: Final = (
    NATS_UP,
    NATS_HEALTHY,
    NATS_START_TIME,
    NATS_CONNECTIONS,
    NATS_CONNECTIONS_LIMIT,
    NATS_CONNECTIONS_OPENED,
    NATS_SUBSCRIPTIONS,
    NATS_SLOW_CONSUMERS,
    NATS_STALE_CONNECTIONS,
    NATS_STALLED_CLIENTS,
    NATS_RECEIVED_MESSAGES,
    NATS_SENT_MESSAGES,
    NATS_RECEIVED_BYTES,
    NATS_SENT_BYTES,
    NATS_MEMORY,
    NATS_CPUS_USED,
    NATS_CPUS,
    JETSTREAM_STORAGE,
    JETSTREAM_STORAGE_LIMIT,
    JETSTREAM_MEMORY,
    JETSTREAM_MEMORY_LIMIT,
    JETSTREAM_REQUESTS,
    JETSTREAM_ERRORS,
    JETSTREAM_STREAMS,
    JETSTREAM_CONSUMERS,
)
