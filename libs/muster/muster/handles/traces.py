"""The spans of calls by handles: each below the span that its code works in, the callee's spans below it.

Why it asks twice where the code is: its own OpenTelemetry spans, if it makes any, are nearer than the request's.
"""

from __future__ import annotations

from serve_common.dispatch.errors import error_type_of
from serve_common.errors import ServeError
from serve_common.request_context import RequestContext
from serve_common.tracing.request_trace import RequestTrace
from serve_common.tracing.spans import SpanKind, Value, cut
from serve_common.tracing.trace_context import format_traceparent, may_be_sampled, parse_traceparent
from serve_common.tracing.tracer import Tracer
from serve_common.wires.frames import Headers


def begin_call(
    tracer: Tracer, context: RequestContext | None, endpoint: str, method_name: str
) -> tuple[RequestTrace | None, str]:
    """The trace of a call that is made now, if it is sampled, and the traceparent that goes with it either way.

    A call that belongs to no trace yet begins one.
    """
    known = "" if context is None else context.traceparent
    if known and not may_be_sampled(known) and tracer.sampler.respects_parent:
        return None, known
    parent = tracer.entered()
    if context is not None and known:
        if parent is not None and parent.trace_id != context.trace_id:
            parent = None  # left over from elsewhere; the request knows better
        if parent is None:
            parent = parse_traceparent(known, context.tracestate)
    trace_id = tracer.new_trace_id() if parent is None else parent.trace_id
    if not tracer.sampler.decide(parent, trace_id):
        span_id = tracer.new_span_id() if parent is None else parent.span_id
        return None, format_traceparent(trace_id, span_id, is_sampled=False)
    attributes: dict[str, Value] = {
        "muster.endpoint_tag": endpoint,
        "rpc.method": cut(method_name or "__call__"),
    }
    if context is not None:
        attributes["muster.request_id"] = context.request_id
    span = tracer.begin_sampled(f"handle {endpoint}", SpanKind.CLIENT, parent, attributes, trace_id=trace_id)
    return RequestTrace(tracer, span), span.traceparent


def headers_of(trace: RequestTrace | None) -> Headers:
    """What of a trace has no place in a request's head."""
    if trace is None or not trace.span.tracestate:
        return []
    return [(b"tracestate", trace.span.tracestate.encode())]


def end_call(trace: RequestTrace, failure: ServeError | None) -> None:
    """The call has ended, by ``failure`` if there is one."""
    if failure is None:
        trace.end()
    else:
        trace.span.attributes["error.type"] = error_type_of(failure)
        trace.end(str(failure))
