"""Requests that wait for a slot, in the order in which they get one.

Why a heap with lazy deletion: most requests that wait leave by getting a slot; the few that leave from the middle
(cancelled, expired) must not cost a search.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NewType, final

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
