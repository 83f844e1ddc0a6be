"""One backend's router: which replica gets which request, who waits, and who has which slot.

Why one state machine without I/O: it must hold, for every order of submits, answers, refusals, cancels, deaths and
snapshots, that every slot is given back exactly once, that no replica gets more than `max_concurrent_queries`, and that
nobody waits while a replica could take a request. Each method returns what is to be sent now.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import msgspec

from serve_common.config.backend import BackendConfig
from serve_common.names import BackendTag, ReplicaTag
from serve_common.protocol.snapshots import BackendProtection, BackendSnapshot
from serve_common.routing.circuit import Circuit, RetryBudget, WakeSignal
from serve_common.routing.queues import Clock, RequestKey, TieredQueue
from serve_common.routing.replica_choice import (
    Affinity,
    Block,
    Draw,
    ReplicaPolicy,
    ReplicaSlots,
    choose_by_wish,
    policy_named,
)
from serve_common.routing.replica_pool import ReplicaPool
from serve_common.routing.request_events import Applied, Dispatch, Dropped, Queued, QueueFull, Refusal, SendTo

_NOTHING: Final[Sequence[Dispatch]] = ()
_QUEUED: Final = Queued()
_NOBODY: Final[frozenset[ReplicaTag]] = frozenset()


class _Place(msgspec.Struct, gc=False):
    """Where one request stands: in a replica's slot, or in the queue."""

    deadline: float
    arrival: int
    is_spare: bool
    wish: Affinity | None
    slots: ReplicaSlots | None = None
    avoid: frozenset[ReplicaTag] = _NOBODY
    """Replicas that refused it: taken only when there is no other."""
    is_suspect: bool = False
    """See `Router.submit`."""


@final
class Router:
    """The replicas of one backend and the requests that are on them or wait for them.

    Times are seconds of one monotonic clock, given with each call that needs it.
    """

    def __init__(self, backend_tag: BackendTag, draw: Draw, now: Clock) -> None:
        """Before the first snapshot there are no replicas and the limits are the defaults.

        ``now`` is asked only when a request begins or ends to wait, for `queued_seconds`: whoever gets a slot at once
        should not pay for it.
        """
        self.backend_tag: Final = backend_tag
        self.protection = BackendProtection()
        """As the newest snapshot has it."""
        self.retries: Final = RetryBudget(self.protection.retry_budget_percent)
        self.circuit: Final = Circuit(self.protection.circuit_breaker)
        """Whoever submits asks it first when it `is_open`; what waits already goes on."""
        self.queue_refusals = 0
        """Requests that were not taken because the queue was full."""
        self.stopped_refusals = 0
        """Requests that were not taken, or not kept, because no replica is wanted; see `is_stopped`."""
        self.lost_twice = 0
        """Requests that were given up because two replicas died while they had them; whoever decides that counts."""
        self.is_asleep = False
        """True when the backend was scaled to zero: what waits must wake it."""
        self.is_stopped = False
        """True when a user wants no replica: nothing that waits will be answered."""
        self.alarm: Final = WakeSignal()
        """Keeps what was said of that."""
        self._draw = draw
        self._policy: ReplicaPolicy = policy_named(
            self.protection.replica_policy, self.protection.packing_num
        )
        self._max_queued_requests = BackendConfig().max_queued_requests
        self._pool = ReplicaPool()
        self._max_concurrent_queries = self._pool.requests_max
        self._open = self._pool.open
        self._places: dict[RequestKey, _Place] = {}
        self._queue = TieredQueue(now)
        self._arrivals = 0
        self._turns = 0
        self._unanswered = 0
        """Requests that left in any other way than by an answer."""

    # -- looking --

    @property
    def queue_depth(self) -> int:
        """Requests that wait, spare ones left out."""
        return self._queue.depth

    def queued_seconds(self, now: float) -> float:
        """Seconds that requests have waited so far, those that still wait included; callable from any thread.

        ``now`` is of the clock that the router was given. Spare requests count, for they need as many replicas; but
        not while the backend sleeps, or copies of requests would keep it awake.
        """
        return self._queue.seconds(now)

    @property
    def has_waiting(self) -> bool:
        """True when anything waits, so that `expire` may have something to do at a later time."""
        return len(self._queue) > 0

    @property
    def in_flight(self) -> int:
        """Requests that have a slot."""
        return len(self._places) - len(self._queue)

    @property
    def answered(self) -> int:
        """Requests so far that a replica answered, well or not."""
        return self._arrivals - len(self._places) - self._unanswered

    @property
    def is_used(self) -> bool:
        """True when it was ever given a request."""
        return self._arrivals > 0

    @property
    def has_aside(self) -> bool:
        """True when `reopen` may have something to do at a later time."""
        return self._pool.has_aside

    @property
    def ejections(self) -> int:
        """How often a replica was left out for its failures."""
        return self._pool.outliers.ejections

    def requests_at(self, replica: ReplicaTag) -> frozenset[RequestKey]:
        """What is in flight on one replica."""
        slots = self._pool.replicas.get(replica)
        return frozenset() if slots is None else frozenset(slots.requests)

    def is_waiting(self, request: RequestKey) -> bool:
        """True when ``request`` waits for a slot."""
        return request in self._queue

    # -- requests --

    def submit(
        self,
        request: RequestKey,
        deadline: float,
        *,
        is_admitted: bool = False,
        is_spare: bool = False,
        is_suspect: bool = False,
        wish: Affinity | None = None,
    ) -> SendTo | Queued | QueueFull:
        """Take a new request.

        ``is_admitted``: it was taken once, so no limit may refuse it now. ``is_spare``: it waits behind all that are
        not, takes no place of theirs in the queue, and its number is the caller's to limit. ``is_suspect``: a replica
        died while it had this one, which may be why; it never gets the only healthy one.
        """
        places = self._places
        assert request not in places, f"{request} is here already"
        if not self._open and not is_admitted and not is_spare:
            limit = self._max_queued_requests
            if 0 <= limit <= self._queue.depth:
                self.queue_refusals += 1
                return QueueFull(limit)
        self._arrivals = arrival = self._arrivals + 1
        place = places[request] = _Place(deadline, arrival, is_spare, wish)
        if is_suspect:
            place.is_suspect = True
        if self._open and not (is_suspect and not self._may_risk_one()):
            return self._seat(request, place).send_to
        self._queue.push(request, deadline, arrival, is_spare=is_spare, is_suspect=is_suspect)
        return _QUEUED

    def answer_began(self, request: RequestKey) -> None:
        """``request``'s replica is there, which an open circuit waits for; the slot stays taken."""
        self.circuit.ended(request, None, self.answered)

    def finished(self, request: RequestKey) -> Sequence[Dispatch]:
        """The replica has answered ``request`` well, to its end. Unknown requests are ignored."""
        place = self._places.pop(request, None)
        if place is None:
            return _NOTHING
        if self.circuit.is_open:
            self.circuit.ended(request, None, self.answered)
        slots = place.slots
        if slots is None:  # it was sent, lost, and waits to be sent again: the late answer is as good
            self._queue.discard(request)
            return _NOTHING
        slots.requests.discard(request)
        if slots.has_failed:
            slots.succeed()
            return self._refill(slots)  # it counts as healthy again, which suspects wait for
        # Nobody waits while a replica is open; so one that is open already has nothing to give.
        return _NOTHING if slots.position >= 0 else self._refill(slots)

    def failed(self, request: RequestKey, now: float) -> Sequence[Dispatch]:
        """The replica has answered ``request`` with a failure of its own. Unknown requests are ignored."""
        place = self._places.get(request)
        if place is not None and place.slots is not None:
            place.slots.prove_alive()
            self._pool.count_failures(place.slots, now)
        return self._leave(request, now=None)

    def unanswered(self, request: RequestKey, now: float) -> Sequence[Dispatch]:
        """The replica lost ``request``, or has given no sign of life until its deadline.

        Unknown requests are ignored.
        """
        place = self._places.get(request)
        if place is None or place.slots is None:
            return self.cancelled(request)
        self._pool.count_failures(place.slots, now)
        return self._leave(request, now=now)

    def cancelled(self, request: RequestKey) -> Sequence[Dispatch]:
        """Nobody waits for ``request`` any more, wherever it stands. Unknown requests are ignored."""
        place = self._places.pop(request, None)
        if place is None:
            return _NOTHING
        self._unanswered += 1
        self.circuit.withdrew(request)
        return self._free(request, place)

    def refused(
        self, request: RequestKey, replica: ReplicaTag, reason: Refusal, now: float
    ) -> Sequence[Dispatch]:
        """``replica`` did not begin ``request``, which keeps its place in the order and tries elsewhere.

        Ignored when the request is not on that replica (any more).
        """
        place = self._places.get(request)
        if place is None or place.slots is None or place.slots.tag != replica:
            return _NOTHING
        slots = place.slots
        slots.requests.discard(request)
        match reason:
            case Refusal.BUSY:
                slots.block_as_busy(now)
            case Refusal.DRAINING:
                slots.rest(now)
            case Refusal.NO_RESPONDERS:
                slots.put_aside(now)
        self._pool.block(slots)
        place.slots = None
        place.avoid |= {replica}
        self._queue.push(
            request, place.deadline, place.arrival, is_spare=place.is_spare, is_suspect=place.is_suspect
        )
        return self._dispatch_waiting()

    def has_none_but(self, replica: ReplicaTag) -> bool:
        """Whether no other replica could take a request now."""
        return not any(slots.tag != replica for slots in self._pool.open)

    def has_healthy(self) -> bool:
        """Whether any replica is there and well, as far as is known."""
        return any(slots.is_healthy for slots in self._pool.replicas.values())

    def is_draining(self, replica: ReplicaTag) -> bool:
        """Whether ``replica`` takes nothing new by order."""
        slots = self._pool.replicas.get(replica)
        return slots is not None and (slots.is_draining or slots.block is Block.RESTING)

    def is_dead(self, replica: ReplicaTag) -> bool:
        """Whether ``replica`` is gone, or counts as dead and has answered nothing since."""
        slots = self._pool.replicas.get(replica)
        return slots is None or slots.is_dead

    def may_send_again(self, now: float) -> bool:
        """Whether the retry budget allows a second sending of a request that was lost; it then counts as made."""
        return self.retries.take(now, self._arrivals)

    # -- replicas --

    def put_aside(self, replica: ReplicaTag, now: float) -> None:
        """Do not choose ``replica`` for a while: it seems not to answer. What is in flight there stays."""
        slots = self._pool.replicas.get(replica)
        if slots is not None:
            slots.put_aside(now)
            self._pool.block(slots)

    def replica_gone(self, replica: ReplicaTag, now: float) -> Sequence[RequestKey]:
        """``replica`` is dead. Returns what was in flight there, which the router has forgotten.

        It is put aside rather than removed: only a snapshot says for certain that it will not come back.
        """
        slots = self._pool.replicas.get(replica)
        if slots is None:
            return ()
        slots.is_dead = True
        self.put_aside(replica, now)
        if slots.requests:
            self._pool.count_failures(slots, now, len(slots.requests))
        return self._lose(slots, now)

    def knows(self, replica: ReplicaTag) -> bool:
        """Whether the backend has this replica."""
        return replica in self._pool.replicas

    def hold(self, replica: ReplicaTag, models: frozenset[str]) -> bool:
        """``replica`` holds these multiplexed models; False when there is no such replica."""
        slots = self._pool.replicas.get(replica)
        if slots is None:
            return False
        slots.models = models
        return True

    def apply(self, snapshot: BackendSnapshot, now: float) -> Applied:
        """Take over replicas, limits and protection; a replica that is named anew is put aside no more."""
        self._max_queued_requests = snapshot.max_queued_requests
        self._protect(snapshot.protection)
        known = {slots.tag for slots in self._pool.replicas.values() if slots.is_healthy}
        gone = self._pool.apply(snapshot)
        self._max_concurrent_queries = self._pool.requests_max
        lost: list[RequestKey] = []
        died: list[RequestKey] = []
        for slots in gone:
            requests = self._lose(slots, now)
            lost += requests
            if not slots.is_draining and slots.block is not Block.RESTING:
                died += requests
        self._set_asleep(is_asleep=snapshot.can_wake and not snapshot.replicas)
        self.is_stopped = snapshot.is_stopped and not snapshot.replicas
        are_others_left = not known.isdisjoint(self._pool.replicas)
        return Applied(self._dispatch_waiting(), lost, frozenset(died), are_others_left)

    def drop(self) -> Dropped:
        """The backend is gone: forget all replicas and requests."""
        lost = [request for slots in self._pool.replicas.values() for request in sorted(slots.requests)]
        waiting = self._queue.clear()
        for request in self._places:
            self.circuit.withdrew(request)
        self._unanswered += len(self._places)
        self._pool.clear()
        self._places.clear()
        self._set_asleep(is_asleep=False)
        self.is_stopped = False
        return Dropped(waiting, lost)

    # -- time --

    def look(self, now: float) -> None:
        """Note how much has come and gone, for what looks at the last seconds; to be called often."""
        self.retries.look(now, self._arrivals)
        self.circuit.look(now, self.answered)

    def reopen(self, now: float) -> Sequence[Dispatch]:
        """Choose again among the replicas whose time aside is over."""
        if not self._pool.has_aside:
            return _NOTHING
        self._pool.reopen(now)
        return self._dispatch_waiting()

    def forgive(self, since: float) -> Sequence[Dispatch]:
        """Take back what was concluded about replicas and backend from ``since`` on: the bus did not answer."""
        self.circuit.forgive(since, self.answered)
        self._pool.forgive(since)
        return self._dispatch_waiting()

    def expire(self, now: float) -> Sequence[RequestKey]:
        """Forget and return the waiting requests whose deadline is reached; all, while the backend is stopped."""
        if self.is_stopped:
            expired = self._queue.clear()
            self.stopped_refusals += len(expired)
        else:
            expired = self._queue.expire(now)
        for request in expired:
            del self._places[request]
            self.circuit.withdrew(request)
        self._unanswered += len(expired)
        return expired

    # -- slots --

    def _seat(self, request: RequestKey, place: _Place) -> ReplicaSlots:
        replicas: Sequence[ReplicaSlots] = self._open
        if place.avoid:
            replicas = [slots for slots in replicas if slots.tag not in place.avoid] or replicas
        wish, limit = place.wish, self._max_concurrent_queries
        if wish is None:
            slots = self._policy.choose(replicas, self._draw)
        else:
            slots = choose_by_wish(wish, replicas, self._policy, self._draw, limit)
        slots.turn = self._turns = self._turns + 1
        requests = slots.requests
        requests.add(request)
        place.slots = slots
        if len(requests) >= limit:
            self._pool.close(slots)
        return slots

    def _leave(self, request: RequestKey, now: float | None) -> Sequence[Dispatch]:
        """``request`` leaves: without an answer at ``now``, or, when that is None, with one that is a failure."""
        place = self._places.pop(request, None)
        if place is None:
            return _NOTHING
        if now is not None:
            self._unanswered += 1
            self.circuit.fail(now, 1, self.answered)
        self.circuit.ended(request, now, self.answered)
        return self._free(request, place)

    def _free(self, request: RequestKey, place: _Place) -> Sequence[Dispatch]:
        slots = place.slots
        if slots is None:
            self._queue.discard(request)
            return _NOTHING
        slots.requests.discard(request)
        if slots.position >= 0 and not self._queue.has_suspects:
            return _NOTHING
        return self._refill(slots)

    def _refill(self, slots: ReplicaSlots) -> Sequence[Dispatch]:
        """A slot was given back by a replica that was not open, or has answered for the first time after a failure."""
        if slots.block is Block.BUSY:
            slots.block = None
        self._pool.refresh((slots,))
        return self._dispatch_waiting()

    def _lose(self, slots: ReplicaSlots, now: float) -> list[RequestKey]:
        lost = sorted(slots.requests)
        if not lost:
            return lost
        slots.requests.clear()
        for request in lost:
            del self._places[request]
        self._unanswered += len(lost)
        self.circuit.fail(now, len(lost), self.answered)
        for request in lost:
            self.circuit.ended(request, now, self.answered)
        return lost

    def _dispatch_waiting(self) -> Sequence[Dispatch]:
        if not self._queue or not self._open:
            return _NOTHING
        dispatches = []
        with_suspects = self._queue.has_suspects and self._may_risk_one()
        while self._open:
            request = self._queue.pop(with_suspects=with_suspects)
            if request is None:
                break
            dispatches.append(Dispatch(request, self._seat(request, self._places[request]).tag))
        return dispatches

    def _may_risk_one(self) -> bool:
        """Whether a healthy replica is left should another one die."""
        healthy = (slots for slots in self._pool.replicas.values() if slots.is_healthy)
        return next(healthy, None) is not None and next(healthy, None) is not None

    def _set_asleep(self, *, is_asleep: bool) -> None:
        if is_asleep and not self.is_asleep:
            # Of all who come first, an open circuit would let one wake the backend and refuse the others meanwhile.
            self.circuit.begin_anew(self.answered)
        self.is_asleep = is_asleep
        self._queue.count_spare(is_wanted=not is_asleep)
        if not is_asleep:
            self.alarm.rest()

    def _protect(self, protection: BackendProtection) -> None:
        held, self.protection = self.protection, protection
        if (protection.replica_policy, protection.packing_num) != (held.replica_policy, held.packing_num):
            self._policy = policy_named(protection.replica_policy, protection.packing_num)
        self.retries.percent = protection.retry_budget_percent
        self.circuit.configure(protection.circuit_breaker, self.answered)
