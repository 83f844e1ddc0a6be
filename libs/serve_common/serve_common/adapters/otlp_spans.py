"""Our spans as OpenTelemetry's, and back: in user code, which may use its API, and on their way out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SdkEvent
from opentelemetry.sdk.trace import ReadableSpan
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

from serve_common.request_context import request_context
from serve_common.tracing.sampling import Sampler as OurSampler
from serve_common.tracing.spans import Event, Span, SpanKind, cut
from serve_common.tracing.trace_context import SpanRef
from serve_common.tracing.tracer import Tracer

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
