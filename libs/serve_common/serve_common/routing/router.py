"""One backend's router: which replica gets which request, who waits, and who has which slot.

Why one state machine without I/O: it must hold, for every order of submits, answers, refusals, cancels, deaths and
snapshots, that every slot is given back exactly once, that no replica gets more than `max_concurrent_queries`, and that
nobody waits while a replica could take a request. Each method returns what is to be sent now.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple, final

from serve_common.names import BackendTag, ReplicaTag
from serve_common.routing.replica_choice import Draw, PowerOfTwoChoices, ReplicaPolicy
from serve_common.routing.replica_slots import Block, ReplicaSlots
from serve_common.routing.request_queue import RequestKey
from serve_common.routing.tiered_queue import TieredQueue
from serve_common.values import BackendConfig
from serve_common.wires.snapshots import BackendSnapshot


class SendTo(NamedTuple):
    """The request has a slot of ``replica``; it is to be sent there now."""

    replica: ReplicaTag


class Queued(NamedTuple):
    """The request waits; a later call returns it as a `Dispatch` or as expired."""


class QueueFull(NamedTuple):
    """The request was not taken: ``limit`` requests wait already."""

    limit: int


class Dispatch(NamedTuple):
    """A request that waited has a slot of ``replica`` now; it is to be sent there."""

    request: RequestKey
    replica: ReplicaTag


class Applied(NamedTuple):
    """What a snapshot changed. ``lost`` were in flight on replicas that are gone; the router has forgotten them."""

    dispatches: Sequence[Dispatch]
    lost: Sequence[RequestKey]


class Dropped(NamedTuple):
    """All that a router held; it has forgotten them."""

    waiting: Sequence[RequestKey]
    lost: Sequence[RequestKey]


class Refusal(Enum):
    """Why a replica did not begin a request that was sent to it."""

    BUSY = "busy"
    DRAINING = "draining"
    NO_RESPONDERS = "no_responders"


_NOTHING: Final[Sequence[Dispatch]] = ()
_QUEUED: Final = Queued()


@final
class _Place:
    """Where one request stands: in a replica's slot, or in the queue."""

    __slots__ = ("arrival", "avoid", "deadline", "is_spare", "slots")

    def __init__(self, deadline: float, arrival: int, *, is_spare: bool) -> None:
        self.deadline = deadline
        self.arrival = arrival
        self.is_spare = is_spare
        self.slots: ReplicaSlots | None = None
        self.avoid: frozenset[ReplicaTag] = frozenset()
        """Replicas that refused it: taken only when there is no other."""


@final
class Router:
    """The replicas of one backend and the requests that are on them or wait for them.

    Times are seconds of one monotonic clock, given with each call that needs it.
    """

    def __init__(self, backend_tag: BackendTag, draw: Draw, policy: ReplicaPolicy | None = None) -> None:
        """Before the first snapshot there are no replicas and the limits are the defaults."""
        self.backend_tag: Final = backend_tag
        self._draw = draw
        self._policy = policy or PowerOfTwoChoices()
        defaults = BackendConfig()
        self._max_concurrent_queries = defaults.max_concurrent_queries
        self._max_queued_requests = defaults.max_queued_requests
        self._replicas: dict[ReplicaTag, ReplicaSlots] = {}
        self._open: list[ReplicaSlots] = []
        self._blocked: set[ReplicaTag] = set()
        self._places: dict[RequestKey, _Place] = {}
        self._queue = TieredQueue()
        self._arrivals = 0
        self._turns = 0

    # -- looking --

    @property
    def queue_depth(self) -> int:
        """Requests that wait, spare ones left out."""
        return self._queue.depth

    @property
    def has_waiting(self) -> bool:
        """True when anything waits, so that `expire` may have something to do at a later time."""
        return len(self._queue) > 0

    @property
    def in_flight(self) -> int:
        """Requests that have a slot."""
        return len(self._places) - len(self._queue)

    @property
    def has_blocked(self) -> bool:
        """True when `reopen` may have something to do at a later time."""
        return bool(self._blocked)

    def requests_at(self, replica: ReplicaTag) -> frozenset[RequestKey]:
        """What is in flight on one replica."""
        slots = self._replicas.get(replica)
        return frozenset() if slots is None else frozenset(slots.requests)

    def is_waiting(self, request: RequestKey) -> bool:
        """True when ``request`` waits for a slot."""
        return request in self._queue

    # -- requests --

    def submit(
        self, request: RequestKey, deadline: float, *, is_admitted: bool = False, is_spare: bool = False
    ) -> SendTo | Queued | QueueFull:
        """Take a new request.

        ``is_admitted``: it was taken once, so no limit may refuse it now. ``is_spare``: it waits behind all that are
        not, takes no place of theirs in the queue, and its number is the caller's to limit.
        """
        assert request not in self._places, f"{request} is here already"
        is_limited = not is_admitted and not is_spare
        if not self._open and is_limited and 0 <= self._max_queued_requests <= self._queue.depth:
            return QueueFull(self._max_queued_requests)
        self._arrivals += 1
        place = _Place(deadline, self._arrivals, is_spare=is_spare)
        self._places[request] = place
        if self._open:
            return SendTo(self._seat(request, place))
        self._queue.push(request, deadline, place.arrival, is_spare=is_spare)
        return _QUEUED

    def finished(self, request: RequestKey) -> Sequence[Dispatch]:
        """The replica has answered ``request`` to its end. Unknown requests are ignored."""
        place = self._places.pop(request, None)
        if place is None:
            return _NOTHING
        slots = place.slots
        if slots is None:  # it was sent, lost, and waits to be sent again: the late answer is as good
            self._queue.discard(request)
            return _NOTHING
        if slots.has_failed:
            slots.prove_alive()
        return self._free(slots, request)

    def cancelled(self, request: RequestKey) -> Sequence[Dispatch]:
        """Nobody waits for ``request`` any more, wherever it stands. Unknown requests are ignored."""
        place = self._places.pop(request, None)
        if place is None:
            return _NOTHING
        if place.slots is None:
            self._queue.discard(request)
            return _NOTHING
        return self._free(place.slots, request)

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
        self._blocked.add(replica)
        self._close(slots)
        place.slots = None
        place.avoid |= {replica}
        self._queue.push(request, place.deadline, place.arrival, is_spare=place.is_spare)
        return self._dispatch_waiting()

    # -- replicas --

    def put_aside(self, replica: ReplicaTag, now: float) -> None:
        """Do not choose ``replica`` for a while: it seems not to answer. What is in flight there stays."""
        slots = self._replicas.get(replica)
        if slots is not None:
            slots.put_aside(now)
            self._blocked.add(replica)
            self._close(slots)

    def replica_gone(self, replica: ReplicaTag, now: float) -> Sequence[RequestKey]:
        """``replica`` is dead. Returns what was in flight there, which the router has forgotten.

        It is put aside rather than removed: only a snapshot says for certain that it will not come back.
        """
        slots = self._replicas.get(replica)
        if slots is None:
            return ()
        self.put_aside(replica, now)
        return self._lose(slots)

    def apply(self, snapshot: BackendSnapshot) -> Applied:
        """Take over replicas and limits; a replica that is named anew may be chosen at once."""
        self._max_concurrent_queries = snapshot.max_concurrent_queries
        self._max_queued_requests = snapshot.max_queued_requests
        lost: list[RequestKey] = []
        for tag in self._replicas.keys() - {*snapshot.replicas, *snapshot.draining}:
            slots = self._replicas.pop(tag)
            self._close(slots)
            lost += self._lose(slots)
        for tag in (*snapshot.draining, *snapshot.replicas):
            slots = self._replicas.setdefault(tag, ReplicaSlots(tag))
            slots.is_draining = False
            slots.block = None
        for tag in snapshot.draining:
            self._replicas[tag].is_draining = True
        self._blocked.clear()
        for slots in self._replicas.values():
            self._open_or_close(slots)
        return Applied(self._dispatch_waiting(), lost)

    def drop(self) -> Dropped:
        """The backend is gone: forget all replicas and requests."""
        lost = [request for slots in self._replicas.values() for request in sorted(slots.requests)]
        waiting = self._queue.clear()
        self._replicas.clear()
        self._open.clear()
        self._blocked.clear()
        self._places.clear()
        return Dropped(waiting, lost)

    # -- time --

    def reopen(self, now: float) -> Sequence[Dispatch]:
        """Choose again among the replicas whose time aside is over."""
        if not self._blocked:
            return _NOTHING
        for tag in sorted(self._blocked):
            slots = self._replicas[tag]
            if slots.block is None or slots.blocked_until <= now:
                slots.block = None
                self._blocked.discard(tag)
                self._open_or_close(slots)
        return self._dispatch_waiting()

    def expire(self, now: float) -> Sequence[RequestKey]:
        """Forget and return the waiting requests whose deadline is reached."""
        expired = self._queue.expire(now)
        for request in expired:
            del self._places[request]
        return expired

    # -- slots --

    def _seat(self, request: RequestKey, place: _Place) -> ReplicaTag:
        candidates: Sequence[ReplicaSlots] = self._open
        if place.avoid:
            candidates = [slots for slots in self._open if slots.tag not in place.avoid] or self._open
        slots = self._policy.choose(candidates, self._draw)
        self._turns += 1
        slots.turn = self._turns
        slots.requests.add(request)
        place.slots = slots
        if len(slots.requests) >= self._max_concurrent_queries:
            self._close(slots)
        return slots.tag

    def _free(self, slots: ReplicaSlots, request: RequestKey) -> Sequence[Dispatch]:
        slots.requests.discard(request)
        if slots.block is Block.BUSY:
            slots.block = None
        if slots.position < 0:
            self._open_or_close(slots)
        return self._dispatch_waiting() if self._queue else _NOTHING

    def _lose(self, slots: ReplicaSlots) -> list[RequestKey]:
        lost = sorted(slots.requests)
        slots.requests.clear()
        for request in lost:
            del self._places[request]
        return lost

    def _dispatch_waiting(self) -> Sequence[Dispatch]:
        if not self._queue or not self._open:
            return _NOTHING
        dispatches = []
        while self._queue and self._open:
            request = self._queue.pop()
            dispatches.append(Dispatch(request, self._seat(request, self._places[request])))
        return dispatches

    def _open_or_close(self, slots: ReplicaSlots) -> None:
        if not slots.can_take(self._max_concurrent_queries):
            self._close(slots)
        elif slots.position < 0:
            slots.position = len(self._open)
            self._open.append(slots)

    def _close(self, slots: ReplicaSlots) -> None:
        if slots.position < 0:
            return
        # Its place in the list is taken by the last one: order does not matter, and nothing is searched.
        last = self._open.pop()
        if last is not slots:
            last.position = slots.position
            self._open[slots.position] = last
        slots.position = -1
