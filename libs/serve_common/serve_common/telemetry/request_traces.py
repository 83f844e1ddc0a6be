"""The spans of one request in a router, of HTTP requests, and of operations outside of requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from serve_common.config.endpoint import METHODS
from serve_common.names import ReplicaTag, parse_backend_tag
from serve_common.telemetry.spans import Span, SpanKind, SpanRef, Value, cut, parse_traceparent
from serve_common.telemetry.tracer import Tracer, current_operation, process_tracer


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
            return self.span.traceparent
        backend_tag = parse_backend_tag(replica)
        attributes: dict[str, Value] = {
            "muster.backend_tag": backend_tag,
            "muster.replica_tag": replica,
            "muster.attempt": self._attempts,
        }
        if may_queue:
            attributes["muster.waits_in_replica"] = True
        self._attempt = self._tracer.child(self.span, f"attempt {backend_tag}", SpanKind.CLIENT, attributes)
        return self._attempt.traceparent

    def attempt_failed(self, kind: str, text: str) -> None:
        """The current attempt gets no response, and why; `attempt_ended` ends it."""
        if self._attempt is not None:
            self._attempt.attributes["error.type"] = kind
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
            attempt.attributes["http.response.status_code"] = status
            if status >= 500:
                attempt.attributes["error.type"] = str(status)
                error = ""
        elif error is None:
            attempt.attributes["error.type"] = "cancelled"
        self._tracer.end(attempt, error)

    def note(self, name: str, value: Value) -> None:
        """Set an attribute of the request's own span."""
        self.span.attributes[name] = cut(value) if isinstance(value, str) else value

    def end(self, error: str | None = None) -> None:
        """End the request's span, with ``error`` if one is given; does nothing when it has ended."""
        self._end_wait()
        self.attempt_ended(0)
        if self._attempts > 1:
            self.span.attributes["muster.attempts"] = self._attempts
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


def name_of(method: str) -> str:
    """The span's name until its route is known."""
    return method if method in _METHODS else "HTTP"


def note_route(trace: RequestTrace, method: str, route: str, endpoint_tag: str) -> None:
    """Set the span's name and attributes once the endpoint is known."""
    trace.span.name = f"{name_of(method)} {route}" if route else name_of(method)
    if route:
        trace.span.attributes["http.route"] = route
    trace.span.attributes["muster.endpoint_tag"] = endpoint_tag


def end_request(trace: RequestTrace, status: int, error_type: str = "", error: str = "") -> None:
    """End the request's span with this status; 499 means that its client disconnected.

    ``error_type`` and ``error`` describe a failure of this process itself. A status below 500 is no failure of a
    server's span. Does nothing when the span has ended.
    """
    if trace.span.ended_ns:
        return
    attributes = trace.span.attributes
    if status == _CLIENT_GONE:
        attributes["error.type"] = "client_gone"
        trace.end()
        return
    attributes["http.response.status_code"] = status
    if error_type:
        attributes["error.type"] = error_type
    elif status >= 500:
        attributes["error.type"] = str(status)
    trace.end(error if status >= 500 else None)


@contextmanager
def operation(
    name: str,
    attributes: dict[str, Value] | None = None,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    traceparent: str = "",
    tracestate: str = "",
    after: SpanRef | None = None,
    seconds_ago: float = 0.0,
) -> Iterator[Span | None]:
    """A span around the block: a child of the current operation, or of the span in ``traceparent``, or of ``after``
    (an operation of this process that caused this one), or the root of a new trace. None where nothing is traced.
    Its start lies ``seconds_ago``. An exception ends it as failed.

    Why a context manager over the process' tracer: the code that does the work needs to know nothing about tracing, and
    while it is off a ``with`` costs one check for None.
    """
    tracer = process_tracer()
    span = None
    if tracer is not None:
        parent, is_remote = after, False
        if after is None and traceparent:
            parent, is_remote = parse_traceparent(traceparent, tracestate), True
        span = _start_span(tracer, name, attributes or {}, kind, parent, is_remote=is_remote)
    if tracer is None or span is None:
        yield None
        return
    span.began_ns -= int(seconds_ago * 1e9)
    token = current_operation.set(span)
    error: str | None = "interrupted"
    try:
        yield span
        error = None
    except Exception as caught:
        span.attributes["error.type"] = type(caught).__name__
        error = str(caught)
        raise
    finally:
        current_operation.reset(token)
        tracer.end(span, error)


@contextmanager
def part(name: str, attributes: dict[str, Value] | None = None) -> Iterator[Span | None]:
    """A span around the block if there is a current operation; otherwise no trace is started."""
    if current_operation.get() is None:
        yield None
        return
    with operation(name, attributes) as span:
        yield span


def note(name: str, value: Value) -> None:
    """Set an attribute of the current operation, if there is one."""
    span = current_operation.get()
    if span is not None:
        span.attributes[name] = cut(value) if isinstance(value, str) else value


def current_ref() -> SpanRef | None:
    """The current operation's span, for an operation that it causes; None when there is none."""
    span = current_operation.get()
    return None if span is None else span.ref


def _start_span(
    tracer: Tracer,
    name: str,
    attributes: dict[str, Value],
    kind: SpanKind,
    parent: SpanRef | None,
    *,
    is_remote: bool,
) -> Span | None:
    known = {key: cut(value) if isinstance(value, str) else value for key, value in attributes.items()}
    above = current_operation.get()
    if above is not None:
        return tracer.child(above, name, kind, known)
    if parent is None:
        return tracer.start_root(name, kind, known)
    if not tracer.sampler.decide(parent, parent.trace_id):
        return None
    return tracer.start_sampled(name, kind, parent, known, is_parent_remote=is_remote)
