"""What becomes of requests whose replica died or lost them: sent again where that is safe, and an error otherwise.

Why apart from dispatching: how a death is told from a reconnect, and what may run twice, has nothing to do with how
requests are sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from typing import Final, final

import structlog

from serve_common.dispatch import retry
from serve_common.dispatch.calls import Call
from serve_common.dispatch.errors import LostTwice
from serve_common.dispatch.keeper import Keeper
from serve_common.dispatch.liveness import Suspicions
from serve_common.dispatch.outgoing import Outgoing
from serve_common.errors import ReplicaDied
from serve_common.routing.outcomes import Refusal
from serve_common.routing.request_queue import RequestKey
from serve_common.routing.router import Router

_log = structlog.get_logger(__name__)


@final
class Losses:
    """Decides about calls that a replica has and will not answer."""

    def __init__(self, keeper: Keeper, outgoing: Outgoing) -> None:
        self.suspicions: Final = Suspicions()
        self._keeper = keeper
        self._outgoing = outgoing
        self._loop = asyncio.get_running_loop()

    def take_no_responders(self, call: Call) -> None:
        """Nobody listens to the subject of the replica of the call's current attempt."""
        attempt, router = call.attempt, call.router
        if attempt is None or router is None:
            return
        now = self._loop.time()
        is_dead = self.suspicions.no_responders(attempt.replica, now)
        attempt.undelivered += 1
        attempt.credit = 0
        if attempt.has_arrived or call.answer is not None:
            router.put_aside(attempt.replica, now)
        else:
            self._keeper.refused(call, Refusal.NO_RESPONDERS)
        if is_dead:
            lost = router.replica_gone(attempt.replica, now)
            if lost:
                _log.warning("replica_died", replica_tag=attempt.replica, lost_requests=len(lost))
            was_told_to_stop = router.is_draining(attempt.replica)
            died = () if was_told_to_stop else lost
            self.lose(lost, router, "died", died=died, are_others_left=router.has_healthy())

    def disowned(self, call: Call) -> None:
        """The call's replica does not know it (any more)."""
        router = call.router
        if router is not None:
            call.router = None
            self._keeper.perform(router, router.unanswered(call.key, self._loop.time()))
        self._lost(call, router, "does not know the request any more")

    def lose(
        self,
        requests: Iterable[RequestKey],
        router: Router,
        why: str,
        *,
        died: Collection[RequestKey] = (),
        are_others_left: bool = False,
    ) -> None:
        """These were on a replica that is gone; ``router`` has forgotten them.

        ``died``: those of them whose replica was not told to stop, so that they may be what ended it;
        ``are_others_left``: replicas that should be spared the same.
        """
        held = self._keeper.calls
        calls = [held[request] for request in requests if request in held]
        for call in calls:
            call.router = None
            self._outgoing.cancel(call)
        for call in calls:
            if call.key in died and call.attempt is not None:
                # A replica that has answered since was only cut off.
                dead = (tag for tag in call.lost_with if router.is_dead(tag))
                call.lost_with = (*dead, call.attempt.replica)
                call.is_suspect = call.is_suspect or are_others_left
            self._lost(call, router, why)

    def _lost(self, call: Call, router: Router | None, why: str) -> None:
        """The replica may have begun the request and will not answer it. The call has left ``router``."""
        if call.key not in self._keeper.calls:
            return  # whoever was told of another call's end has given this one up
        replica = "" if call.attempt is None else call.attempt.replica
        if call.ask.trace is not None:
            call.ask.trace.attempt_failed("lost", f"the replica {why}")
        self._outgoing.drop(call)
        call.losses += 1
        message = f"replica {replica} {why}; the request may have run"
        if not retry.may_send_again(
            is_repeatable=call.ask.is_repeatable and call.is_whole,
            has_answer_begun=call.answer is not None,
            losses=call.losses,
        ):
            self._keeper.end_with(call, ReplicaDied(message))
        elif len(call.lost_with) >= retry.DEATHS_MAX:
            if router is not None:
                router.lost_twice += 1
            _log.warning(
                "request_lost_twice",
                request_id=call.ask.request_id,
                endpoint_tag=call.ask.endpoint.tag,
                replica_tags=call.lost_with,
            )
            died = " and ".join(call.lost_with)
            self._keeper.end_with(
                call, LostTwice(f"replicas {died} died while they had the request, which may be why")
            )
        elif router is not None and not router.may_send_again(self._loop.time()):
            self._keeper.end_with(call, ReplicaDied(f"{message}, and the backend's retry budget is used up"))
        else:
            self._keeper.submit(call)
