"""Recovery of requests whose replica died or lost them, and of all requests after a disconnect of the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from typing import Final, final

import structlog

from serve_common.direct.link import DirectLink
from serve_common.dispatch.admission import (
    CERTAIN_DEATH_S,
    CONFIRM_DEATH_S,
    DEATHS_MAX,
    FailureDetector,
    may_send_again,
)
from serve_common.dispatch.calls import Call, CallRegistry
from serve_common.dispatch.errors import LostTwice
from serve_common.dispatch.upstream import Outgoing
from serve_common.errors import BusUnavailable, ReplicaDied
from serve_common.names import ReplicaTag
from serve_common.routing.queues import Refusal, RequestKey
from serve_common.routing.router import Router

_log = structlog.get_logger(__name__)


@final
class LostRequests:
    """Retries or fails calls that a replica got and will not answer."""

    def __init__(self, registry: CallRegistry, outgoing: Outgoing) -> None:
        self.failure_detector: Final = FailureDetector()
        self._registry = registry
        self._outgoing = outgoing
        self._loop = asyncio.get_running_loop()

    def take_no_responders(self, call: Call) -> None:
        """The subject of the replica of the call's current attempt has no subscriber."""
        attempt, router = call.attempt, call.router
        if attempt is None or router is None:
            return
        now = self._loop.time()
        silent_s = self.failure_detector.no_responders(attempt.replica, now)
        attempt.undelivered += 1
        if attempt.outgoing is not None:
            attempt.outgoing.pause()
        if attempt.has_arrived or call.response_reader is not None:
            router.quarantine(attempt.replica, now)
        else:
            self._registry.refused(call, Refusal.NO_RESPONDERS)
        if silent_s >= CONFIRM_DEATH_S:
            self._take_death(attempt.replica, router, now, is_certain=silent_s >= CERTAIN_DEATH_S)

    def _take_death(self, replica: ReplicaTag, router: Router, now: float, *, is_certain: bool) -> None:
        """``replica`` counts as dead. Only when that is certain, requests are lost that cannot be sent again."""
        requests = router.requests_at(replica)
        if is_certain or router.pool.has_left(replica):
            self.failure_detector.on_sign_of_life(replica)
        else:
            active = self._registry.calls
            requests = frozenset(key for key in requests if _may_send_again(active[key]))
        lost = router.replica_gone(replica, now, requests)
        if lost:
            _log.warning("replica_died", replica_tag=replica, lost_requests=len(lost))
        died = () if router.is_draining(replica) else lost
        self.lose(lost, router, "died", died=died, are_others_left=router.has_healthy())

    def request_unknown(self, call: Call) -> None:
        """The call's replica does not know it (any more)."""
        router = call.router
        if router is not None:
            call.router = None
            self._registry.perform(router, router.incomplete(call.key, self._loop.time()))
        self._retry_or_fail(call, router, "does not know the request any more")

    def probe_left(self, requests: Iterable[RequestKey]) -> None:
        """Probe for ``requests``, whose replica has left after a drain: what it has sent may not have arrived yet."""
        for request in requests:
            call = self._registry.calls.get(request)
            if call is not None:  # no callback has abandoned it meanwhile
                self._outgoing.probe(call)

    def lose(
        self,
        requests: Iterable[RequestKey],
        router: Router,
        why: str,
        *,
        died: Collection[RequestKey] = (),
        are_others_left: bool = False,
    ) -> None:
        """Handle ``requests``, which were on a replica that is gone; ``router`` has forgotten them.

        ``died``: those of them whose replica was not draining, so that they may be the cause of its death;
        ``are_others_left``: other healthy replicas exist, which should be protected.
        """
        active = self._registry.calls
        calls = [active[request] for request in requests if request in active]
        for call in calls:
            call.router = None
            self._outgoing.cancel(call)
        for call in calls:
            if call.key in died and call.attempt is not None:
                # A replica that has responded since was only cut off.
                dead = (tag for tag in call.lost_with if router.is_dead(tag))
                call.lost_with = (*dead, call.attempt.replica)
                call.is_suspect = call.is_suspect or are_others_left
            self._retry_or_fail(call, router, why)

    def _retry_or_fail(self, call: Call, router: Router | None, why: str) -> None:
        """The replica may have started the request and will not answer it. The call has left ``router``."""
        if call.key not in self._registry.calls:
            return  # a callback of another call has abandoned this one
        replica = "" if call.attempt is None else call.attempt.replica
        if call.spec.trace is not None:
            call.spec.trace.attempt_failed("lost", f"the replica {why}")
        self._outgoing.drop(call)
        call.lost_attempts += 1
        message = f"replica {replica} {why}; the request may have run"
        if not _may_send_again(call):
            self._registry.end_with(call, ReplicaDied(message))
        elif len(call.lost_with) >= DEATHS_MAX:
            if router is not None:
                router.lost_twice += 1
            _log.warning(
                "request_lost_twice",
                request_id=call.spec.request_id,
                endpoint_tag=call.spec.endpoint.tag,
                replica_tags=call.lost_with,
            )
            died = " and ".join(call.lost_with)
            self._registry.end_with(
                call, LostTwice(f"replicas {died} died while they had the request, which may be why")
            )
        elif router is not None and not router.may_send_again(self._loop.time()):
            self._registry.end_with(
                call, ReplicaDied(f"{message}, and the backend's retry budget is used up")
            )
        else:
            self._registry.submit(call)


def _may_send_again(call: Call) -> bool:
    return may_send_again(
        is_repeatable=call.spec.is_repeatable and call.is_whole,
        has_response_started=call.response_reader is not None,
        lost_attempts=call.lost_attempts,
    )


PENDING_RECONNECT_MAX: Final = 10_000
"""Limit of requests that wait for the bus to reconnect."""


@final
class PendingReconnect:
    """Holds the calls that wait for the bus to reconnect."""

    def __init__(
        self,
        registry: CallRegistry,
        outgoing: Outgoing,
        failure_detector: FailureDetector,
        *,
        bus_wait_s: float,
    ) -> None:
        """``bus_wait_s`` is how many seconds a request waits for the bus to reconnect."""
        self.pending: Final[dict[RequestKey, Call]] = {}
        """Waiting calls; they have no router. The code that ends a call removes it."""
        self._registry = registry
        self._outgoing = outgoing
        self._failure_detector = failure_detector
        self._bus_wait_s = bus_wait_s
        self._loop = asyncio.get_running_loop()

    def wait_for_bus(self, call: Call) -> None:
        """Let a call that has no router wait for the bus, unless it is a copy or too many wait."""
        if call.spec.shadow_backend is not None or call.spec.replica is not None:
            self._registry.end_with(call, BusUnavailable("NATS is away, and a copy does not wait for it"))
            return
        if len(self.pending) >= PENDING_RECONNECT_MAX:
            self._registry.end_with(
                call, BusUnavailable(f"NATS is away and {PENDING_RECONNECT_MAX} requests wait for it")
            )
            return
        if call.spec.trace is not None:
            call.spec.trace.waits("bus")
        call.reconnect_deadline = self._loop.time() + self._bus_wait_s
        self.pending[call.key] = call

    def link_lost(self, link: DirectLink) -> None:
        """A direct link has ended: requests that used it go on over the bus, from where each end is."""
        for call in list(self._registry.calls.values()):
            attempt = call.attempt
            if attempt is not None and link in (attempt.link, attempt.response_link):
                attempt.link = attempt.response_link = None
                self._outgoing.probe(call, has_lost=True)

    def bus_reconnected(self) -> None:
        """After a reconnect: send calls that waited for it, and probe those that were in flight."""
        self._failure_detector.reconnected()
        active = self._registry.calls
        for call in list(active.values()):
            attempt = call.attempt
            if attempt is not None and call.key in active:
                self._outgoing.probe(call, has_lost=attempt.response_link is None)
        pending = list(self.pending.values())
        self.pending.clear()
        for call in pending:
            call.reconnect_deadline = 0.0
            if call.key in active:
                self._registry.submit(call)
