"""Spans on their way out: as OpenTelemetry's, over OTLP, from a thread of its SDK."""

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
"""That user code may add to a span of ours; OpenTelemetry's own default."""
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
    """The same as the library names it."""
    return SpanContext(
        int(ref.trace_id, 16),
        int(ref.span_id, 16),
        is_remote,
        _SAMPLED if ref.is_sampled else _UNSAMPLED,
        TraceState.from_header([ref.tracestate]) if ref.tracestate else None,
    )


def readable(span: Span, resource: Resource) -> ReadableSpan:
    """A span that has ended, as exporters take it."""
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
    """Make ``span`` the current one of the running task; whoever does that has the task's context to itself."""
    otel_context.attach(trace.set_span_in_context(SeenSpan(span, tracer)))


def enter_unsampled(ref: SpanRef) -> None:
    """As `enter`, for a request that nobody wants to see."""
    seen = trace.NonRecordingSpan(context_of(ref, is_remote=True))
    otel_context.attach(trace.set_span_in_context(seen))


def entered() -> SpanRef | None:
    """The current span, which user code may have begun; None when there is none."""
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
class SeenSpan(trace.Span):
    """A span of ours as user code sees it: it may add to it, and not end it."""

    def __init__(self, span: Span, tracer: Tracer) -> None:
        self._span = span
        self._tracer = tracer
        self._context = context_of(span.ref, is_remote=False)

    def get_span_context(self) -> SpanContext:
        """See `trace.Span`."""
        return self._context

    def is_recording(self) -> bool:
        """See `trace.Span`."""
        return not self._span.ended_ns

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        """See `trace.Span`."""
        held = self._span.attributes
        if self.is_recording() and (key in held or len(held) < ATTRIBUTES_MAX):
            held[key] = value if isinstance(value, bool | int | float) else cut(str(value))

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        """See `trace.Span`."""
        for key, value in attributes.items():
            self.set_attribute(key, value)

    def add_event(
        self, name: str, attributes: Mapping[str, AttributeValue] | None = None, timestamp: int | None = None
    ) -> None:
        """See `trace.Span`."""
        if not self.is_recording() or len(self._span.events) >= EVENTS_MAX:
            return
        plain = {key: cut(str(value)) for key, value in (attributes or {}).items()}
        self._span.events.append(Event(cut(name), timestamp or self._tracer.now_ns(), dict(plain)))

    def update_name(self, name: str) -> None:
        """See `trace.Span`."""
        if self.is_recording():
            self._span.name = cut(name)

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """See `trace.Span`."""
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
        """See `trace.Span`."""
        known = {
            "exception.type": type(exception).__qualname__,
            "exception.message": str(exception),
            "exception.escaped": str(escaped),
        }
        self.add_event("exception", {**known, **(attributes or {})}, timestamp)

    def end(self, end_time: int | None = None) -> None:
        """It ends when the request's work does."""


@final
class UserSampler(Sampler):
    """For spans that user code begins: below a span as that one was decided, and nothing in a request that is not
    sampled, although no span is current there.
    """

    def __init__(self, ours: OurSampler) -> None:
        root = TraceIdRatioBased(ours.ratio)
        self._inner: Sampler = ParentBased(root)

    def should_sample(
        self, parent_context: otel_context.Context | None, *args: Any, **kwargs: Any
    ) -> SamplingResult:
        """See `Sampler`."""
        if not trace.get_current_span(parent_context).get_span_context().is_valid:
            request = request_context.get()
            if request is not None and request.traceparent:
                return SamplingResult(Decision.DROP)
        return self._inner.should_sample(parent_context, *args, **kwargs)

    def get_description(self) -> str:
        """See `Sampler`."""
        return f"Muster{{{self._inner.get_description()}}}"


_log = structlog.get_logger(__name__)

QUEUE_MAX_DEFAULT: Final = 2048
"""Spans that wait; OTEL_BSP_MAX_QUEUE_SIZE's default."""
LOG_INTERVAL_S: Final = 60.0
_LOUD: Final = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.common.http",
    "opentelemetry.sdk.trace.export",
    "opentelemetry.sdk._shared_internal",
)
"""Loggers of the SDK that speak of every batch and every span that is lost."""
_ANY_SAMPLED: Final = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


@final
class _Rarely(logging.Filter):
    """Lets a line of each logger through now and then; they are not silenced, for user code may use them too."""

    def __init__(self) -> None:
        super().__init__()
        self._last_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        now_s = time.monotonic()
        if now_s - self._last_s.get(record.name, float("-inf")) < LOG_INTERVAL_S:
            return False
        self._last_s[record.name] = now_s
        return True


_rarely: Final = _Rarely()


@final
class OtlpTracing:
    """An `OpenTracing`."""

    def __init__(
        self, settings: TracingSettings, service: str, instance_id: str, attributes: Mapping[str, str]
    ) -> None:
        for name in _LOUD:
            logging.getLogger(name).addFilter(_rarely)
        for complaint in settings.complaints:
            _log.warning("tracing_setting_ignored", reason=complaint)
        self._settings = settings
        self._resource = _resource(service, instance_id, attributes)
        self._exporter = _Exporter(self._resource)
        self._processor = BatchSpanProcessor(self._exporter)
        self.counts: Final = self._exporter.counts
        self._entrance = _Entrance(self._processor, self.counts)
        chance = random.Random(random.SystemRandom().getrandbits(128))  # noqa: S311 - unique, not secret
        self.tracer: Final = Tracer(
            settings.sampler,
            emit=self._entrance.take,
            monotonic_ns=time.monotonic_ns,
            wall_ns=time.time_ns(),
            draw_bits=chance.getrandbits,
            enter=lambda span: enter(span, self.tracer),
            entered=entered,
        )
        self._provider: TracerProvider | None = None
        _log.info("tracing_on", service=service, ratio=settings.sampler.ratio)

    def serve_user_code(self) -> None:
        """See `OpenTracing`; to be called after the user's code was imported, which may bring an SDK of its own."""
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            sampler = UserSampler(self._settings.sampler)
            self._provider = TracerProvider(sampler, self._resource, shutdown_on_exit=False)
            self._provider.add_span_processor(self._entrance)
            trace.set_tracer_provider(self._provider)
        elif self._provider is None:
            # Its own sampler looks at the current span, and knows nothing of requests.
            self.tracer.enter_unsampled = enter_unsampled

    def close(self, timeout_s: float) -> None:
        """See `OpenTracing`."""
        if process_tracer() is self.tracer:
            set_process_tracer(None)
        # The SDK's own shutdown waits for half a minute when the receiver is dead; so it does that by itself.
        closing = threading.Thread(target=self._close, name="tracing-close", daemon=True)
        closing.start()
        closing.join(timeout_s)
        if closing.is_alive():
            self._exporter.shutdown()  # it then tries no more
            _log.warning("spans_not_sent", waiting=self.counts.waiting)

    def _close(self) -> None:
        self._processor.shutdown()  # type: ignore[no-untyped-call]  # the library's


@final
class Counts:
    """A `SpanCounts`; changed under a lock, for spans come from several threads."""

    def __init__(self, waiting_max: int) -> None:
        self.exported = 0
        self.dropped_by_reason = {DROPPED_AT_QUEUE: 0, DROPPED_AT_RECEIVER: 0}
        self.waiting = 0
        self._waiting_max = waiting_max
        self._lock = threading.Lock()

    @property
    def dropped(self) -> int:
        """All that was lost."""
        return sum(self.dropped_by_reason.values())

    def may_wait(self) -> bool:
        """One more comes; False when it is too much."""
        with self._lock:
            if self.waiting >= self._waiting_max:
                self.dropped_by_reason[DROPPED_AT_QUEUE] += 1
                return False
            self.waiting += 1
            return True

    def leave(self, count: int) -> None:
        """So many no longer wait."""
        with self._lock:
            self.waiting -= count

    def end(self, count: int, *, is_taken: bool) -> None:
        """So many were sent, or lost."""
        with self._lock:
            if is_taken:
                self.exported += count
            else:
                self.dropped_by_reason[DROPPED_AT_RECEIVER] += count


@final
class _Late(ReadableSpan):
    """A record in the SDK's queue."""

    def __init__(self, span: Span) -> None:
        self.span = span

    @property
    def context(self) -> SpanContext:
        """The processor asks whether it is sampled."""
        return _ANY_SAMPLED


@final
class _Entrance(SpanProcessor):
    """Where all spans come in: ours, and those that user code makes by the SDK."""

    def __init__(self, processor: BatchSpanProcessor, counts: Counts) -> None:
        self._processor = processor
        self._counts = counts

    def take(self, span: Span) -> None:
        """One of ours has ended."""
        if self._counts.may_wait():
            self._processor.on_end(_Late(span))

    def on_start(self, span: SdkSpan, parent_context: otel_context.Context | None = None) -> None:
        """See `SpanProcessor`."""

    def on_end(self, span: ReadableSpan) -> None:
        """See `SpanProcessor`."""
        context = span.get_span_context()
        if context is not None and context.trace_flags.sampled and self._counts.may_wait():
            self._processor.on_end(span)

    def shutdown(self) -> None:
        """See `SpanProcessor`; whoever opened the way out closes it."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """See `SpanProcessor`."""
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
        """See `SpanExporter`."""
        count = len(spans)
        self.counts.leave(count)
        result, reason = SpanExportResult.FAILURE, "the receiver did not take them"
        try:
            whole = [
                readable(span.span, self._resource) if isinstance(span, _Late) else span for span in spans
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
        """See `SpanExporter`; may be called twice, and by any thread."""
        if not self._is_closed:
            self._is_closed = True
            self._inner.shutdown()  # type: ignore[no-untyped-call]  # the library's

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """See `SpanExporter`."""
        return self._inner.force_flush(timeout_millis)


def _queue_max() -> int:
    """As the SDK reads it."""
    try:
        return max(1, int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", QUEUE_MAX_DEFAULT)))
    except ValueError:
        return QUEUE_MAX_DEFAULT


def _resource(service: str, instance_id: str, attributes: Mapping[str, str]) -> Resource:
    """What the environment says wins."""
    own = {"service.name": service, "service.instance.id": instance_id, **attributes}
    return Resource.create({**own, **OTELResourceDetector().detect().attributes})
