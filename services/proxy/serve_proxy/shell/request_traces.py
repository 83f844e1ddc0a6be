"""Starts or continues the traces of requests, by the client's ``traceparent``.

Why unsampled requests get a traceparent too: processes behind the proxy then know that the decision was made, and start
no trace of their own.
"""

from __future__ import annotations

from typing import Final, final

from serve_common.dispatch.calls import RequestSpec
from serve_common.names import EndpointTag
from serve_common.telemetry.request_traces import (
    RequestTrace,
    end_request,
    name_of,
    note_route,
    request_attributes,
)
from serve_common.telemetry.spans import (
    SpanKind,
    SpanRef,
    Value,
    cut,
    format_traceparent,
    parse_traceparent,
    parse_tracestate,
)
from serve_common.telemetry.tracer import Tracer
from serve_proxy.core.headers import ReceivedBody, RequestHeaders
from serve_proxy.core.problems import Problem

_SPAN_DIGITS: Final = 16


@final
class TracedRequest(RequestTrace):
    """The trace of one request of a proxy; an `ObservedRequest`."""

    __slots__ = ()

    def asks(self, ask: RequestSpec) -> None:
        """Add the route and the endpoint to the span."""
        note_route(self, ask.method, ask.route, ask.endpoint.tag)

    def ended(self, status: int, problem: Problem | None = None, sent_bytes: int = 0) -> None:  # noqa: ARG002 - for other observers
        """End the span with the status or the problem."""
        if problem is None:
            end_request(self, status)
        else:
            end_request(self, status, problem.code, problem.message)


@final
class RequestTraces:
    """Decides for each request whether it is traced; not created if tracing is off."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._ratio_bound = tracer.sampler.bound

    def begin(
        self,
        headers: RequestHeaders,
        method: str,
        path: str,
        scheme: str,
        request_id: str,
        *,
        peer: str = "",  # noqa: ARG002 - as `AccessLog.begin`
        body: ReceivedBody | None = None,  # noqa: ARG002 - as above
    ) -> TracedRequest | None:
        """Decide whether an HTTP request is sampled; returns its trace if so, and sets it as ``headers.follower``.
        ``headers.traceparent`` is set to what is sent to replicas.

        A trace that starts here uses the request id as its id if the proxy generated that, of 32 hexadecimal digits;
        ids chosen by clients may repeat.
        """
        parent = self._decide(headers, request_id)
        if parent is None:
            return None
        attributes = request_attributes(method, path, scheme, request_id)
        return self._start_span(headers, name_of(method), attributes, parent)

    def begin_call(self, headers: RequestHeaders, endpoint_tag: EndpointTag, request_id: str) -> None:
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

    def _decide(self, headers: RequestHeaders, request_id: str) -> SpanRef | None:
        """The parent of a sampled request's span, without a span id if the trace starts here; None if not sampled."""
        tracer = self._tracer
        traceparent = headers.traceparent
        parent = parse_traceparent(traceparent) if traceparent else None
        if parent is None:
            trace_id = tracer.new_trace_id() if headers.request_id else request_id
            if int(trace_id[-_SPAN_DIGITS:], 16) >= self._ratio_bound:
                # No span has this id: it is a placeholder for the unsampled one.
                headers.traceparent = format_traceparent(trace_id, trace_id[:_SPAN_DIGITS], is_sampled=False)
                return None
            return SpanRef(trace_id, "", is_sampled=True)
        if not tracer.sampler.decide(parent, parent.trace_id):
            headers.traceparent = format_traceparent(parent.trace_id, parent.span_id, is_sampled=False)
            return None
        return SpanRef(
            parent.trace_id, parent.span_id, is_sampled=True, tracestate=parse_tracestate(headers.forwarded)
        )

    def _start_span(
        self, headers: RequestHeaders, name: str, attributes: dict[str, Value], parent: SpanRef
    ) -> TracedRequest:
        span = self._tracer.start_sampled(
            name,
            SpanKind.SERVER,
            parent if parent.span_id else None,
            attributes,
            trace_id=parent.trace_id,
            is_parent_remote=bool(parent.span_id),
        )
        headers.traceparent = span.traceparent
        trace = headers.follower = TracedRequest(self._tracer, span)
        return trace
