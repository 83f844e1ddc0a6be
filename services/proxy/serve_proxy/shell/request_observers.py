"""What observes a request on its way through the proxy: its trace if it is sampled, and the access log's line.

Why observers: what is off costs nothing. For a traced request the log's observer wraps that of the trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol, final

from opentelemetry.trace import SpanKind

from serve_common.dispatch.calls import RequestSpec
from serve_common.names import EndpointTag, ReplicaTag, parse_backend_tag
from serve_common.protocol.frames import RequestKind
from serve_common.telemetry.request_traces import (
    RequestTrace,
    Tracer,
    Value,
    cut,
    end_request,
    get_name,
    get_trace_id,
    get_traceparent,
    note_route,
    request_attributes,
)
from serve_common.telemetry.trace_context import TraceParent, join_tracestate
from serve_proxy.core.access_line import METHOD_LENGTH_MAX, AccessLine, bounded_path
from serve_proxy.core.headers import ReceivedBody, RequestHeaders, get_client
from serve_proxy.core.problems import Problem


@final
class TracedRequest(RequestTrace):
    """The trace of one request of a proxy; an `ObservedRequest`."""

    __slots__ = ()

    def on_request(self, spec: RequestSpec) -> None:
        """Add the route and the endpoint to the span."""
        note_route(self, spec.method, spec.route, spec.endpoint.tag)

    def ended(self, status: int, problem: Problem | None = None, sent_bytes: int = 0) -> None:  # noqa: ARG002 - for other observers
        """End the span with the status or the problem."""
        if problem is None:
            end_request(self, status)
        else:
            end_request(self, status, problem.code, problem.message)


@final
class RequestTraces:
    """Starts or continues the traces of requests, by the client's ``traceparent``; not created if tracing is off.

    Why unsampled requests get a traceparent too: processes behind the proxy then know that the decision was made, and
    start no trace of their own.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def start(
        self,
        headers: RequestHeaders,
        method: str,
        path: str,
        scheme: str,
        request_id: str,
        *,
        peer: str = "",  # noqa: ARG002 - as `AccessLog.start`
        body: ReceivedBody | None = None,  # noqa: ARG002 - as above
    ) -> TracedRequest | None:
        """Decide whether an HTTP request is sampled; returns its trace if so, and sets it as ``headers.observer``.
        ``headers.traceparent`` is set to what is sent to replicas.

        A trace that starts here has the digits of the request's id as its own if the proxy generated that; ids chosen
        by clients may repeat.
        """
        parent = self._decide(headers, request_id)
        if parent is None:
            return None
        attributes = request_attributes(method, path, scheme, request_id)
        return self._start_span(headers, get_name(method), attributes, parent)

    def start_call(self, headers: RequestHeaders, endpoint_tag: EndpointTag, request_id: str) -> None:
        """Decide the same for a call over NATS."""
        parent = self._decide(headers, request_id)
        if parent is None:
            return
        attributes: dict[str, Value] = {
            "rpc.system.name": "nats",
            "muster.endpoint_tag": cut(endpoint_tag),
            "muster.request_id": request_id,
        }
        self._start_span(headers, "call", attributes, parent)

    def _decide(self, headers: RequestHeaders, request_id: str) -> TraceParent | None:
        """The parent of a sampled request's span; None if it is not sampled."""
        # A client may repeat its request ids, so they name no trace.
        parent = self._tracer.decide(
            headers.traceparent, "" if headers.request_id else request_id.replace("-", "")
        )
        if parent.is_sampled:
            return parent
        headers.traceparent = parent.header
        return None

    def _start_span(
        self, headers: RequestHeaders, name: str, attributes: dict[str, Value], parent: TraceParent
    ) -> TracedRequest:
        tracestate = join_tracestate(headers.forwarded)
        span = self._tracer.start(name, SpanKind.SERVER, parent, attributes, tracestate=tracestate)
        headers.traceparent = get_traceparent(span)
        trace = headers.observer = TracedRequest(self._tracer, span)
        return trace


_HTTP: Final = "http"
_STREAM: Final = "stream"
_WEBSOCKET: Final = "websocket"
_ABNORMAL: Final = 1006
"""Close code of a WebSocket that ended without a close frame (RFC 6455, 7.4.1)."""


class ResponseProgress(Protocol):
    """A response that is being sent to the client."""

    written_bytes: int
    failure: str
    """Why it broke off; empty when it did not, or when the client disconnected."""


class OpenSocket(Protocol):
    """A WebSocket with a client."""

    received_messages: int
    received_message_bytes: int
    sent_messages: int
    sent_message_bytes: int
    last_code: int
    """The close code sent by either side; 0 before that."""
    failure: str
    """Why it failed; empty when it did not."""


@final
class LoggedRequest:
    """Collects the fields of one request's line; an `ObservedRequest`."""

    __slots__ = (
        "_attempts",
        "_backend_tag",
        "_body",
        "_client",
        "_endpoint_tag",
        "_is_ended",
        "_kind",
        "_method",
        "_path",
        "_progress",
        "_replica_tag",
        "_request_id",
        "_socket",
        "_started_at",
        "_trace",
        "_traceparent",
        "_write",
    )

    def __init__(
        self,
        write: Callable[[AccessLine], None],
        method: str,
        path: str,
        request_id: str,
        *,
        client: str,
        body: ReceivedBody,
        trace: TracedRequest | None,
    ) -> None:
        self._write = write
        self._started_at = time.perf_counter()
        self._method = method
        self._path = path
        self._request_id = request_id
        self._client = client
        self._body = body
        self._trace = trace
        self._kind = _HTTP
        self._endpoint_tag = self._backend_tag = self._replica_tag = self._traceparent = ""
        self._attempts = 0
        self._progress: ResponseProgress | None = None
        self._socket: OpenSocket | None = None
        self._is_ended = False

    # -- `ObservedRequest` --

    def on_request(self, spec: RequestSpec) -> None:
        """Note the endpoint and the backend."""
        self._endpoint_tag = spec.endpoint.tag
        self._backend_tag = spec.backend_tag or spec.endpoint.split.sole or ""
        self._traceparent = spec.traceparent
        if spec.kind is RequestKind.WEBSOCKET:
            self._kind = _WEBSOCKET
        if self._trace is not None:
            self._trace.on_request(spec)

    def waits(self, why: str) -> None:
        """Pass on to the trace; not logged."""
        if self._trace is not None:
            self._trace.waits(why)

    def attempt_started(self, replica: ReplicaTag, *, may_queue: bool) -> str:
        """Count the attempt and note its replica; returns the traceparent to send."""
        self._replica_tag = replica
        self._attempts += 1
        if self._trace is not None:
            return self._trace.attempt_started(replica, may_queue=may_queue)
        return self._traceparent

    def attempt_failed(self, kind: str, text: str) -> None:
        """Pass on to the trace; not logged."""
        if self._trace is not None:
            self._trace.attempt_failed(kind, text)

    def attempt_ended(self, status: int) -> None:
        """Pass on to the trace; not logged."""
        if self._trace is not None:
            self._trace.attempt_ended(status)

    def ended(self, status: int, problem: Problem | None = None, sent_bytes: int = 0) -> None:
        """Write the line."""
        if self._is_ended:
            return
        self._is_ended = True
        progress, socket, trace = self._progress, self._socket, self._trace
        bytes_in, messages_in, messages_out, close_code = self._body.total_bytes, None, None, 0
        error = "" if problem is None else problem.code
        if progress is not None:
            sent_bytes = progress.written_bytes
            error = error or progress.failure
        elif socket is not None:
            bytes_in, sent_bytes = socket.received_message_bytes, socket.sent_message_bytes
            messages_in, messages_out = socket.received_messages, socket.sent_messages
            close_code = socket.last_code or _ABNORMAL
            error = error or socket.failure
        replica_tag = self._replica_tag
        self._write(
            AccessLine(
                kind=self._kind,
                method=self._method[:METHOD_LENGTH_MAX],
                path=bounded_path(self._path),
                status=status,
                bytes_in=bytes_in,
                bytes_out=sent_bytes,
                duration_ms=round((time.perf_counter() - self._started_at) * 1000, 3),
                request_id=self._request_id,
                endpoint_tag=self._endpoint_tag,
                backend_tag=parse_backend_tag(ReplicaTag(replica_tag)) if replica_tag else self._backend_tag,
                replica_tag=replica_tag,
                attempts=self._attempts or 1,
                messages_in=messages_in,
                messages_out=messages_out,
                close_code=close_code,
                error=error,
                client=self._client,
                trace_id="" if trace is None else get_trace_id(trace.span),
            )
        )
        # They reference the connection, and that this request: the cycle would need the garbage collector.
        self._progress = self._socket = None
        if trace is not None:
            trace.ended(status, problem, sent_bytes)

    # -- only for the log --

    def sends(self, progress: ResponseProgress, *, is_stream: bool) -> None:
        """The ``progress`` is being sent; its size and failure are read at the end."""
        self._progress = progress
        if is_stream:
            self._kind = _STREAM

    def talks(self, socket: OpenSocket) -> None:
        """The handshake succeeded; message counts are read from the ``socket`` at the end."""
        self._socket = socket


@final
class AccessLog:
    """Attaches a `LoggedRequest` to each request that arrives."""

    def __init__(self, write: Callable[[AccessLine], None], traces: RequestTraces | None) -> None:
        """``write`` receives lines and neither blocks nor raises; ``traces`` is None if tracing is off."""
        self._write = write
        self._traces = traces

    def start(
        self,
        headers: RequestHeaders,
        method: str,
        path: str,
        scheme: str,
        request_id: str,
        *,
        peer: str,
        body: ReceivedBody,
    ) -> None:
        """Set ``headers.observer``, as `RequestTraces.begin` does; all requests are logged, traced or not."""
        trace = None
        if self._traces is not None:
            trace = self._traces.start(headers, method, path, scheme, request_id)
        client = get_client(headers.forwarded_for, peer)
        headers.observer = LoggedRequest(
            self._write, method, path, request_id, client=client, body=body, trace=trace
        )

    def refused(self, method: str, path: str, request_id: str, peer: str, problem: Problem) -> None:
        """Write the line of an invalid request that was answered with ``problem``."""
        self._write(
            AccessLine(
                kind=_HTTP,
                method=method[:METHOD_LENGTH_MAX],
                path=bounded_path(path),
                status=problem.status,
                bytes_in=0,
                bytes_out=0,
                duration_ms=0.0,
                request_id=request_id,
                error=problem.code,
                client=peer,
            )
        )
