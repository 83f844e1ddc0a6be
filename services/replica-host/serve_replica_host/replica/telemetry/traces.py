"""The spans of a replica, and user tracebacks as users want to read them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import traceback
from pathlib import Path
from typing import Final, final

from serve_common.names import BackendTag, ReplicaTag
from serve_common.protocol.reports import ERROR_LENGTH_MAX
from serve_common.telemetry.spans import Event, Span, SpanKind, SpanRef, Value, cut
from serve_common.telemetry.tracer import Tracer

ERROR_LINE_LENGTH_MAX: Final = 1_000

_OURS: Final = str(Path(__file__).parent.parent)
_IMPORT: Final = ("<frozen ", str(Path(importlib.__file__).parent))
_LOOPS: Final = tuple(str(Path(module.__file__ or "").parent) for module in (asyncio, concurrent.futures))


def error_line(error: BaseException) -> str:
    """``ValueError: what it says``, on at most `ERROR_LINE_LENGTH_MAX` characters."""
    said = str(error)
    line = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return line if len(line) <= ERROR_LINE_LENGTH_MAX else f"{line[: ERROR_LINE_LENGTH_MAX - 1]}…"


def user_traceback(error: BaseException) -> str:
    """The traceback of ``error`` and its causes from the user's first frame on; the end is kept if it is long."""
    told = traceback.TracebackException.from_exception(error, limit=-100)
    _trim(told, depth=0)
    text = "".join(told.format()).rstrip()
    return text if len(text) <= ERROR_LENGTH_MAX else "…" + text[-(ERROR_LENGTH_MAX - 1) :]


def _trim(told: traceback.TracebackException, depth: int) -> None:
    frames = list(told.stack)
    above = (_OURS, *_IMPORT, *_LOOPS)
    first = next((at for at, frame in enumerate(frames) if not frame.filename.startswith(above)), len(frames))
    # A frame of asyncio below the user's code says where that code waits; importing says nothing anywhere.
    kept = [frame for frame in frames[first:] if not frame.filename.startswith((_OURS, *_IMPORT))]
    told.stack = traceback.StackSummary.from_list(kept)
    for chained in (told.__cause__, told.__context__):
        if chained is not None and depth < 20:
            _trim(chained, depth + 1)


_CALLER_GONE: Final = 499


@final
class Traces:
    """Begins them; there is none where tracing is off."""

    def __init__(self, tracer: Tracer, backend_tag: BackendTag, replica_tag: ReplicaTag) -> None:
        self.tracer: Final = tracer
        self._name = f"replica {backend_tag}"
        self._backend_tag = backend_tag
        self._replica_tag = replica_tag

    def begin(
        self,
        parent: SpanRef | None,
        trace_id: str,
        *,
        kind: str,
        method_name: str,
        request_id: str,
        began_at: float,
    ) -> ReplicaRequestTrace:
        """For a request that came at ``began_at``, by `time.monotonic`, and whose code is called now.

        Without a ``parent`` the trace begins here.
        """
        tracer = self.tracer
        attributes: dict[str, Value] = {
            "muster.backend_tag": self._backend_tag,
            "muster.replica_tag": self._replica_tag,
            "muster.request_kind": kind,
            "muster.request_id": request_id,
        }
        span = tracer.begin_sampled(
            self._name,
            SpanKind.SERVER,
            parent,
            attributes,
            began_ns=tracer.at_ns(began_at),
            trace_id=trace_id,
            is_parent_remote=parent is not None,
        )
        method_name = method_name or "__call__"
        code: dict[str, Value] = {"code.function.name": method_name}
        return ReplicaRequestTrace(
            tracer, span, tracer.child(span, f"user code {method_name}", SpanKind.INTERNAL, code)
        )


@final
class ReplicaRequestTrace:
    """The spans of one request in this replica."""

    __slots__ = ("_tracer", "span", "user_code")

    def __init__(self, tracer: Tracer, span: Span, user_code: Span) -> None:
        self._tracer = tracer
        self.span: Final = span
        self.user_code: Final = user_code

    def code_raised(self, error: BaseException, line: str) -> None:
        """The user's code raised ``error``, which ``line`` tells, whatever its caller is told."""
        code = self.user_code
        if code.ended_ns:
            return
        code.error = cut(line)
        code.attributes["error.type"] = type(error).__qualname__
        told: dict[str, Value] = {"exception.type": type(error).__qualname__, "exception.message": code.error}
        code.events.append(Event("exception", self._tracer.now_ns(), told))

    def code_ended(self, status: int, error_type: str, error: str) -> None:
        """The user's code has done with the request: with an answer of that ``status`` (0 says nothing), or failed."""
        code = self.user_code
        failure = code.error  # which the code may have said of itself
        if failure is None and (error_type or status >= 500):
            code.attributes["error.type"] = error_type or str(status)
            failure = error
        self.span.error = failure
        self._tracer.end(code, failure)

    def end(self, status: int, ended_at: float) -> None:
        """All of the answer has left, or nobody wants it any more; 499: the caller went away."""
        span = self.span
        if status == _CALLER_GONE:
            span.attributes["error.type"] = "caller_gone"
        elif status:
            span.attributes["http.response.status_code"] = status
            if status >= 500:
                span.attributes["error.type"] = str(status)
                span.error = span.error or ""
        self._tracer.end(span, span.error, ended_ns=self._tracer.at_ns(ended_at))
