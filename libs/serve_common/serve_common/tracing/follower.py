"""Who is told what happens to one request on its way through a router.

Why an interface: what follows a request may be a trace, a line of a log, or both; whoever brings the request on its way
need not know.
"""

from __future__ import annotations

from typing import Protocol

from serve_common.names import ReplicaTag


class RequestFollower(Protocol):
    """Of one request; `RequestTrace` is one."""

    def waits(self, why: str) -> None:
        """It waits from now on: in the router's queue (``replica``), or for NATS to come back (``bus``)."""
        ...

    def attempt_begun(self, replica: ReplicaTag, *, is_patient: bool) -> str:
        """It is sent to ``replica``; returns the traceparent to send along."""
        ...

    def attempt_failed(self, kind: str, text: str) -> None:
        """Why the sending that is under way brings no answer; it ends by `attempt_ended`."""
        ...

    def attempt_ended(self, status: int) -> None:
        """The sending that is under way has ended; ``status`` of the answer, or 0 when there is none."""
        ...
