"""OpenTelemetry's SDK as this process uses it: resource, ids, sampler, bounded queue, export over OTLP/HTTP.

Imported only while tracing is on (`request_traces.open_tracing`): with it a process takes 0.15 s longer to start and
6 MiB more memory.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import (
    Decision,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)

from serve_common.runtime.request_context import request_context
from serve_common.telemetry import trace_context
from serve_common.telemetry.log_lines import RateLimitedLogger
from serve_common.telemetry.request_traces import (
    TEXT_LENGTH_MAX,
    Tracer,
    process_tracer,
    rng,
    root_trace_id,
    set_process_tracer,
)
from serve_common.telemetry.trace_context import TracingSettings

DROPPED_AT_QUEUE: Final = "queue"
"""Dropped because too many spans waited to be sent."""
DROPPED_AT_RECEIVER: Final = "receiver"
"""Dropped because the receiver could not be reached, or refused them."""


@final
class RequestIds(IdGenerator):
    """Random ids; that of a trace is its request's where `root_trace_id` says so."""

    def generate_span_id(self) -> int:
        return rng.getrandbits(64) or 1

    def generate_trace_id(self) -> int:
        return root_trace_id.get() or rng.getrandbits(128) or 1


def build_sampler(settings: trace_context.Sampler) -> Sampler:
    """The SDK's sampler with these settings."""
    root = TraceIdRatioBased(settings.ratio)
    return ParentBased(root) if settings.respects_parent else root


@final
class UserSampler(Sampler):
    """Samples spans that user code starts: child spans follow their parent, and requests that are not sampled get
    none, although no span is current there.
    """

    def __init__(self, settings: trace_context.Sampler) -> None:
        self._inner: Sampler = ParentBased(TraceIdRatioBased(settings.ratio))

    def should_sample(self, parent_context: Context | None, *args: Any, **kwargs: Any) -> SamplingResult:
        if not trace.get_current_span(parent_context).get_span_context().is_valid:
            request = request_context.get()
            if request is not None and request.traceparent:
                return SamplingResult(Decision.DROP)
        return self._inner.should_sample(parent_context, *args, **kwargs)

    def get_description(self) -> str:
        return f"Muster{{{self._inner.get_description()}}}"


_log = structlog.get_logger(__name__)

QUEUE_MAX_DEFAULT: Final = 2048
"""Limit of pending spans; OTEL_BSP_MAX_QUEUE_SIZE's default."""
LOG_INTERVAL_S: Final = 60.0
_NOISY_LOGGERS: Final = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.common.http",
    "opentelemetry.sdk.trace.export",
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.sdk.trace",
    "opentelemetry.attributes",
    "opentelemetry.trace.span",
)
"""Loggers of OpenTelemetry that log every lost batch, long attribute, late change, and odd header of a client."""


@final
class _LogRateFilter(logging.Filter):
    """Passes one line per logger and `LOG_INTERVAL_S`; not silenced, for user code may use the loggers too."""

    def __init__(self) -> None:
        super().__init__()
        self._last_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """True when the logger's interval is over."""
        now_s = time.monotonic()
        if now_s - self._last_s.get(record.name, float("-inf")) < LOG_INTERVAL_S:
            return False
        self._last_s[record.name] = now_s
        return True


_log_rate_filter: Final = _LogRateFilter()


@final
class OtlpTracing:
    """Active tracing of a process."""

    def __init__(
        self, settings: TracingSettings, service: str, instance_id: str, attributes: Mapping[str, str]
    ) -> None:
        for name in _NOISY_LOGGERS:
            logging.getLogger(name).addFilter(_log_rate_filter)
        for complaint in settings.complaints:
            _log.warning("tracing_setting_ignored", reason=complaint)
        self._settings = settings
        self._exporter = _Exporter()
        self.counts: Final = self._exporter.counts
        self._processor = _BoundedProcessor(self._exporter)
        self._resource = _resource(service, instance_id, attributes)
        # The SDK reads this limit from the environment, but has none by default.
        length_max = None if OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT in os.environ else TEXT_LENGTH_MAX
        provider = self._provide(build_sampler(settings.sampler), SpanLimits(max_attribute_length=length_max))
        self.tracer: Final = Tracer(settings.sampler, provider.get_tracer("muster"))
        self._user_provider: TracerProvider | None = None
        _log.info("tracing_on", service=service, ratio=settings.sampler.ratio)

    def serve_user_code(self) -> None:
        """Trace user code that uses OpenTelemetry's API; to be called after its import, which may bring an SDK."""
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            self._user_provider = self._provide(UserSampler(self._settings.sampler))
            trace.set_tracer_provider(self._user_provider)
        elif self._user_provider is None:
            self.tracer.must_enter_unsampled = True

    def close(self, timeout_s: float) -> None:
        """Send pending spans, in at most ``timeout_s`` seconds; blocks meanwhile."""
        if process_tracer() is self.tracer:
            set_process_tracer(None)
        # The SDK's own shutdown waits for half a minute when the receiver is dead, so it runs in a thread.
        closing = threading.Thread(target=self._processor.close, name="tracing-close", daemon=True)
        closing.start()
        closing.join(timeout_s)
        if closing.is_alive():
            self._exporter.shutdown()  # stops its retries
            _log.warning("spans_not_sent", waiting=self.counts.waiting)

    def _provide(self, sampler: Sampler, limits: SpanLimits | None = None) -> TracerProvider:
        provider = TracerProvider(
            sampler,
            self._resource,
            shutdown_on_exit=False,
            id_generator=RequestIds(),
            span_limits=limits,
        )
        provider.add_span_processor(self._processor)
        return provider


@final
class Counts:
    """Spans dropped and pending; changed under a lock, for spans come from several threads.

    Why a limit and counts of our own: the SDK drops what exceeds its queue with a warning for each, and counts nothing.
    """

    def __init__(self, waiting_max: int) -> None:
        self.dropped_by_reason = {DROPPED_AT_QUEUE: 0, DROPPED_AT_RECEIVER: 0}
        self.waiting = 0
        self._waiting_max = waiting_max
        self._lock = threading.Lock()

    @property
    def dropped(self) -> int:
        """All dropped spans."""
        return sum(self.dropped_by_reason.values())

    def may_wait(self) -> bool:
        """Count one more pending span; False when the queue is full."""
        with self._lock:
            if self.waiting >= self._waiting_max:
                self.dropped_by_reason[DROPPED_AT_QUEUE] += 1
                return False
            self.waiting += 1
            return True

    def leave(self, count: int) -> None:
        """Count ``count`` spans that are no longer pending."""
        with self._lock:
            self.waiting -= count

    def drop(self, count: int) -> None:
        """Count ``count`` spans that the receiver did not take."""
        with self._lock:
            self.dropped_by_reason[DROPPED_AT_RECEIVER] += count


@final
class _BoundedProcessor(BatchSpanProcessor):
    """The SDK's queue and thread, for the spans of all providers; what exceeds the queue is counted."""

    def __init__(self, exporter: _Exporter) -> None:
        super().__init__(exporter)
        self._counts = exporter.counts

    def on_end(self, span: ReadableSpan) -> None:
        if self._counts.may_wait():
            super().on_end(span)

    def shutdown(self) -> None:
        """Do nothing: user code may shut down its provider, but not the process' tracing."""

    def close(self) -> None:
        """Export what waits, and end the thread."""
        super().shutdown()  # type: ignore[no-untyped-call]  # the library's


@final
class _Exporter(SpanExporter):
    """The SDK's exporter, with a count; runs in the SDK's thread."""

    def __init__(self) -> None:
        self.counts: Final = Counts(_queue_max())
        self._inner = OTLPSpanExporter()
        self._lost = RateLimitedLogger(_log.warning, LOG_INTERVAL_S)
        self._is_closed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        count = len(spans)
        self.counts.leave(count)
        result, reason = SpanExportResult.FAILURE, "the receiver did not take them"
        try:
            result = self._inner.export(spans)
        except Exception as error:  # noqa: BLE001 - the next ones must still be tried
            reason = repr(error)
        if result is not SpanExportResult.SUCCESS:
            self.counts.drop(count)
            dropped = self.counts.dropped
            self._lost.log(
                time.monotonic(), "spans_not_exported", reason=reason, lost=count, lost_so_far=dropped
            )
        return result

    def shutdown(self) -> None:
        """Stop exporting; may be called twice, and by any thread."""
        if not self._is_closed:
            self._is_closed = True
            self._inner.shutdown()  # type: ignore[no-untyped-call]  # the library's

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


def _queue_max() -> int:
    """The queue's limit, read as the SDK reads it."""
    try:
        return max(1, int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", QUEUE_MAX_DEFAULT)))
    except ValueError:
        return QUEUE_MAX_DEFAULT


def _resource(service: str, instance_id: str, attributes: Mapping[str, str]) -> Resource:
    """The resource's attributes; the environment overrides them."""
    own = {"service.name": service, "service.instance.id": instance_id, **attributes}
    return Resource.create({**own, **OTELResourceDetector().detect().attributes})
