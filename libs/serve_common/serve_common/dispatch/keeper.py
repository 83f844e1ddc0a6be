"""What the parts of dispatching that decide about calls may ask of whoever keeps them.

Why a protocol: changes, losses and parking end calls and send them anew, each for reasons of its own; how a call is
sent, and how what it holds is given back, stays in one place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from serve_common.dispatch.calls import Call
from serve_common.errors import ServeError
from serve_common.routing.outcomes import Dispatch, Refusal
from serve_common.routing.request_queue import RequestKey
from serve_common.routing.router import Router


class Keeper(Protocol):
    """Keeps the calls under way; the dispatcher."""

    @property
    def calls(self) -> Mapping[RequestKey, Call]:
        """Those that have not ended."""
        ...

    def submit(self, call: Call) -> None:
        """Choose for a call that has no router, and send it or let it wait."""
        ...

    def perform(self, router: Router, dispatches: Sequence[Dispatch]) -> None:
        """Send what the router gave a slot."""
        ...

    def leave_router(self, call: Call) -> bool:
        """Give back the call's slot or its place in the queue; False when the call has ended by that."""
        ...

    def refused(self, call: Call, reason: Refusal) -> None:
        """The replica did not begin the request."""
        ...

    def end_with(self, call: Call, error: ServeError) -> None:
        """The call ends without a (whole) answer."""
        ...

    def fail(self, call: Call, error: ServeError) -> None:
        """As `end_with`, and the replica is told."""
        ...
