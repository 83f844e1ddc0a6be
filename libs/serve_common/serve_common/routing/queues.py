"""Requests in a router: the queues in which they wait for a slot, and what the router returns about each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from heapq import heapify, heappop, heappush
from typing import NamedTuple, NewType, final

from serve_common.names import ReplicaTag

Clock = Callable[[], float]
"""Reads a monotonic clock, in seconds."""


@final
class QueuedSeconds:
    """Integral of the queue's length over time; exact in any order of arrivals and departures.

    Why an integral and not a gauge of the length: its rate over any window is the mean number that waited in that
    window, however rarely it is read, so an autoscaler also sees bursts between two scrapes.

    May be read from any thread: its state is one tuple, replaced as a whole.
    """

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = (0.0, 0, 0.0)
        """The seconds up to a time, how many wait since then, and that time."""

    def note(self, now: float, waiting: int) -> None:
        """From ``now`` on ``waiting`` requests wait; ``now`` must not decrease."""
        seconds, waiting_before, since = self._state
        self._state = (seconds + waiting_before * (now - since), waiting, now)

    def until(self, now: float) -> float:
        """The seconds up to ``now``, or up to the last change when ``now`` is before it."""
        seconds, waiting_before, since = self._state
        return seconds + waiting_before * max(0.0, now - since)


RequestKey = NewType("RequestKey", int)
"""Identifies one request within a process; never reused there."""

_GARBAGE_MAX = 64


@final
class RequestQueue:
    """Orders requests by deadline, then by arrival.

    Why a heap with lazy deletion: most requests leave by getting a slot; the few that leave from the middle (cancelled,
    expired) must not cost a search.
    """

    __slots__ = ("_entries", "_heap")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RequestKey]] = []
        self._entries: dict[RequestKey, tuple[float, int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: object) -> bool:
        return request in self._entries

    def push(self, request: RequestKey, deadline: float, arrival: int) -> None:
        """Add ``request``, which must not be waiting already. ``arrival`` orders equal deadlines."""
        assert request not in self._entries, f"{request} waits already"
        self._entries[request] = (deadline, arrival)
        heappush(self._heap, (deadline, arrival, request))

    def pop(self) -> RequestKey:
        """Remove and return the first one; the queue must not be empty."""
        while True:
            deadline, arrival, request = heappop(self._heap)
            if self._entries.get(request) == (deadline, arrival):
                del self._entries[request]
                return request

    def discard(self, request: RequestKey) -> bool:
        """Remove ``request``; False when it does not wait."""
        if self._entries.pop(request, None) is None:
            return False
        if len(self._heap) > 2 * len(self._entries) + _GARBAGE_MAX:
            self._heap = [(*entry, waiting) for waiting, entry in self._entries.items()]
            heapify(self._heap)
        return True

    def expire(self, now: float) -> list[RequestKey]:
        """Remove and return all whose deadline is reached."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            deadline, arrival, request = heappop(self._heap)
            if self._entries.get(request) == (deadline, arrival):
                del self._entries[request]
                expired.append(request)
        return expired

    def clear(self) -> list[RequestKey]:
        """Remove and return all, in order."""
        waiting = sorted(self._entries, key=self._entries.__getitem__)
        self._entries.clear()
        self._heap.clear()
        return waiting


@final
class TieredQueue:
    """Suspects first where allowed, for they were sent once before; then ordinary requests; then shadow copies.

    Within each tier by deadline, then by arrival.

    Why not one queue with another order: shadow copies must count neither towards `depth` nor towards the limit, or a
    copy could keep a real request out; and a suspect, which not every slot is for, must not hold up the others.

    Why it measures the waiting time: every arrival and departure passes here, and requests that get a slot at once
    never do.
    """

    __slots__ = ("_counts_shadows", "_now", "_ordinary", "_seconds", "_shadows", "_suspect")

    def __init__(self, now: Clock) -> None:
        self._now = now
        self._ordinary = RequestQueue()
        self._shadows = RequestQueue()
        self._suspect = RequestQueue()
        self._seconds = QueuedSeconds()
        self._counts_shadows = True

    def __len__(self) -> int:
        return len(self._ordinary) + len(self._suspect) + len(self._shadows)

    def __contains__(self, request: object) -> bool:
        return request in self._ordinary or request in self._suspect or request in self._shadows

    @property
    def depth(self) -> int:
        """Requests that wait, without shadow copies."""
        return len(self._ordinary) + len(self._suspect)

    @property
    def has_suspects(self) -> bool:
        """True when suspects wait."""
        return len(self._suspect) > 0

    def seconds(self, now: float) -> float:
        """Total seconds that requests have waited up to ``now``."""
        return self._seconds.until(now)

    def count_shadows(self, *, is_wanted: bool) -> None:
        """Set whether waiting shadow copies count towards `seconds` from now on."""
        self._counts_shadows = is_wanted
        self._note()

    def push(
        self, request: RequestKey, deadline: float, arrival: int, *, is_shadow: bool, is_suspect: bool = False
    ) -> None:
        """Add ``request`` to its tier, as `RequestQueue.push`."""
        queue = self._shadows if is_shadow else self._suspect if is_suspect else self._ordinary
        queue.push(request, deadline, arrival)
        self._note()

    def pop(self, *, with_suspects: bool) -> RequestKey | None:
        """Remove and return the first one; None when only suspects wait and ``with_suspects`` is false."""
        queue = (with_suspects and self._suspect) or self._ordinary or self._shadows
        if not queue:
            return None
        request = queue.pop()
        self._note()
        return request

    def discard(self, request: RequestKey) -> bool:
        """Remove ``request``; False when it does not wait."""
        was_waiting = (
            self._ordinary.discard(request)
            or self._suspect.discard(request)
            or self._shadows.discard(request)
        )
        self._note()
        return was_waiting

    def expire(self, now: float) -> list[RequestKey]:
        """Remove and return all whose deadline is reached."""
        expired = self._ordinary.expire(now) + self._suspect.expire(now) + self._shadows.expire(now)
        if expired:
            self._note()
        return expired

    def clear(self) -> list[RequestKey]:
        """Remove and return all, in order."""
        waiting = self._ordinary.clear() + self._suspect.clear() + self._shadows.clear()
        self._note()
        return waiting

    def _note(self) -> None:
        waiting = len(self._ordinary) + len(self._suspect)
        if self._counts_shadows and self._shadows:
            waiting += len(self._shadows)
        self._seconds.note(self._now(), waiting)


@final
class SendTo(NamedTuple):
    """The request got a slot of ``replica``; the caller must send it there now."""

    replica: ReplicaTag


@final
class Queued(NamedTuple):
    """The request waits; a later call returns it as a `Dispatch` or as expired."""


@final
class QueueFull(NamedTuple):
    """The request was refused: ``limit`` requests wait already."""

    limit: int


class Dispatch(NamedTuple):
    """A request that waited got a slot of ``replica``; the caller must send it there now."""

    request: RequestKey
    replica: ReplicaTag


class Applied(NamedTuple):
    """Result of a snapshot. ``lost`` were in flight on replicas that are gone; the router has forgotten them."""

    dispatches: Sequence[Dispatch]
    lost: Sequence[RequestKey]
    died: frozenset[RequestKey] = frozenset()
    """Those of ``lost`` whose replica was not draining: it died."""
    leaving: Sequence[RequestKey] = ()
    """In flight on drained replicas that are gone: their answers may still come."""
    are_others_left: bool = False
    """Replicas that were healthy before still exist."""


class Dropped(NamedTuple):
    """All requests of a router, which has forgotten them."""

    waiting: Sequence[RequestKey]
    lost: Sequence[RequestKey]


class Refusal(Enum):
    """Why a replica did not start a request that was sent to it."""

    BUSY = "busy"
    DRAINING = "draining"
    NO_RESPONDERS = "no_responders"
