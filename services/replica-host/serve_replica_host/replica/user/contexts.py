"""The request context and the trace of user code, set for each request.

Why the deadline is removed when a response starts: it bounds the time until then, and a stream may last for hours.
"""

from __future__ import annotations

import msgspec
from opentelemetry import context, trace

from serve_common.protocol.frames import CallHead, RequestKind
from serve_common.runtime.request_context import RequestContext, request_context
from serve_common.telemetry.request_traces import get_traceparent, get_tracestate, parse_span_context
from serve_common.telemetry.trace_context import (
    TraceParent,
    join_tracestate,
    may_be_sampled,
    parse_traceparent,
)
from serve_replica_host.replica.io.request import ReplicaRequest
from serve_replica_host.replica.telemetry.traces import Traces

_NO_CALL = CallHead()


def enter_request(exchange: ReplicaRequest) -> None:
    """Set the context of the running task to the request of ``exchange``."""
    head = exchange.head
    call = head.call or _NO_CALL
    request_context.set(
        RequestContext(
            request_id=head.request_id,
            traceparent=head.traceparent,
            endpoint_tag=head.endpoint_tag,
            route=head.route,
            deadline=exchange.deadline,
            model_id=call.model_id,
            key=exchange.reply,
        )
    )


def enter_trace(exchange: ReplicaRequest, traces: Traces) -> None:
    """Start the spans of ``exchange`` if it is traced, and make them current in the running task."""
    head, tracer = exchange.head, traces.tracer
    traceparent = head.traceparent
    if traceparent and not may_be_sampled(traceparent) and tracer.sampler.respects_parent:
        if tracer.must_enter_unsampled:
            _enter_unsampled(parse_traceparent(traceparent))
        return
    parent = tracer.decide(traceparent)
    if not parent.is_sampled:
        _change_context(traceparent=parent.header)
        if tracer.must_enter_unsampled:
            _enter_unsampled(parent)
        return
    call = head.call or _NO_CALL
    spans = exchange.trace = traces.start(
        parent,
        tracestate=join_tracestate(head.headers),
        kind=head.kind.name.lower(),
        method_name=call.method_name,
        request_id=head.request_id,
        started_at=exchange.started_at,
    )
    decided = get_traceparent(spans.user_code)
    _change_context(traceparent=decided, tracestate=get_tracestate(spans.user_code))
    if head.kind is RequestKind.HTTP or head.kind is RequestKind.WEBSOCKET:
        # Instrumentation of applications reads this header; the client's own would omit all spans between.
        head.headers[:] = [header for header in head.headers if header[0] != b"traceparent"]
        head.headers.append((b"traceparent", decided.encode()))
    _enter(spans.user_code)


def _enter_unsampled(parent: TraceParent | None) -> None:
    if parent is not None:
        _enter(trace.NonRecordingSpan(parse_span_context(parent)))


def _enter(span: trace.Span) -> None:
    """Make ``span`` current until the running task ends."""
    context.attach(trace.set_span_in_context(span))


def _change_context(**changes: str) -> None:
    request = request_context.get()
    if request is not None:
        request_context.set(msgspec.structs.replace(request, **changes))


def on_response_started() -> None:
    """Remove the deadline of the running task's request, because its response has started."""
    request = request_context.get()
    if request is not None and request.deadline is not None:
        request_context.set(msgspec.structs.replace(request, deadline=None))
