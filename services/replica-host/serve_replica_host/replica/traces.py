"""The spans of a replica: one from a request's first frame to its answer's last one, and in it the user's code.

Why two: what a request waits for in the replica, and what its answer waits for on the way out, is not the user's code.
"""

from __future__ import annotations

from typing import Final, final

from serve_common.names import BackendTag, ReplicaTag
from serve_common.tracing.spans import Event, Span, SpanKind, Value, cut
from serve_common.tracing.trace_context import SpanRef
from serve_common.tracing.tracer import Tracer

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
    ) -> ExchangeTrace:
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
        return ExchangeTrace(
            tracer, span, tracer.child(span, f"user code {method_name}", SpanKind.INTERNAL, code)
        )


@final
class ExchangeTrace:
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
