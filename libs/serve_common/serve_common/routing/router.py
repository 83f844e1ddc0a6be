"""One backend's router: which replica gets which request, which requests wait, and which have a slot.

Why one state machine without I/O: for every order of submits, responses, refusals, cancels, deaths and snapshots, every
slot must be released exactly once, no replica may get more than `max_concurrent_queries`, and no request may wait while
a replica could take one. Each method returns what is to be sent now.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, final

import msgspec

from serve_common.config.backend import BackendConfig
from serve_common.names import BackendTag, ReplicaTag
from serve_common.protocol.snapshots import BackendProtection, BackendSnapshot
from serve_common.routing.circuit import Circuit, RetryBudget, WakeSignal
from serve_common.routing.queues import (
    Applied,
    Clock,
    Dispatch,
    Dropped,
    Queued,
    QueueFull,
    Refusal,
    RequestKey,
    SendTo,
    TieredQueue,
)
from serve_common.routing.replica_choice import (
    Affinity,
    Block,
    ReplicaPolicy,
    ReplicaSlots,
    Rng,
    build_policy,
    choose_by_affinity,
)
from serve_common.routing.replica_pool import ReplicaPool
from serve_common.routing.request_counts import RequestCounter, renewed_counter

_NOTHING: Final[Sequence[Dispatch]] = ()
_QUEUED: Final = Queued()
_NO_REPLICAS: Final[frozenset[ReplicaTag]] = frozenset()


class _RequestState(msgspec.Struct, gc=False):
    """State of one request: in a replica's slot, or in the queue."""

    deadline: float
    arrival: int
    is_shadow: bool = False
    affinity: Affinity | None = None
    slots: ReplicaSlots | None = None
    avoid: frozenset[ReplicaTag] = _NO_REPLICAS
    """Replicas that refused it: chosen only when there is no other."""
    is_suspect: bool = False
    """As in `Router.submit`."""


@final
class Router:
    """Assigns the requests of one backend to its replicas.

    Times are seconds of one monotonic clock, passed with each call that needs it.
    """

    def __init__(self, backend_tag: BackendTag, rng: Rng, now: Clock) -> None:
        """Before the first snapshot there are no replicas and the limits are the defaults.

        ``now`` is read only when a request starts or stops waiting, for `queued_seconds`: requests that get a slot at
        once should not pay for it.
        """
        self.backend_tag: Final = backend_tag
        self.protection = BackendProtection()
        """Settings of the newest snapshot."""
        self.retries: Final = RetryBudget(self.protection.retry_budget_percent)
        self.circuit: Final = Circuit(self.protection.circuit_breaker)
        """Callers of `submit` check it first while it `is_open`; requests that wait already go on."""
        self.queue_refusals = 0
        """Requests refused because the queue was full."""
        self.stopped_refusals = 0
        """Requests refused, or dropped from the queue, because the backend `is_stopped`."""
        self.lost_twice = 0
        """Requests given up because two replicas died while they had them; counted by the caller that decides it."""
        self.is_scaled_to_zero = False
        """True when the backend was scaled to zero: waiting requests must wake it."""
        self.is_stopped = False
        """True when a user set zero replicas: no waiting request will be answered."""
        self.wake_signal: Final = WakeSignal()
        """State of the wake messages while it is asleep."""
        self.request_counts: RequestCounter | None = None
        """What became of its requests, while it takes part in a rollout; maintained by callers."""
        self._rng = rng
        self._policy: ReplicaPolicy = build_policy(
            self.protection.replica_policy, self.protection.packing_num
        )
        self._max_queued_requests = BackendConfig().max_queued_requests
        self.pool: Final = ReplicaPool()
        self._max_concurrent_queries = self.pool.requests_max
        self._open = self.pool.open
        self._places: dict[RequestKey, _RequestState] = {}
        self._queue = TieredQueue(now)
        self._arrivals = 0
        self._turns = 0
        self._unanswered = 0
        """Requests that left without a response."""

    # -- state --

    @property
    def queue_depth(self) -> int:
        """Requests that wait, without shadow copies."""
        return self._queue.depth

    def queued_seconds(self, now: float) -> float:
        """Seconds that requests have waited so far, those that still wait included; callable from any thread.

        ``now`` is of the router's clock. Shadow copies count, for they need as many replicas; but not while the backend
        is asleep, or copies of requests would keep it awake.
        """
        return self._queue.seconds(now)

    @property
    def has_waiting(self) -> bool:
        """True when requests wait, so that `expire` may have something to do later."""
        return len(self._queue) > 0

    @property
    def in_flight(self) -> int:
        """Requests that have a slot."""
        return len(self._places) - len(self._queue)

    @property
    def completed(self) -> int:
        """Requests so far that a replica answered, with or without success."""
        return self._arrivals - len(self._places) - self._unanswered

    @property
    def is_used(self) -> bool:
        """True when it ever got a request."""
        return self._arrivals > 0

    @property
    def has_blocked(self) -> bool:
        """True when `reopen` may have something to do later."""
        return self.pool.has_blocked

    @property
    def ejections(self) -> int:
        """How often a replica was ejected."""
        return self.pool.outliers.ejections

    def requests_at(self, replica: ReplicaTag) -> frozenset[RequestKey]:
        """Requests in flight on one replica."""
        slots = self.pool.replicas.get(replica)
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
        is_shadow: bool = False,
        is_suspect: bool = False,
        affinity: Affinity | None = None,
    ) -> SendTo | Queued | QueueFull:
        """Take a new request.

        ``is_admitted``: it was admitted before, so no limit may refuse it now. ``is_shadow``: a copy, which waits
        behind all others, does not count towards the queue's limit, and is limited by the caller. ``is_suspect``: a
        replica died while it had this request, which may be the cause; it never gets the only healthy replica.
        """
        states = self._places
        assert request not in states, f"{request} is here already"
        if not self._open and not is_admitted and not is_shadow:
            limit = self._max_queued_requests
            if 0 <= limit <= self._queue.depth:
                self.queue_refusals += 1
                return QueueFull(limit)
        self._arrivals = arrival = self._arrivals + 1
        state = states[request] = _RequestState(deadline, arrival, is_shadow, affinity)
        if is_suspect:
            state.is_suspect = True
        if self._open and not (is_suspect and not self._may_risk_one()):
            return self._assign(request, state).send_to
        self._queue.push(request, deadline, arrival, is_shadow=is_shadow, is_suspect=is_suspect)
        return _QUEUED

    def submit_to(self, replica: ReplicaTag, request: RequestKey, deadline: float) -> bool:
        """Take a new request for ``replica`` alone, over any limit; False when that takes none."""
        slots = self.pool.replicas.get(replica)
        if slots is None or slots.is_draining:
            return False
        self._arrivals += 1
        self._places[request] = _RequestState(deadline, self._arrivals, slots=slots)
        slots.requests.add(request)
        self.pool.refresh((slots,))
        return True

    def response_started(self, request: RequestKey) -> None:
        """``request``'s replica has responded, which an open circuit waits for; the slot stays taken."""
        self.circuit.ended(request, None, self.completed)

    def finished(self, request: RequestKey) -> Sequence[Dispatch]:
        """The replica has answered ``request`` completely. Unknown requests are ignored."""
        state = self._places.pop(request, None)
        if state is None:
            return _NOTHING
        if self.circuit.is_open:
            self.circuit.ended(request, None, self.completed)
        slots = state.slots
        if slots is None:  # it was sent, lost, and waits for a retry: the late response is as good
            self._queue.discard(request)
            return _NOTHING
        slots.requests.discard(request)
        if slots.has_failed:
            slots.succeed()
            return self._refill(slots)  # it is healthy again, which suspects wait for
        # No request waits while a replica is open; so one that is open already has nothing to give.
        return _NOTHING if slots.position >= 0 else self._refill(slots)

    def failed(self, request: RequestKey, now: float) -> Sequence[Dispatch]:
        """The replica has answered ``request`` with a failure. Unknown requests are ignored."""
        state = self._places.get(request)
        if state is not None and state.slots is not None:
            state.slots.prove_alive()
            self.pool.count_failures(state.slots, now)
        return self._leave(request, now=None)

    def incomplete(self, request: RequestKey, now: float) -> Sequence[Dispatch]:
        """The replica lost ``request``, or was unresponsive until its deadline.

        Unknown requests are ignored.
        """
        state = self._places.get(request)
        if state is None or state.slots is None:
            return self.cancelled(request)
        self.pool.count_failures(state.slots, now)
        return self._leave(request, now=now)

    def cancelled(self, request: RequestKey) -> Sequence[Dispatch]:
        """Remove ``request``, whose caller no longer waits, in any state. Unknown requests are ignored."""
        state = self._places.pop(request, None)
        if state is None:
            return _NOTHING
        self._unanswered += 1
        self.circuit.withdrew(request)
        return self._free(request, state)

    def refused(
        self, request: RequestKey, replica: ReplicaTag, reason: Refusal, now: float
    ) -> Sequence[Dispatch]:
        """``replica`` did not start ``request``, which keeps its order and is sent to another one.

        Ignored when the request is not on that replica (any more).
        """
        state = self._places.get(request)
        if state is None or state.slots is None or state.slots.tag != replica:
            return _NOTHING
        slots = state.slots
        slots.requests.discard(request)
        match reason:
            case Refusal.BUSY:
                slots.block_as_busy(now)
            case Refusal.DRAINING:
                slots.rest(now)
            case Refusal.NO_RESPONDERS:
                slots.quarantine(now)
        self.pool.block(slots)
        state.slots = None
        state.avoid |= {replica}
        self._queue.push(
            request, state.deadline, state.arrival, is_shadow=state.is_shadow, is_suspect=state.is_suspect
        )
        return self._dispatch_waiting()

    def is_only_available(self, replica: ReplicaTag) -> bool:
        """Whether no other replica could take a request now."""
        return not any(slots.tag != replica for slots in self.pool.open)

    def has_healthy(self) -> bool:
        """Whether any replica is healthy, as far as is known."""
        return any(slots.is_healthy for slots in self.pool.replicas.values())

    def is_draining(self, replica: ReplicaTag) -> bool:
        """Whether ``replica`` drains."""
        slots = self.pool.replicas.get(replica)
        return slots is not None and slots.has_drained

    def is_dead(self, replica: ReplicaTag) -> bool:
        """Whether ``replica`` is gone, or counts as dead and has not responded since."""
        slots = self.pool.replicas.get(replica)
        return slots is None or slots.is_dead

    def may_send_again(self, now: float) -> bool:
        """Whether the retry budget allows a retry of a request that was lost; it then counts as made."""
        return self.retries.take(now, self._arrivals)

    # -- replicas --

    def quarantine(self, replica: ReplicaTag, now: float) -> None:
        """Block ``replica`` for a while: it seems unresponsive. Requests in flight there stay."""
        slots = self.pool.replicas.get(replica)
        if slots is not None:
            slots.quarantine(now)
            self.pool.block(slots)

    def replica_gone(self, replica: ReplicaTag, now: float, keys: frozenset[RequestKey]) -> list[RequestKey]:
        """Mark ``replica`` as dead; forget and return those of ``keys`` that are in flight there.

        It is blocked rather than removed: only a snapshot is certain that it will not come back.
        """
        slots = self.pool.replicas.get(replica)
        if slots is None:
            return []
        slots.is_dead = True
        self.quarantine(replica, now)
        if lost := self._lose(slots, now, keys & slots.requests):
            self.pool.count_failures(slots, now, len(lost))
        return lost

    def hold(self, replica: ReplicaTag, models: frozenset[str]) -> bool:
        """Set the multiplexed models that ``replica`` has loaded; False when there is no such replica."""
        slots = self.pool.replicas.get(replica)
        if slots is None:
            return False
        slots.models = models
        return True

    def apply(self, snapshot: BackendSnapshot, now: float) -> Applied:
        """Apply replicas, limits and protection; replicas in the snapshot are unblocked."""
        self._max_queued_requests = snapshot.max_queued_requests
        self._protect(snapshot.protection)
        known = {slots.tag for slots in self.pool.replicas.values() if slots.is_healthy}
        gone, leaving = self.pool.apply(snapshot, now)
        self._max_concurrent_queries = self.pool.requests_max
        lost: list[RequestKey] = []
        died: list[RequestKey] = []
        for slots in gone:
            requests = self._lose(slots, now, slots.requests)
            lost += requests
            if not slots.has_drained:
                died += requests
        self._set_scaled_to_zero(is_scaled_to_zero=snapshot.can_wake and not snapshot.replicas)
        self.is_stopped = snapshot.is_stopped and not snapshot.replicas
        self.request_counts = renewed_counter(self.request_counts, snapshot.rollout_id)
        are_others_left = not known.isdisjoint(self.pool.replicas)
        unanswered = [request for slots in leaving for request in sorted(slots.requests)]
        return Applied(self._dispatch_waiting(), lost, frozenset(died), unanswered, are_others_left)

    def take_left(self, now: float) -> Sequence[RequestKey]:
        """Forget and return the requests on drained replicas that have left, once they have waited long enough."""
        return [key for slots in self.pool.take_left(now) for key in self._lose(slots, now, slots.requests)]

    def drop(self) -> Dropped:
        """The backend is gone: forget all replicas and requests."""
        lost = [request for slots in self.pool.replicas.values() for request in sorted(slots.requests)]
        waiting = self._queue.clear()
        for request in self._places:
            self.circuit.withdrew(request)
        self._unanswered += len(self._places)
        self.pool.clear()
        self._places.clear()
        self._set_scaled_to_zero(is_scaled_to_zero=False)
        self.is_stopped = False
        return Dropped(waiting, lost)

    # -- time --

    def tick(self, now: float) -> None:
        """Record counts of requests for the sliding windows; to be called often."""
        self.retries.tick(now, self._arrivals)
        self.circuit.tick(now, self.completed)

    def reopen(self, now: float) -> Sequence[Dispatch]:
        """Make replicas available again whose block or ejection is over."""
        if not self.pool.has_blocked:
            return _NOTHING
        self.pool.reopen(now)
        return self._dispatch_waiting()

    def forgive(self, since: float) -> Sequence[Dispatch]:
        """Undo conclusions about replicas and backend from ``since`` on: the bus did not respond."""
        self.circuit.forgive(since, self.completed)
        self.pool.forgive(since)
        return self._dispatch_waiting()

    def expire(self, now: float) -> Sequence[RequestKey]:
        """Forget and return the waiting requests whose deadline is reached; all, while the backend is stopped."""
        expired = self._queue.clear() if self.is_stopped else self._queue.expire(now)
        if self.is_stopped:
            self.stopped_refusals += len(expired)
        for request in expired:
            del self._places[request]
            self.circuit.withdrew(request)
        self._unanswered += len(expired)
        return expired

    # -- slots --

    def _assign(self, request: RequestKey, state: _RequestState) -> ReplicaSlots:
        replicas: Sequence[ReplicaSlots] = self._open
        if state.avoid:
            replicas = [slots for slots in replicas if slots.tag not in state.avoid] or replicas
        affinity, limit = state.affinity, self._max_concurrent_queries
        if affinity is None:
            slots = self._policy.choose(replicas, self._rng)
        else:
            slots = choose_by_affinity(affinity, replicas, self._policy, self._rng, limit)
        slots.turn = self._turns = self._turns + 1
        requests = slots.requests
        requests.add(request)
        state.slots = slots
        if len(requests) >= limit:
            self.pool.close(slots)
        return slots

    def _leave(self, request: RequestKey, now: float | None) -> Sequence[Dispatch]:
        """Remove ``request``: without a response at ``now``, or, when that is None, with one that is a failure."""
        state = self._places.pop(request, None)
        if state is None:
            return _NOTHING
        if now is not None:
            self._unanswered += 1
            self.circuit.fail(now, 1, self.completed)
        self.circuit.ended(request, now, self.completed)
        return self._free(request, state)

    def _free(self, request: RequestKey, state: _RequestState) -> Sequence[Dispatch]:
        slots = state.slots
        if slots is None:
            self._queue.discard(request)
            return _NOTHING
        slots.requests.discard(request)
        if slots.position >= 0 and not self._queue.has_suspects:
            return _NOTHING
        return self._refill(slots)

    def _refill(self, slots: ReplicaSlots) -> Sequence[Dispatch]:
        """Reuse a slot of a replica that was not open, or has responded for the first time after a failure."""
        if slots.block is Block.BUSY:
            slots.block = None
        self.pool.refresh((slots,))
        return self._dispatch_waiting()

    def _lose(self, slots: ReplicaSlots, now: float, requests: Iterable[RequestKey]) -> list[RequestKey]:
        lost = sorted(requests)
        if not lost:
            return lost
        slots.requests.difference_update(lost)
        for request in lost:
            del self._places[request]
        self._unanswered += len(lost)
        self.circuit.fail(now, len(lost), self.completed)
        for request in lost:
            self.circuit.ended(request, now, self.completed)
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
            dispatches.append(Dispatch(request, self._assign(request, self._places[request]).tag))
        return dispatches

    def _may_risk_one(self) -> bool:
        """Whether a healthy replica is left should another one die."""
        healthy = (slots for slots in self.pool.replicas.values() if slots.is_healthy)
        return next(healthy, None) is not None and next(healthy, None) is not None

    def _set_scaled_to_zero(self, *, is_scaled_to_zero: bool) -> None:
        if is_scaled_to_zero and not self.is_scaled_to_zero:
            # An open circuit would let only one of the first requests wake the backend and refuse the others.
            self.circuit.reset_state(self.completed)
        self.is_scaled_to_zero = is_scaled_to_zero
        self._queue.count_shadows(is_wanted=not is_scaled_to_zero)
        if not is_scaled_to_zero:
            self.wake_signal.rest()

    def _protect(self, protection: BackendProtection) -> None:
        previous, self.protection = self.protection, protection
        policy = (protection.replica_policy, protection.packing_num)
        if policy != (previous.replica_policy, previous.packing_num):
            self._policy = build_policy(*policy)
        self.retries.percent = protection.retry_budget_percent
        self.circuit.configure(protection.circuit_breaker, self.completed)
