"""What becomes of requests while the bus is away, and when it is back.

Why apart from dispatching: how long and how many requests wait for the bus, and what a reconnect may have cost those
that were under way, has nothing to do with how requests are sent and answered.
"""

from __future__ import annotations

import asyncio
from typing import Final, final

from serve_common.dispatch.calls import Call
from serve_common.dispatch.keeper import Keeper
from serve_common.dispatch.liveness import Suspicions
from serve_common.dispatch.outgoing import Outgoing
from serve_common.errors import BusUnavailable, ReplicaDied
from serve_common.routing.request_queue import RequestKey

PARKED_MAX: Final = 10_000
"""Requests that wait for the bus to come back."""

_CUT_OFF: Final = "NATS went away while the body was sent; the request may have run"


@final
class Parking:
    """Holds the calls that wait for the bus."""

    def __init__(
        self, keeper: Keeper, outgoing: Outgoing, suspicions: Suspicions, *, bus_wait_s: float
    ) -> None:
        """``bus_wait_s`` is how long a request waits for a bus that is away."""
        self.parked: Final[dict[RequestKey, Call]] = {}
        """They have no router; whoever ends one takes it out."""
        self._keeper = keeper
        self._outgoing = outgoing
        self._suspicions = suspicions
        self._bus_wait_s = bus_wait_s
        self._loop = asyncio.get_running_loop()

    def park(self, call: Call) -> None:
        """Let a call that has no router wait for the bus, if it may."""
        if call.ask.shadow_backend is not None:
            self._keeper.end_with(call, BusUnavailable("NATS is away, and a copy does not wait for it"))
            return
        if len(self.parked) >= PARKED_MAX:
            self._keeper.end_with(call, BusUnavailable(f"NATS is away and {PARKED_MAX} requests wait for it"))
            return
        if call.ask.trace is not None:
            call.ask.trace.waits("bus")
        call.parked_until = self._loop.time() + self._bus_wait_s
        self.parked[call.key] = call

    def held_up(self, call: Call) -> None:
        """The bus went away before the request was sent whole."""
        if call.can_begin_anew:
            if self._keeper.leave_router(call):
                self.park(call)
        else:
            self._keeper.end_with(call, ReplicaDied(_CUT_OFF))

    def bus_is_back(self) -> None:
        """Send what was parked, and find out what became of what was under way."""
        self._suspicions.reconnected(self._loop.time())
        held = self._keeper.calls
        for call in list(held.values()):
            if call.attempt is not None and call.key in held:
                self._look_after(call)
        parked = list(self.parked.values())
        self.parked.clear()
        for call in parked:
            call.parked_until = 0.0
            if call.key in held:
                self._keeper.submit(call)

    def _look_after(self, call: Call) -> None:
        """``call`` was under way when the bus went away."""
        attempt = call.attempt
        assert attempt is not None
        if attempt.is_body_sent or call.answer is not None:
            self._outgoing.probe(call)
            self._outgoing.give_credit(call, 0)
        elif call.can_begin_anew:  # pieces may be lost
            self._outgoing.cancel(call)
            if self._keeper.leave_router(call):
                self._keeper.submit(call)
        else:
            self._keeper.fail(call, ReplicaDied(_CUT_OFF))
