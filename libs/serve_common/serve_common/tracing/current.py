"""Which trace the running code belongs to, for logs and for whatever begins spans below it.

Why two sources: a request's trace is part of its context, which replicas set anyway; what the controller works on is no
request.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from serve_common.request_context import request_context

if TYPE_CHECKING:
    from serve_common.tracing.spans import Span

current_operation: Final[ContextVar[Span | None]] = ContextVar("muster_operation", default=None)
"""The span of the work that the running task does for nobody's request; see `operations`."""


def current_trace_id() -> str:
    """32 hexadecimal digits, sampled or not; empty outside of traces."""
    context = request_context.get()
    if context is not None:
        return context.trace_id
    span = current_operation.get()
    return "" if span is None else span.trace_id
