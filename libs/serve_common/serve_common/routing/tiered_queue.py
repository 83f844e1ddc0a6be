"""Two queues as one: spare requests get a slot only when no ordinary one waits.

Why not one queue with another order: deadlines order each of the two, and what is spare must count neither as depth nor
against the limit, or a copy of a request could keep a real one out.
"""

from __future__ import annotations

from typing import final

from serve_common.routing.request_queue import RequestKey, RequestQueue


@final
class TieredQueue:
    """Ordinary requests first; within each kind earliest deadline first, then first come."""

    __slots__ = ("_ordinary", "_spare")

    def __init__(self) -> None:
        self._ordinary = RequestQueue()
        self._spare = RequestQueue()

    def __len__(self) -> int:
        return len(self._ordinary) + len(self._spare)

    def __contains__(self, request: object) -> bool:
        return request in self._ordinary or request in self._spare

    @property
    def depth(self) -> int:
        """Ordinary requests that wait."""
        return len(self._ordinary)

    def push(self, request: RequestKey, deadline: float, arrival: int, *, is_spare: bool) -> None:
        """See `RequestQueue.push`."""
        (self._spare if is_spare else self._ordinary).push(request, deadline, arrival)

    def pop(self) -> RequestKey:
        """Take the first one; one must be waiting."""
        return (self._ordinary or self._spare).pop()

    def discard(self, request: RequestKey) -> bool:
        """See `RequestQueue.discard`."""
        return self._ordinary.discard(request) or self._spare.discard(request)

    def expire(self, now: float) -> list[RequestKey]:
        """Take out all whose deadline is reached."""
        return self._ordinary.expire(now) + self._spare.expire(now)

    def clear(self) -> list[RequestKey]:
        """Take out all, in order."""
        return self._ordinary.clear() + self._spare.clear()
