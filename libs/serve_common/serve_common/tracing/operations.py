"""Spans for what a process does for nobody's request: commands, plans, and their effects.

Why a context manager over a module's tracer: whoever does the work needs to know nothing about tracing, and where it is
off a ``with`` costs a look at None.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from serve_common.tracing.current import current_operation
from serve_common.tracing.process import process_tracer
from serve_common.tracing.spans import Span, SpanKind, Value, cut
from serve_common.tracing.trace_context import SpanRef, parse_traceparent
from serve_common.tracing.tracer import Tracer


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
    """A span around the block: below the operation that is under way, or below what ``traceparent`` names, or below
    ``after`` (an operation of this process that has led to this one), or the first of a new trace. None where nothing
    is traced. It began ``seconds_ago``. An exception ends it as failed.
    """
    tracer = process_tracer()
    span = None
    if tracer is not None:
        parent, is_remote = after, False
        if after is None and traceparent:
            parent, is_remote = parse_traceparent(traceparent, tracestate), True
        span = _begin(tracer, name, attributes or {}, kind, parent, is_remote=is_remote)
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
    """A span around the block if an operation is under way; what belongs to none begins no trace."""
    if current_operation.get() is None:
        yield None
        return
    with operation(name, attributes) as span:
        yield span


def note(name: str, value: Value) -> None:
    """An attribute of the operation that is under way, if there is one."""
    span = current_operation.get()
    if span is not None:
        span.attributes[name] = cut(value) if isinstance(value, str) else value


def current_ref() -> SpanRef | None:
    """Names the operation that is under way, for one that it leads to; None when there is none."""
    span = current_operation.get()
    return None if span is None else span.ref


def _begin(
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
        return tracer.begin_root(name, kind, known)
    if not tracer.sampler.decide(parent, parent.trace_id):
        return None
    return tracer.begin_sampled(name, kind, parent, known, is_parent_remote=is_remote)
