"""The span of a batch: below the first of its requests that is traced, and linked to the others.

Why links: a span has one parent, and a batch works for many.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from serve_common.request_context import RequestContext
from serve_common.tracing.process import process_tracer
from serve_common.tracing.spans import Span, SpanKind, Value
from serve_common.tracing.trace_context import SpanRef, may_be_sampled, parse_traceparent


def begin_batch(function_name: str, contexts: Sequence[RequestContext | None]) -> Span | None:
    """A span for the batch of these requests, which the running task works below; None when none is traced."""
    tracer = process_tracer()
    if tracer is None:
        return None
    refs: list[SpanRef] = []
    for context in contexts:
        if context is not None and may_be_sampled(context.traceparent):
            ref = parse_traceparent(context.traceparent, context.tracestate)
            if ref is not None and tracer.sampler.decide(ref, ref.trace_id):
                refs.append(ref)
    if not refs:
        return None
    attributes: dict[str, Value] = {"muster.batch_size": len(contexts), "code.function.name": function_name}
    span = tracer.begin_sampled(
        f"batch {function_name}", SpanKind.INTERNAL, refs[0], attributes, links=tuple(refs[1:])
    )
    tracer.enter(span)
    return span


def below(span: Span, context: RequestContext | None) -> RequestContext | None:
    """``context`` for what the batch calls."""
    if context is None:
        return None
    return msgspec.structs.replace(context, traceparent=span.traceparent, tracestate=span.tracestate)


def end_batch(span: Span, failure: BaseException | None) -> None:
    """The batch has ended, by ``failure`` if there is one."""
    tracer = process_tracer()
    if tracer is None:
        return
    if failure is not None:
        span.attributes["error.type"] = type(failure).__qualname__
    tracer.end(span, None if failure is None else f"{type(failure).__qualname__}: {failure}")
