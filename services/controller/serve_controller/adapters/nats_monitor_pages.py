"""What the pages of a NATS server's monitoring port say, as values of metrics.

Why number by number: servers of different versions have different fields, and one that is missing or odd is no reason
to show none of the others. See https://docs.nats.io/running-a-nats-service/nats_admin/monitoring.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import msgspec

from serve_common.metrics_catalogue.nats_servers import (
    JETSTREAM_CONSUMERS,
    JETSTREAM_ERRORS,
    JETSTREAM_MEMORY,
    JETSTREAM_MEMORY_LIMIT,
    JETSTREAM_REQUESTS,
    JETSTREAM_STORAGE,
    JETSTREAM_STORAGE_LIMIT,
    JETSTREAM_STREAMS,
    NATS_CONNECTIONS,
    NATS_CONNECTIONS_LIMIT,
    NATS_CONNECTIONS_OPENED,
    NATS_CPUS,
    NATS_CPUS_USED,
    NATS_MEMORY,
    NATS_RECEIVED_BYTES,
    NATS_RECEIVED_MESSAGES,
    NATS_SENT_BYTES,
    NATS_SENT_MESSAGES,
    NATS_SLOW_CONSUMERS,
    NATS_STALE_CONNECTIONS,
    NATS_STALLED_CLIENTS,
    NATS_START_TIME,
    NATS_SUBSCRIPTIONS,
)
from serve_common.metrics_catalogue.values import MetricSpec

Values = dict[MetricSpec, float]
"""What is not known is not in it."""


class NotANatsServer(ValueError):
    """What answers is none; the message says how it is seen."""


_NUMBER_MAX: Final = 2.0**64
_VARZ: Final = (
    (NATS_CONNECTIONS, "connections"),
    (NATS_CONNECTIONS_LIMIT, "max_connections"),
    (NATS_CONNECTIONS_OPENED, "total_connections"),
    (NATS_SUBSCRIPTIONS, "subscriptions"),
    (NATS_SLOW_CONSUMERS, "slow_consumers"),
    (NATS_STALE_CONNECTIONS, "stale_connections"),
    (NATS_STALLED_CLIENTS, "stalled_clients"),
    (NATS_RECEIVED_MESSAGES, "in_msgs"),
    (NATS_SENT_MESSAGES, "out_msgs"),
    (NATS_RECEIVED_BYTES, "in_bytes"),
    (NATS_SENT_BYTES, "out_bytes"),
    (NATS_MEMORY, "mem"),
    (JETSTREAM_STORAGE, "jetstream.stats.storage"),
    (JETSTREAM_STORAGE_LIMIT, "jetstream.config.max_storage"),
    (JETSTREAM_MEMORY, "jetstream.stats.memory"),
    (JETSTREAM_MEMORY_LIMIT, "jetstream.config.max_memory"),
    (JETSTREAM_REQUESTS, "jetstream.stats.api.total"),
    (JETSTREAM_ERRORS, "jetstream.stats.api.errors"),
)
_JSZ: Final = ((JETSTREAM_STREAMS, "streams"), (JETSTREAM_CONSUMERS, "consumers"))
_LIMITS: Final = (NATS_CONNECTIONS_LIMIT, JETSTREAM_STORAGE_LIMIT, JETSTREAM_MEMORY_LIMIT)
"""0 and -1 mean that there is none."""


def varz_values(body: bytes) -> Values:
    """Of `/varz`; raises `NotANatsServer`."""
    page = _page(body)
    values = _values(page, _VARZ)
    for spec in _LIMITS:
        if not values.get(spec):
            values.pop(spec, None)
    cpu_percent = _number(page, "cpu")
    if cpu_percent is not None:
        values[NATS_CPUS_USED] = cpu_percent / 100.0  # of one CPU, as in `ps`
    cpus = _number(page, "gomaxprocs") or _number(page, "cores")
    if cpus:
        values[NATS_CPUS] = cpus
    start = _moment(page.get("start"))
    if start is not None:
        values[NATS_START_TIME] = start
    return values


def jsz_values(body: bytes) -> Values:
    """Of `/jsz`; nothing without JetStream. Raises `NotANatsServer`."""
    page = _page(body)
    return {} if page.get("disabled") is True else _values(page, _JSZ)


def _page(body: bytes) -> Mapping[str, Any]:
    try:
        page = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        raise NotANatsServer("it answers something that is not JSON") from error
    if not isinstance(page, dict) or not isinstance(page.get("server_id"), str):
        raise NotANatsServer("it does not answer as a NATS server does")
    return page


def _values(page: Mapping[str, Any], fields: tuple[tuple[MetricSpec, str], ...]) -> Values:
    found = ((spec, _number(page, path)) for spec, path in fields)
    return {spec: number for spec, number in found if number is not None}


def _number(page: Mapping[str, Any], path: str) -> float | None:
    value: Any = page
    for name in path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _NUMBER_MAX:
        return None
    return float(value)


def _moment(text: Any) -> float | None:
    """Seconds since 1970."""
    try:
        return msgspec.convert(text, datetime).timestamp()
    except (msgspec.ValidationError, OverflowError):
        return None
