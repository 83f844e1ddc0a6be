"""Which request the running user code works on, for whatever it calls: handles, batches, models, logs.

Why a context variable in the shared library: the replica sets it, and what users import reads it, without either
knowing the other. Threads that run plain functions get a copy of it.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final

import msgspec

from serve_common.tracing.trace_context import trace_id_of


class RequestContext(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What belongs to one request on its way through all replicas that work on it."""

    request_id: str = ""
    traceparent: str = ""
    """Of the span that calls made for this request belong below; W3C's form."""
    tracestate: str = ""
    """W3C's, for requests that are traced; empty for all others."""
    endpoint_tag: str = ""
    route: str = ""
    deadline: float | None = None
    """By `time.monotonic` of this process; what is called for this request must be answered by then."""
    model_id: str = ""
    """The multiplexed model that the request is for; empty for none."""
    key: bytes = b""
    """Of this one request in this process, for `departures`; empty where nobody tells when its caller leaves."""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits, whether or not the request is sampled; empty when it belongs to no trace."""
        return trace_id_of(self.traceparent)


request_context: Final[ContextVar[RequestContext | None]] = ContextVar("muster_request", default=None)
"""None outside of requests."""
