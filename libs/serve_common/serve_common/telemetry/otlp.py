"""Opens and closes tracing for a process; where it is off, nothing of OpenTelemetry is ever imported.

Why a module of its own: the library takes a third of a second and some megabytes to import.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, Protocol

from serve_common.telemetry.tracer import Tracer, TracingSettings, set_process_tracer

DROPPED_AT_QUEUE: Final = "queue"
"""Too many waited to be sent."""
DROPPED_AT_RECEIVER: Final = "receiver"
"""It could not be reached, or did not take them."""


class SpanCounts(Protocol):
    """What became of spans so far."""

    @property
    def exported(self) -> int:
        """Taken by the receiver."""
        ...

    @property
    def dropped_by_reason(self) -> Mapping[str, int]:
        """What was lost: every reason that there is, also those that nothing was lost for."""
        ...


class OpenTracing(Protocol):
    """Tracing that is on."""

    @property
    def tracer(self) -> Tracer:
        """Makes this process' spans."""
        ...

    @property
    def counts(self) -> SpanCounts:
        """For metrics."""
        ...

    def serve_user_code(self) -> None:
        """Let user code that uses OpenTelemetry's API without an SDK of its own be traced along."""
        ...

    def close(self, timeout_s: float) -> None:
        """Send what waits, in at most so many seconds; blocks meanwhile."""
        ...


def open_tracing(
    settings: TracingSettings | None,
    service: str,
    instance_id: str,
    attributes: Mapping[str, str] | None = None,
) -> OpenTracing | None:
    """Begin to export spans as ``service`` (``service.name``, unless the environment names another); None when off.

    ``attributes`` are the resource's. From then on the tracer is `process_tracer`.
    """
    if settings is None:
        return None
    for name, value in settings.variables.items():
        if not os.environ.get(name):
            os.environ[name] = value  # the exporter reads them there
    from serve_common.telemetry.otlp_export import OtlpTracing  # noqa: PLC0415 - see the module's text

    opened = OtlpTracing(settings, service, instance_id, attributes or {})
    set_process_tracer(opened.tracer)
    return opened


def import_ahead(settings: TracingSettings | None) -> None:
    """Import what `open_tracing` will need, if it will."""
    if settings is not None:
        from serve_common.telemetry import otlp_export  # noqa: F401, PLC0415 - see the module's text
