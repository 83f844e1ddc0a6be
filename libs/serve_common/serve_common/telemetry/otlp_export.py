"""Exports spans as OpenTelemetry's, over OTLP, from a thread of its SDK."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import structlog
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event as SdkEvent
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import (
    Decision,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import AttributeValue

from serve_common.runtime.request_context import request_context
from serve_common.telemetry.log_lines import RateLimitedLogger
from serve_common.telemetry.otlp import DROPPED_AT_QUEUE, DROPPED_AT_RECEIVER
from serve_common.telemetry.spans import Event, Span, SpanKind, SpanRef, cut
from serve_common.telemetry.tracer import Sampler as OurSampler
from serve_common.telemetry.tracer import Tracer, TracingSettings, process_tracer, set_process_tracer

ATTRIBUTES_MAX: Final = 128
"""Attributes that user code may add to a span of ours; OpenTelemetry's own default."""
EVENTS_MAX: Final = 128
_SCOPE: Final = InstrumentationScope("muster")
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_UNSAMPLED: Final = TraceFlags(TraceFlags.DEFAULT)
_KINDS: Final = {
    SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
    SpanKind.SERVER: trace.SpanKind.SERVER,
    SpanKind.CLIENT: trace.SpanKind.CLIENT,
}
_UNSET: Final = Status(StatusCode.UNSET)


def context_of(ref: SpanRef, *, is_remote: bool) -> SpanContext:
    """The library's context of ``ref``."""
    return SpanContext(
        int(ref.trace_id, 16),
        int(ref.span_id, 16),
        is_remote,
        _SAMPLED if ref.is_sampled else _UNSAMPLED,
        TraceState.from_header([ref.tracestate]) if ref.tracestate else None,
    )


def readable(span: Span, resource: Resource) -> ReadableSpan:
    """A finished span in the form that exporters take."""
    own = span.ref
    parent = None
    if span.parent_id:
        ref = SpanRef(span.trace_id, span.parent_id, is_sampled=True)
        parent = context_of(ref, is_remote=span.is_parent_remote)
    return ReadableSpan(
        name=span.name,
        context=context_of(own, is_remote=False),
        parent=parent,
        resource=resource,
        attributes=span.attributes,
        events=[SdkEvent(event.name, event.attributes, event.at_ns) for event in span.events],
        links=[Link(context_of(link, is_remote=False)) for link in span.links],
        kind=_KINDS[span.kind],
        status=_UNSET if span.error is None else Status(StatusCode.ERROR, span.error or None),
        start_time=span.began_ns,
        end_time=span.ended_ns,
        instrumentation_scope=_SCOPE,
    )


def enter(span: Span, tracer: Tracer) -> None:
    """Make ``span`` the current one of the running task; the caller must own the task's context."""
    otel_context.attach(trace.set_span_in_context(UserSpan(span, tracer)))


def enter_unsampled(ref: SpanRef) -> None:
    """As `enter`, for a request that is not sampled."""
    seen = trace.NonRecordingSpan(context_of(ref, is_remote=True))
    otel_context.attach(trace.set_span_in_context(seen))


def entered() -> SpanRef | None:
    """The current span, which user code may have started; None when there is none."""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return SpanRef(
        f"{context.trace_id:032x}",
        f"{context.span_id:016x}",
        context.trace_flags.sampled,
        context.trace_state.to_header(),
    )


@final
class UserSpan(trace.Span):
    """A span of ours as exposed to user code, which may add to it but not end it."""

    def __init__(self, span: Span, tracer: Tracer) -> None:
        self._span = span
        self._tracer = tracer
        self._context = context_of(span.ref, is_remote=False)

    def get_span_context(self) -> SpanContext:
        return self._context

    def is_recording(self) -> bool:
        return not self._span.ended_ns

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        attributes = self._span.attributes
        if self.is_recording() and (key in attributes or len(attributes) < ATTRIBUTES_MAX):
            attributes[key] = value if isinstance(value, bool | int | float) else cut(str(value))

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        for key, value in attributes.items():
            self.set_attribute(key, value)

    def add_event(
        self, name: str, attributes: Mapping[str, AttributeValue] | None = None, timestamp: int | None = None
    ) -> None:
        if not self.is_recording() or len(self._span.events) >= EVENTS_MAX:
            return
        plain = {key: cut(str(value)) for key, value in (attributes or {}).items()}
        self._span.events.append(Event(cut(name), timestamp or self._tracer.now_ns(), dict(plain)))

    def update_name(self, name: str) -> None:
        if self.is_recording():
            self._span.name = cut(name)

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        code = status.status_code if isinstance(status, Status) else status
        text = status.description if isinstance(status, Status) else description
        if self.is_recording() and code is StatusCode.ERROR:
            self._span.error = cut(text or "")

    def record_exception(
        self,
        exception: BaseException,
        attributes: Mapping[str, AttributeValue] | None = None,
        timestamp: int | None = None,
        escaped: bool = False,  # noqa: FBT001, FBT002 - the library's
    ) -> None:
        standard = {
            "exception.type": type(exception).__qualname__,
            "exception.message": str(exception),
            "exception.escaped": str(escaped),
        }
        self.add_event("exception", {**standard, **(attributes or {})}, timestamp)

    def end(self, end_time: int | None = None) -> None:
        """Do nothing: the span ends with the request's work."""


@final
class UserSampler(Sampler):
    """Samples spans that user code starts: child spans follow their parent, and requests that are not sampled get
    none, although no span is current there.
    """

    def __init__(self, ours: OurSampler) -> None:
        root = TraceIdRatioBased(ours.ratio)
        self._inner: Sampler = ParentBased(root)

    def should_sample(
        self, parent_context: otel_context.Context | None, *args: Any, **kwargs: Any
    ) -> SamplingResult:
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
)
"""Loggers of the SDK that log every lost batch and span."""
_ANY_SAMPLED: Final = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


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
    """`OpenTracing` by OTLP."""

    def __init__(
        self, settings: TracingSettings, service: str, instance_id: str, attributes: Mapping[str, str]
    ) -> None:
        for name in _NOISY_LOGGERS:
            logging.getLogger(name).addFilter(_log_rate_filter)
        for complaint in settings.complaints:
            _log.warning("tracing_setting_ignored", reason=complaint)
        self._settings = settings
        self._resource = _resource(service, instance_id, attributes)
        self._exporter = _Exporter(self._resource)
        self._processor = BatchSpanProcessor(self._exporter)
        self.counts: Final = self._exporter.counts
        self._span_queue = _SpanQueue(self._processor, self.counts)
        rng = random.Random(random.SystemRandom().getrandbits(128))  # noqa: S311 - unique, not secret
        self.tracer: Final = Tracer(
            settings.sampler,
            emit=self._span_queue.take,
            monotonic_ns=time.monotonic_ns,
            wall_ns=time.time_ns(),
            random_bits=rng.getrandbits,
            enter=lambda span: enter(span, self.tracer),
            entered=entered,
        )
        self._provider: TracerProvider | None = None
        _log.info("tracing_on", service=service, ratio=settings.sampler.ratio)

    def serve_user_code(self) -> None:
        """Trace user code; to be called after its import, which may bring an SDK of its own."""
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            sampler = UserSampler(self._settings.sampler)
            self._provider = TracerProvider(sampler, self._resource, shutdown_on_exit=False)
            self._provider.add_span_processor(self._span_queue)
            trace.set_tracer_provider(self._provider)
        elif self._provider is None:
            # Its own sampler checks the current span, and knows nothing of requests.
            self.tracer.enter_unsampled = enter_unsampled

    def close(self, timeout_s: float) -> None:
        if process_tracer() is self.tracer:
            set_process_tracer(None)
        # The SDK's own shutdown waits for half a minute when the receiver is dead, so it runs in a thread.
        closing = threading.Thread(target=self._close, name="tracing-close", daemon=True)
        closing.start()
        closing.join(timeout_s)
        if closing.is_alive():
            self._exporter.shutdown()  # stops its retries
            _log.warning("spans_not_sent", waiting=self.counts.waiting)

    def _close(self) -> None:
        self._processor.shutdown()  # type: ignore[no-untyped-call]  # the library's


@final
class Counts:
    """`SpanCounts`; changed under a lock, for spans come from several threads.

    Why a limit and counts of our own: the SDK drops what exceeds its queue with a warning for each, and counts nothing.
    """

    def __init__(self, waiting_max: int) -> None:
        self.exported = 0
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

    def end(self, count: int, *, is_taken: bool) -> None:
        """Count ``count`` spans as exported or dropped."""
        with self._lock:
            if is_taken:
                self.exported += count
            else:
                self.dropped_by_reason[DROPPED_AT_RECEIVER] += count


@final
class _QueuedSpan(ReadableSpan):
    """A span in the SDK's queue; converted at export, in the SDK's thread, so that no request waits for that."""

    def __init__(self, span: Span) -> None:
        self.span = span

    @property
    def context(self) -> SpanContext:
        """A sampled context, which the processor checks."""
        return _ANY_SAMPLED


@final
class _SpanQueue(SpanProcessor):
    """Receives all spans: ours, and those that user code creates with the SDK."""

    def __init__(self, processor: BatchSpanProcessor, counts: Counts) -> None:
        self._processor = processor
        self._counts = counts

    def take(self, span: Span) -> None:
        """Queue a finished span of ours."""
        if self._counts.may_wait():
            self._processor.on_end(_QueuedSpan(span))

    def on_start(self, span: SdkSpan, parent_context: otel_context.Context | None = None) -> None:
        """Do nothing."""

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        if context is not None and context.trace_flags.sampled and self._counts.may_wait():
            self._processor.on_end(span)

    def shutdown(self) -> None:
        """Do nothing: `OtlpTracing.close` shuts down the exporter."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._processor.force_flush(timeout_millis)


@final
class _Exporter(SpanExporter):
    """The SDK's exporter, with a count; runs in the SDK's thread."""

    def __init__(self, resource: Resource) -> None:
        self.counts: Final = Counts(_queue_max())
        self._resource = resource
        self._inner = OTLPSpanExporter()
        self._losses = RateLimitedLogger(_log.warning, LOG_INTERVAL_S)
        self._is_closed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        count = len(spans)
        self.counts.leave(count)
        result, reason = SpanExportResult.FAILURE, "the receiver did not take them"
        try:
            whole = [
                readable(span.span, self._resource) if isinstance(span, _QueuedSpan) else span
                for span in spans
            ]
            result = self._inner.export(whole)
        except Exception as error:  # noqa: BLE001 - the next ones must still be tried
            reason = repr(error)
        is_taken = result is SpanExportResult.SUCCESS
        self.counts.end(count, is_taken=is_taken)
        if not is_taken:
            dropped = self.counts.dropped
            self._losses.log(
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
