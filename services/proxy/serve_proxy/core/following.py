"""Whoever follows HTTP requests: a trace, the access log, or both at once.

Why one interface: a request meets one question on its way, whether it is followed, and nothing else when it is not.
"""

from __future__ import annotations

from typing import Protocol

from serve_common.dispatch.calls import Ask
from serve_common.tracing.follower import RequestFollower
from serve_proxy.core.problems import Problem


class FollowedRequest(RequestFollower, Protocol):
    """One request from its arrival to its end."""

    def asks(self, ask: Ask) -> None:
        """Its endpoint was found, and this is what is asked of it."""
        ...

    def ended(self, status: int, problem: Problem | None = None, sent_bytes: int = 0) -> None:
        """It has ended with this status, which is that of the ``problem`` if this process has failed it.

        ``sent_bytes`` are those of a body that was here as a whole. Does nothing when it had ended.
        """
        ...


class ReceivedBody(Protocol):
    """The body of a request, as it arrives."""

    total_bytes: int
    """So far."""
