"""Opens and closes tracing for a process; while it is off, OpenTelemetry is never imported.

Why a module of its own: the library takes a third of a second and some megabytes to import.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, Protocol

from serve_common.telemetry.tracer import Tracer, TracingSettings, set_process_tracer

DROPPED_AT_QUEUE: Final = "queue"
"""Dropped because too many spans waited to be sent."""
DROPPED_AT_RECEIVER: Final = "receiver"
"""Dropped because the receiver could not be reached, or refused them."""


class SpanCounts(Protocol):
    """Counts of exported and dropped spans so far."""

    @property
    def exported(self) -> int:
        """Spans accepted by the receiver."""
        ...

    @property
    def dropped_by_reason(self) -> Mapping[str, int]:
        """Dropped spans by reason; every reason is present."""
        ...


class OpenTracing(Protocol):
    """Active tracing of a process."""

    @property
    def tracer(self) -> Tracer:
        """Creates this process' spans."""
        ...

    @property
    def counts(self) -> SpanCounts:
        """Counts of spans, for metrics."""
        ...

    def serve_user_code(self) -> None:
        """Trace user code that uses OpenTelemetry's API without an SDK of its own."""
        ...

    def close(self, timeout_s: float) -> None:
        """Send pending spans, in at most ``timeout_s`` seconds; blocks meanwhile."""
        ...


def open_tracing(
    settings: TracingSettings | None,
    service: str,
    instance_id: str,
    attributes: Mapping[str, str] | None = None,
) -> OpenTracing | None:
    """Start exporting spans as ``service`` (``service.name``, unless the environment names another); None when off.

    ``attributes`` are the resource's. From then on the tracer is `process_tracer`.
    """
    if settings is None:
        return None
    for name, value in settings.variables.items():
        if not os.environ.get(name):
            os.environ[name] = value  # the exporter reads them there
    from serve_common.telemetry.otlp_export import OtlpTracing  # noqa: PLC0415 - slow import

    opened = OtlpTracing(settings, service, instance_id, attributes or {})
    set_process_tracer(opened.tracer)
    return opened


def import_ahead(settings: TracingSettings | None) -> None:
    """Import what `open_tracing` will need, when tracing is on."""
    if settings is not None:
        from serve_common.telemetry import otlp_export  # noqa: F401, PLC0415 - slow import
