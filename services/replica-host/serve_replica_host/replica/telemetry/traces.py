"""The spans of a replica, and tracebacks reduced to frames of user code."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import traceback
from pathlib import Path
from typing import Final, final

from opentelemetry.trace import Span, SpanKind

from serve_common.names import BackendTag, ReplicaTag
from serve_common.protocol.reports import ERROR_LENGTH_MAX
from serve_common.telemetry.request_traces import Tracer, Value, cut
from serve_common.telemetry.trace_context import TraceParent
from serve_common.values import truncate, truncate_start

ERROR_LINE_LENGTH_MAX: Final = 1_000

_REPLICA_DIR: Final = str(Path(__file__).parent.parent)
_IMPORT: Final = ("<frozen ", str(Path(importlib.__file__).parent))
_LOOPS: Final = tuple(str(Path(module.__file__ or "").parent) for module in (asyncio, concurrent.futures))


def error_line(error: BaseException) -> str:
    """Type and message of ``error``, in at most `ERROR_LINE_LENGTH_MAX` characters."""
    message = str(error)
    line = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return truncate(line, ERROR_LINE_LENGTH_MAX)


def user_traceback(error: BaseException) -> str:
    """The traceback of ``error`` and its causes from the user's first frame on; the end is kept if it is long.

    Why: what a deploy prints when a constructor raises is the first thing that a new user debugs with.
    """
    formatter = traceback.TracebackException.from_exception(error, limit=-100)
    _trim(formatter, depth=0)
    text = "".join(formatter.format()).rstrip()
    return truncate_start(text, ERROR_LENGTH_MAX)


def _trim(formatter: traceback.TracebackException, depth: int) -> None:
    frames = list(formatter.stack)
    above = (_REPLICA_DIR, *_IMPORT, *_LOOPS)
    first = next((at for at, frame in enumerate(frames) if not frame.filename.startswith(above)), len(frames))
    # A frame of asyncio below the user's code shows where that code waits; import machinery is never useful.
    user_frames = [
        frame for frame in frames[first:] if not frame.filename.startswith((_REPLICA_DIR, *_IMPORT))
    ]
    formatter.stack = traceback.StackSummary.from_list(user_frames)
    for chained in (formatter.__cause__, formatter.__context__):
        if chained is not None and depth < 20:
            _trim(chained, depth + 1)


_STATUS_CALLER_GONE: Final = 499


@final
class Traces:
    """Starts the traces of requests; not created if tracing is off."""

    def __init__(self, tracer: Tracer, backend_tag: BackendTag, replica_tag: ReplicaTag) -> None:
        self.tracer: Final = tracer
        self._name = f"replica {backend_tag}"
        self._backend_tag = backend_tag
        self._replica_tag = replica_tag

    def start(
        self,
        parent: TraceParent,
        *,
        tracestate: str,
        kind: str,
        method_name: str,
        request_id: str,
        started_at: float,
    ) -> ReplicaRequestTrace:
        """Start the trace of a request that arrived at ``started_at`` (`time.monotonic`) and is about to run."""
        tracer = self.tracer
        attributes: dict[str, Value] = {
            "muster.backend_tag": self._backend_tag,
            "muster.replica_tag": self._replica_tag,
            "muster.request_kind": kind,
            "muster.request_id": request_id,
        }
        start_ns = tracer.at_ns(started_at)
        span = tracer.start(
            self._name, SpanKind.SERVER, parent, attributes, tracestate=tracestate, start_ns=start_ns
        )
        method_name = method_name or "__call__"
        code: dict[str, Value] = {"code.function.name": method_name}
        return ReplicaRequestTrace(
            tracer, span, tracer.child(span, f"user code {method_name}", SpanKind.INTERNAL, code)
        )


@final
class ReplicaRequestTrace:
    """The spans of one request in this replica.

    Why two spans: the time for which the request waits in the replica, and its response to be sent, is not that of the
    user's code.
    """

    __slots__ = ("_failure", "_tracer", "span", "user_code")

    def __init__(self, tracer: Tracer, span: Span, user_code: Span) -> None:
        self._tracer = tracer
        self._failure: str | None = None
        self.span: Final = span
        self.user_code: Final = user_code
        """The current span of user code. That may even end it; the request's own span still says how the code ended."""

    def code_raised(self, error: BaseException, line: str) -> None:
        """Record that the user's code raised ``error``, described by ``line``."""
        code = self.user_code
        if not code.is_recording():
            return
        self._failure = cut(line)
        code.set_attribute("error.type", type(error).__qualname__)
        event_attributes: dict[str, Value] = {
            "exception.type": type(error).__qualname__,
            "exception.message": self._failure,
        }
        code.add_event("exception", event_attributes)

    def code_ended(self, status: int, error_type: str, error: str) -> None:
        """End the span of the user's code, with the response's ``status`` (0 for unknown) or an error."""
        code = self.user_code
        if self._failure is None and (error_type or status >= 500):
            if code.is_recording():
                code.set_attribute("error.type", error_type or str(status))
            self._failure = error
        self._tracer.end(code, self._failure)

    def end(self, status: int, ended_at: float) -> None:
        """End the request's span: the response was sent or is not wanted; 499 means that the caller is gone."""
        span = self.span
        if not span.is_recording():
            return
        if status == _STATUS_CALLER_GONE:
            span.set_attribute("error.type", "caller_gone")
        elif status:
            span.set_attribute("http.response.status_code", status)
            if status >= 500:
                span.set_attribute("error.type", str(status))
                self._failure = self._failure or ""
        self._tracer.end(span, self._failure, ended_ns=self._tracer.at_ns(ended_at))
