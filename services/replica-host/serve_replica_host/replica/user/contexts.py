"""The request context and the trace of user code, set for each request.

Why the deadline is removed when a response starts: it bounds the time until then, and a stream may last for hours.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from serve_common.protocol.frames import CallHead, RequestKind
from serve_common.runtime.request_context import RequestContext, request_context
from serve_common.telemetry.spans import (
    SpanRef,
    format_traceparent,
    may_be_sampled,
    parse_traceparent,
    parse_tracestate,
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
        if tracer.enter_unsampled is not None:
            _enter_unsampled(traceparent, tracer.enter_unsampled)
        return
    parent = parse_traceparent(traceparent, parse_tracestate(head.headers)) if traceparent else None
    trace_id = tracer.new_trace_id() if parent is None else parent.trace_id
    if not tracer.sampler.decide(parent, trace_id):
        span_id = tracer.new_span_id() if parent is None else parent.span_id
        decided = format_traceparent(trace_id, span_id, is_sampled=False)
        _change_context(traceparent=decided)
        if tracer.enter_unsampled is not None:
            _enter_unsampled(decided, tracer.enter_unsampled)
        return
    call = head.call or _NO_CALL
    trace = exchange.trace = traces.begin(
        parent,
        trace_id,
        kind=head.kind.name.lower(),
        method_name=call.method_name,
        request_id=head.request_id,
        began_at=exchange.began_at,
    )
    span = trace.user_code
    _change_context(traceparent=span.traceparent, tracestate=span.tracestate)
    if head.kind is RequestKind.HTTP or head.kind is RequestKind.WEBSOCKET:
        # Instrumentation of applications reads this header; the client's own would omit all spans between.
        head.headers[:] = [header for header in head.headers if header[0] != b"traceparent"]
        head.headers.append((b"traceparent", span.traceparent.encode()))
    tracer.enter(span)


def _enter_unsampled(traceparent: str, enter: Callable[[SpanRef], None]) -> None:
    ref = parse_traceparent(traceparent)
    if ref is not None:
        enter(ref)


def _change_context(**changes: str) -> None:
    context = request_context.get()
    if context is not None:
        request_context.set(msgspec.structs.replace(context, **changes))


def on_response_started() -> None:
    """Remove the deadline of the running task's request, because its response has started."""
    context = request_context.get()
    if context is not None and context.deadline is not None:
        request_context.set(msgspec.structs.replace(context, deadline=None))
