"""The spans of one sampled request on its way through this process' router: its own, waits, and every sending.

Why one object: whoever brings a request on its way says in one word what has happened, and only if there is one.
"""

from __future__ import annotations

from typing import Final

from serve_common.names import ReplicaTag, backend_tag_of
from serve_common.tracing.spans import Span, SpanKind, Value, cut
from serve_common.tracing.tracer import Tracer

CHILDREN_MAX: Final = 64
"""Spans below a request's own in one process: one that is refused again and again must not fill a trace."""


class RequestTrace:
    """Follows one request; a `RequestFollower`. Used by one thread at a time."""

    __slots__ = ("_attempt", "_attempts", "_children", "_error", "_tracer", "_wait", "span")

    def __init__(self, tracer: Tracer, span: Span) -> None:
        """``span`` is the request's own, begun."""
        self.span: Final = span
        self._tracer = tracer
        self._wait: Span | None = None
        self._attempt: Span | None = None
        self._attempts = 0
        self._children = 0
        self._error: str | None = None

    def waits(self, why: str) -> None:
        """It waits from now on: in the router's queue (``replica``), or for NATS to come back (``bus``)."""
        if self._wait is None and self._may_add():
            attributes: dict[str, Value] = {"muster.waits_for": why}
            self._wait = self._tracer.child(self.span, "queue", SpanKind.INTERNAL, attributes)

    def attempt_begun(self, replica: ReplicaTag, *, is_patient: bool) -> str:
        """It is sent to ``replica``; returns the traceparent to send along."""
        self._end_wait()
        self.attempt_ended(0)
        self._attempts += 1
        if not self._may_add():
            return self.span.traceparent
        backend_tag = backend_tag_of(replica)
        attributes: dict[str, Value] = {
            "muster.backend_tag": backend_tag,
            "muster.replica_tag": replica,
            "muster.attempt": self._attempts,
        }
        if is_patient:
            attributes["muster.waits_in_replica"] = True
        self._attempt = self._tracer.child(self.span, f"attempt {backend_tag}", SpanKind.CLIENT, attributes)
        return self._attempt.traceparent

    def attempt_failed(self, kind: str, text: str) -> None:
        """Why the sending that is under way brings no answer; it ends by `attempt_ended`."""
        if self._attempt is not None:
            self._attempt.attributes["error.type"] = kind
            self._error = text

    def attempt_ended(self, status: int) -> None:
        """The sending that is under way has ended; ``status`` of the answer, or 0 when there is none.

        Where nobody has said why there is none, nobody wants it any more.
        """
        attempt = self._attempt
        if attempt is None:
            return
        self._attempt = None
        error, self._error = self._error, None
        if error is None and status:
            attempt.attributes["http.response.status_code"] = status
            if status >= 500:
                attempt.attributes["error.type"] = str(status)
                error = ""
        elif error is None:
            attempt.attributes["error.type"] = "cancelled"
        self._tracer.end(attempt, error)

    def note(self, name: str, value: Value) -> None:
        """An attribute of the request's own span."""
        self.span.attributes[name] = cut(value) if isinstance(value, str) else value

    def end(self, error: str | None = None) -> None:
        """The request has ended, by an ``error`` if one is given; does nothing when it had."""
        self._end_wait()
        self.attempt_ended(0)
        if self._attempts > 1:
            self.span.attributes["muster.attempts"] = self._attempts
        self._tracer.end(self.span, error)

    def _end_wait(self) -> None:
        wait, self._wait = self._wait, None
        if wait is not None:
            self._tracer.end(wait)

    def _may_add(self) -> bool:
        self._children += 1
        return self._children <= CHILDREN_MAX
