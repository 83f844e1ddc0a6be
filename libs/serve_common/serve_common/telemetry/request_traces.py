"""The spans of one request in a router, of HTTP requests, and of operations outside of requests.

All spans are OpenTelemetry's, by its API; the SDK behind it is imported only while tracing is on (`otlp`). Only the
decision which requests get any comes before it (`trace_context` says why).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from random import Random
from typing import TYPE_CHECKING, Final, Protocol, final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    TraceState,
    format_span_id,
    format_trace_id,
)

from serve_common.config.backend import METHODS
from serve_common.names import ReplicaTag, parse_backend_tag
from serve_common.runtime.request_context import request_context
from serve_common.telemetry.trace_context import (
    TRACESTATE_LENGTH_MAX,
    Sampler,
    TraceParent,
    TracingSettings,
    parse_traceparent,
)
from serve_common.values import truncate

if TYPE_CHECKING:
    from serve_common.telemetry.otlp import OtlpTracing

TEXT_LENGTH_MAX: Final = 500
"""Longest attribute or error text, in characters; longer ones are cut."""

Value = str | int | float | bool
"""Value of an attribute."""
Cause = SpanContext
"""The span of an operation that causes another one."""


def cut(text: str) -> str:
    """``text``, cut to `TEXT_LENGTH_MAX` characters."""
    return truncate(text, TEXT_LENGTH_MAX)


def parse_span_context(parent: TraceParent, tracestate: str = "", *, is_remote: bool = True) -> SpanContext:
    """OpenTelemetry's form of ``parent``; a ``tracestate`` that is invalid or too long is dropped (3.3.1)."""
    state = None
    if tracestate and len(tracestate) <= TRACESTATE_LENGTH_MAX:
        state = TraceState.from_header([tracestate])
    flags = TraceFlags(TraceFlags.SAMPLED if parent.is_sampled else TraceFlags.DEFAULT)
    return SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), is_remote, flags, state)


def get_trace_id(span: Span) -> str:
    """The id of the span's trace, of 32 hexadecimal digits."""
    return format_trace_id(span.get_span_context().trace_id)


def get_traceparent(span: Span) -> str:
    """The header ``traceparent`` for calls made in ``span``."""
    context = span.get_span_context()
    parent = TraceParent(
        format_trace_id(context.trace_id), format_span_id(context.span_id), context.trace_flags.sampled
    )
    return parent.header


def get_tracestate(span: Span) -> str:
    """The header ``tracestate`` for calls made in ``span``; empty when there is none."""
    return span.get_span_context().trace_state.to_header()


def current_trace_id() -> str:
    """32 hexadecimal digits, sampled or not; empty outside of traces.

    Why two sources: a request's trace is part of its context, which replicas set anyway; the controller's work is no
    request.
    """
    context = request_context.get()
    if context is not None:
        return context.trace_id
    current = trace.get_current_span()
    return get_trace_id(current) if current.get_span_context().is_valid else ""


_NS: Final = 1_000_000_000
_SPAN_DIGITS: Final = 16
# Its own generator: user code may seed that of `random`, and then all replicas would draw equal ids.
rng: Final = Random()  # noqa: S311 - unique, not secret
os.register_at_fork(after_in_child=rng.seed)

root_trace_id: Final[ContextVar[int]] = ContextVar("muster_root_trace_id", default=0)
"""The id that the next trace of this context gets, for the tracer's `IdGenerator`; 0 for a random one."""


@final
class Tracer:
    """Decides which requests are traced and starts their spans; callable from any thread.

    Why times are taken from the monotonic clock: no span ends before it begins, whatever happens to the wall clock.
    """

    def __init__(self, sampler: Sampler, spans: trace.Tracer) -> None:
        """``spans`` makes the spans. Its sampler decides as ``sampler`` does, and its ids heed `root_trace_id`."""
        self.sampler: Final = sampler
        self._bound = sampler.bound
        self._spans = spans
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        self.must_enter_unsampled = False
        """Set when user code has an SDK of its own, whose sampler checks the current span and knows no requests."""

    def at_ns(self, monotonic_s: float) -> int:
        """Nanoseconds since 1970 of ``monotonic_s``, a time of `time.monotonic`."""
        return int(monotonic_s * _NS) + self._offset_ns

    def decide(self, traceparent: str, trace_id: str = "") -> TraceParent:
        """Decide about a request with this header, at a cost that most requests can bear.

        The result is the parent for `start` if it is sampled, otherwise what is to be sent on. A trace that starts here
        gets the id ``trace_id``, or a random one.
        """
        parent = parse_traceparent(traceparent) if traceparent else None
        if parent is None:
            trace_id = trace_id or format_trace_id(rng.getrandbits(128) or 1)
            if int(trace_id[-_SPAN_DIGITS:], 16) < self._bound:
                return TraceParent(trace_id, "", is_sampled=True)
            # No span has this id: it is a placeholder for the unsampled one.
            return TraceParent(trace_id, trace_id[:_SPAN_DIGITS], is_sampled=False)
        is_sampled = self.sampler.decide(parent, parent.trace_id)
        return (
            parent
            if is_sampled == parent.is_sampled
            else TraceParent(parent.trace_id, parent.span_id, is_sampled)
        )

    def start(
        self,
        name: str,
        kind: SpanKind,
        parent: TraceParent | SpanContext,
        attributes: dict[str, Value],
        *,
        tracestate: str = "",
        is_remote: bool = True,
        links: Sequence[Link] = (),
        start_ns: int = 0,
    ) -> Span:
        """Start a span below ``parent``, which is of another process if ``is_remote``; without a span id it is the
        first of that trace. ``start_ns`` 0 means now.
        """
        root_id, context = 0, Context()
        if isinstance(parent, SpanContext):
            context = _below(NonRecordingSpan(parent))
        elif parent.span_id:
            context = _below(NonRecordingSpan(parse_span_context(parent, tracestate, is_remote=is_remote)))
        else:
            root_id = int(parent.trace_id, 16)
        token = root_trace_id.set(root_id)
        try:
            return self._spans.start_span(name, context, kind, attributes, links, start_ns or self._now_ns())
        finally:
            root_trace_id.reset(token)

    def child(self, of: Span, name: str, kind: SpanKind, attributes: dict[str, Value]) -> Span:
        """Start a child of a span of this process."""
        return self._spans.start_span(name, _below(of), kind, attributes, start_time=self._now_ns())

    def end(self, span: Span, error: str | None = None, *, ended_ns: int = 0) -> None:
        """End ``span``, with ``error`` if one is given; does nothing when it has ended."""
        if span.is_recording():
            if error is not None:
                span.set_status(StatusCode.ERROR, cut(error) or None)
            span.end(ended_ns or self._now_ns())

    def _now_ns(self) -> int:
        return time.monotonic_ns() + self._offset_ns


def record_past(
    tracer: Tracer,
    name: str,
    *,
    trace_id: str,
    start_s: float,
    end_s: float,
    attributes: dict[str, Value],
    error: str | None = None,
) -> None:
    """Record something that is over as a span without a parent in the trace ``trace_id``; times since 1970."""
    start_ns = int(start_s * _NS)
    parent = TraceParent(trace_id, "", is_sampled=True)
    span = tracer.start(name, SpanKind.INTERNAL, parent, attributes, start_ns=start_ns)
    tracer.end(span, error, ended_ns=max(int(end_s * _NS), start_ns))


def _below(span: Span) -> Context:
    return trace.set_span_in_context(span, Context())


# A module variable: a process exports its spans in one way, as it does its logs. While tracing is off, finding None is
# all that it costs.
_tracer: Tracer | None = None


def set_process_tracer(tracer: Tracer | None) -> None:
    """Set the process' tracer; called where tracing is opened and closed."""
    global _tracer  # noqa: PLW0603 - one for the process
    _tracer = tracer


def process_tracer() -> Tracer | None:
    """The process' tracer; None while tracing is off."""
    return _tracer


def open_tracing(
    settings: TracingSettings | None,
    service: str,
    instance_id: str,
    attributes: Mapping[str, str] | None = None,
) -> OtlpTracing | None:
    """Start exporting spans as ``service`` (``service.name``, unless the environment names another); None when off.

    ``attributes`` are the resource's. From then on the tracer is `process_tracer`.
    """
    if settings is None:
        return None
    for name, value in settings.variables.items():
        if not os.environ.get(name):
            os.environ[name] = value  # the SDK reads them there
    from serve_common.telemetry.otlp import OtlpTracing  # noqa: PLC0415 - slow import

    opened = OtlpTracing(settings, service, instance_id, attributes or {})
    set_process_tracer(opened.tracer)
    return opened


def import_ahead(settings: TracingSettings | None) -> None:
    """Import what `open_tracing` will need, when tracing is on."""
    if settings is not None:
        from serve_common.telemetry import otlp  # noqa: F401, PLC0415 - slow import


class RequestObserver(Protocol):
    """Observes one request; `RequestTrace` is one.

    Why a protocol: a request may be traced, logged, or both, and dispatch need not know which.
    """

    def waits(self, why: str) -> None:
        """The request waits from now on: in the router's queue (``replica``), or for NATS to reconnect (``bus``)."""
        ...

    def attempt_started(self, replica: ReplicaTag, *, may_queue: bool) -> str:
        """The request is sent to ``replica``; returns the traceparent to send along."""
        ...

    def attempt_failed(self, kind: str, text: str) -> None:
        """The current attempt gets no response, and why; `attempt_ended` ends it."""
        ...

    def attempt_ended(self, status: int) -> None:
        """The current attempt has ended; ``status`` of the response, or 0 when there is none."""
        ...


CHILDREN_MAX: Final = 64
"""Child spans of a request in one process: one that is refused again and again must not fill a trace."""


class RequestTrace:
    """Traces one request: its own span, its waits, and every attempt. Used by one thread at a time.

    Why one object: only a sampled request has one, and dispatch reports each event to it with a single call.
    """

    __slots__ = ("_attempt", "_attempts", "_children", "_error", "_tracer", "_wait", "span")

    def __init__(self, tracer: Tracer, span: Span) -> None:
        """``span`` is the request's own, already started."""
        self.span: Final = span
        self._tracer = tracer
        self._wait: Span | None = None
        self._attempt: Span | None = None
        self._attempts = 0
        self._children = 0
        self._error: str | None = None

    def waits(self, why: str) -> None:
        """The request waits from now on: in the router's queue (``replica``), or for NATS to reconnect (``bus``)."""
        if self._wait is None and self._may_add():
            attributes: dict[str, Value] = {"muster.waits_for": why}
            self._wait = self._tracer.child(self.span, "queue", SpanKind.INTERNAL, attributes)

    def attempt_started(self, replica: ReplicaTag, *, may_queue: bool) -> str:
        """The request is sent to ``replica``; returns the traceparent to send along."""
        self._end_wait()
        self.attempt_ended(0)
        self._attempts += 1
        if not self._may_add():
            return get_traceparent(self.span)
        backend_tag = parse_backend_tag(replica)
        attributes: dict[str, Value] = {
            "muster.backend_tag": backend_tag,
            "muster.replica_tag": replica,
            "muster.attempt": self._attempts,
        }
        if may_queue:
            attributes["muster.waits_in_replica"] = True
        self._attempt = self._tracer.child(self.span, f"attempt {backend_tag}", SpanKind.CLIENT, attributes)
        return get_traceparent(self._attempt)

    def attempt_failed(self, kind: str, text: str) -> None:
        """The current attempt gets no response, and why; `attempt_ended` ends it."""
        if self._attempt is not None:
            self._attempt.set_attribute("error.type", kind)
            self._error = text

    def attempt_ended(self, status: int) -> None:
        """The current attempt has ended; ``status`` of the response, or 0 when there is none.

        Without a response and without a reason the attempt was cancelled.
        """
        attempt = self._attempt
        if attempt is None:
            return
        self._attempt = None
        error, self._error = self._error, None
        if error is None and status:
            attempt.set_attribute("http.response.status_code", status)
            if status >= 500:
                attempt.set_attribute("error.type", str(status))
                error = ""
        elif error is None:
            attempt.set_attribute("error.type", "cancelled")
        self._tracer.end(attempt, error)

    def end(self, error: str | None = None) -> None:
        """End the request's span, with ``error`` if one is given; does nothing when it has ended."""
        self._end_wait()
        self.attempt_ended(0)
        if self._attempts > 1:
            self.span.set_attribute("muster.attempts", self._attempts)
        self._tracer.end(self.span, error)

    def _end_wait(self) -> None:
        wait, self._wait = self._wait, None
        if wait is not None:
            self._tracer.end(wait)

    def _may_add(self) -> bool:
        self._children += 1
        return self._children <= CHILDREN_MAX


_METHODS: Final = frozenset({*METHODS, "CONNECT", "TRACE"})
_OTHER: Final = "_OTHER"
_CLIENT_GONE: Final = 499


def request_attributes(method: str, path: str, scheme: str, request_id: str) -> dict[str, Value]:
    """Attributes of the server's span that are known from the start.

    Source: https://opentelemetry.io/docs/specs/semconv/http/http-spans/ (stable since 1.23). Queries, headers and
    bodies are left out: they may contain secrets.
    """
    attributes: dict[str, Value] = {
        "http.request.method": method if method in _METHODS else _OTHER,
        "url.path": cut(path),
        "url.scheme": scheme,
        "muster.request_id": request_id,
    }
    if method not in _METHODS:
        attributes["http.request.method_original"] = cut(method)
    return attributes


def get_name(method: str) -> str:
    """The span's name until its route is known."""
    return method if method in _METHODS else "HTTP"


def note_route(trace: RequestTrace, method: str, route: str, endpoint_tag: str) -> None:
    """Set the span's name and attributes once the endpoint is known."""
    span = trace.span
    if route:
        span.update_name(f"{get_name(method)} {route}")
        span.set_attribute("http.route", route)
    span.set_attribute("muster.endpoint_tag", endpoint_tag)


def end_request(trace: RequestTrace, status: int, error_type: str = "", error: str = "") -> None:
    """End the request's span with this status; 499 means that its client disconnected.

    ``error_type`` and ``error`` describe a failure of this process itself. A status below 500 is no failure of a
    server's span. Does nothing when the span has ended.
    """
    span = trace.span
    if not span.is_recording():
        return
    if status == _CLIENT_GONE:
        span.set_attribute("error.type", "client_gone")
        trace.end()
        return
    span.set_attribute("http.response.status_code", status)
    if error_type:
        span.set_attribute("error.type", error_type)
    elif status >= 500:
        span.set_attribute("error.type", str(status))
    trace.end(error if status >= 500 else None)


@contextmanager
def operation(
    name: str,
    attributes: dict[str, Value] | None = None,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    traceparent: str = "",
    tracestate: str = "",
    after: Cause | None = None,
    seconds_ago: float = 0.0,
) -> Iterator[Span | None]:
    """A span around the block: a child of the current operation, or of the span in ``traceparent``, or of ``after``
    (an operation of this process that caused this one), or the root of a new trace. None where nothing is traced.
    Its start lies ``seconds_ago``. An exception ends it as failed.

    Why a context manager over the process' tracer: the code that does the work needs to know nothing about tracing, and
    while it is off a ``with`` costs one check for None.
    """
    tracer = process_tracer()
    if tracer is None:
        yield None
        return
    current = trace.get_current_span().get_span_context()
    parent = current if current.is_valid else after or tracer.decide(traceparent)
    known = {
        key: cut(value) if isinstance(value, str) else value for key, value in (attributes or {}).items()
    }
    start_ns = tracer.at_ns(time.monotonic() - seconds_ago)
    span = tracer.start(name, kind, parent, known, tracestate=tracestate, start_ns=start_ns)
    error: str | None = "interrupted"
    try:
        with trace.use_span(span, record_exception=False, set_status_on_exception=False):
            yield span if span.is_recording() else None
        error = None
    except Exception as caught:
        span.set_attribute("error.type", type(caught).__name__)
        error = str(caught)
        raise
    finally:
        tracer.end(span, error)


@contextmanager
def part(name: str) -> Iterator[Span | None]:
    """A span around the block if there is a current operation; otherwise no trace is started."""
    if not trace.get_current_span().is_recording():
        yield None
        return
    with operation(name) as span:
        yield span


def note(name: str, value: Value) -> None:
    """Set an attribute of the current operation, if there is one."""
    trace.get_current_span().set_attribute(name, cut(value) if isinstance(value, str) else value)


def current_cause() -> Cause | None:
    """The current operation's span, for an operation that it causes; None when none is sampled."""
    span = trace.get_current_span()
    return span.get_span_context() if span.is_recording() else None
