"""Requests that wait for a slot: one queue, three tiers as one, and how long requests have waited in all."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import NewType, final

Clock = Callable[[], float]
"""Reads a monotonic clock, in seconds."""


@final
class QueuedSeconds:
    """Sums up the queue's length over time; exact, whatever the order of comings and goings.

    May be read from any thread: what it knows is one tuple, replaced as a whole.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known = (0.0, 0, 0.0)
        """The seconds up to a time, how many wait since then, and that time."""

    def note(self, now: float, waiting: int) -> None:
        """From ``now`` on so many wait; it must not be before the last time."""
        seconds, held, since = self._known
        self._known = (seconds + held * (now - since), waiting, now)

    def until(self, now: float) -> float:
        """The seconds up to ``now``, or, when that is long past, up to the last change."""
        seconds, held, since = self._known
        return seconds + held * max(0.0, now - since)


RequestKey = NewType("RequestKey", int)
"""One request within one process; never used again there."""

_GARBAGE_MAX = 64


@final
class RequestQueue:
    """Earliest deadline first, then first come."""

    __slots__ = ("_heap", "_places")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RequestKey]] = []
        self._places: dict[RequestKey, tuple[float, int]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, request: object) -> bool:
        return request in self._places

    def push(self, request: RequestKey, deadline: float, arrival: int) -> None:
        """Let ``request`` wait; it must not be waiting already. ``arrival`` orders equal deadlines."""
        assert request not in self._places, f"{request} waits already"
        self._places[request] = (deadline, arrival)
        heappush(self._heap, (deadline, arrival, request))

    def pop(self) -> RequestKey:
        """Take the first one; the queue must not be empty."""
        while True:
            deadline, arrival, request = heappop(self._heap)
            if self._places.get(request) == (deadline, arrival):
                del self._places[request]
                return request

    def discard(self, request: RequestKey) -> bool:
        """Take ``request`` out wherever it stands; False when it does not wait."""
        if self._places.pop(request, None) is None:
            return False
        if len(self._heap) > 2 * len(self._places) + _GARBAGE_MAX:
            self._heap = [(*place, waiting) for waiting, place in self._places.items()]
            heapify(self._heap)
        return True

    def expire(self, now: float) -> list[RequestKey]:
        """Take out all whose deadline is reached."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            deadline, arrival, request = heappop(self._heap)
            if self._places.get(request) == (deadline, arrival):
                del self._places[request]
                expired.append(request)
        return expired

    def clear(self) -> list[RequestKey]:
        """Take out all, in order."""
        waiting = sorted(self._places, key=self._places.__getitem__)
        self._places.clear()
        self._heap.clear()
        return waiting


@final
class TieredQueue:
    """Suspects first where they may go, for they were sent once before; then ordinary requests; then spare ones.

    Within each kind earliest deadline first, then first come.
    """

    __slots__ = ("_counts_spare", "_now", "_ordinary", "_seconds", "_spare", "_suspect")

    def __init__(self, now: Clock) -> None:
        self._now = now
        self._ordinary = RequestQueue()
        self._spare = RequestQueue()
        self._suspect = RequestQueue()
        self._seconds = QueuedSeconds()
        self._counts_spare = True

    def __len__(self) -> int:
        return len(self._ordinary) + len(self._suspect) + len(self._spare)

    def __contains__(self, request: object) -> bool:
        return request in self._ordinary or request in self._suspect or request in self._spare

    @property
    def depth(self) -> int:
        """Requests that wait, spare ones left out."""
        return len(self._ordinary) + len(self._suspect)

    @property
    def has_suspects(self) -> bool:
        """True when suspects wait."""
        return len(self._suspect) > 0

    def seconds(self, now: float) -> float:
        """How long requests have waited up to ``now``; see `QueuedSeconds`."""
        return self._seconds.until(now)

    def count_spare(self, *, is_wanted: bool) -> None:
        """Whether the time that spare ones wait counts from now on."""
        self._counts_spare = is_wanted
        self._note()

    def push(
        self, request: RequestKey, deadline: float, arrival: int, *, is_spare: bool, is_suspect: bool = False
    ) -> None:
        """See `RequestQueue.push`."""
        queue = self._spare if is_spare else self._suspect if is_suspect else self._ordinary
        queue.push(request, deadline, arrival)
        self._note()

    def pop(self, *, with_suspects: bool) -> RequestKey | None:
        """Take the first one; None when all that wait are suspects and those are not wanted."""
        queue = (with_suspects and self._suspect) or self._ordinary or self._spare
        if not queue:
            return None
        request = queue.pop()
        self._note()
        return request

    def discard(self, request: RequestKey) -> bool:
        """See `RequestQueue.discard`."""
        is_found = (
            self._ordinary.discard(request) or self._suspect.discard(request) or self._spare.discard(request)
        )
        self._note()
        return is_found

    def expire(self, now: float) -> list[RequestKey]:
        """Take out all whose deadline is reached."""
        expired = self._ordinary.expire(now) + self._suspect.expire(now) + self._spare.expire(now)
        if expired:
            self._note()
        return expired

    def clear(self) -> list[RequestKey]:
        """Take out all, in order."""
        waiting = self._ordinary.clear() + self._suspect.clear() + self._spare.clear()
        self._note()
        return waiting

    def _note(self) -> None:
        waiting = len(self._ordinary) + len(self._suspect)
        if self._counts_spare and self._spare:
            waiting += len(self._spare)
        self._seconds.note(self._now(), waiting)
