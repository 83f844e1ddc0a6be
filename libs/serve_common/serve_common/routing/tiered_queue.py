"""Two queues as one: spare requests get a slot only when no ordinary one waits.

Why not one queue with another order: deadlines order each of the two, and what is spare must count neither as depth nor
against the limit, or a copy of a request could keep a real one out.

Why it keeps the seconds of waiting: every coming and going passes here, and those who get a slot at once never do.
"""

from __future__ import annotations

from typing import final

from serve_common.routing.queued_seconds import Clock, QueuedSeconds
from serve_common.routing.request_queue import RequestKey, RequestQueue


@final
class TieredQueue:
    """Ordinary requests first; within each kind earliest deadline first, then first come."""

    __slots__ = ("_counts_spare", "_now", "_ordinary", "_seconds", "_spare")

    def __init__(self, now: Clock) -> None:
        self._now = now
        self._ordinary = RequestQueue()
        self._spare = RequestQueue()
        self._seconds = QueuedSeconds()
        self._counts_spare = True

    def __len__(self) -> int:
        return len(self._ordinary) + len(self._spare)

    def __contains__(self, request: object) -> bool:
        return request in self._ordinary or request in self._spare

    @property
    def depth(self) -> int:
        """Ordinary requests that wait."""
        return len(self._ordinary)

    def seconds(self, now: float) -> float:
        """How long requests have waited up to ``now``; see `QueuedSeconds`."""
        return self._seconds.until(now)

    def count_spare(self, *, is_wanted: bool) -> None:
        """Whether the time that spare ones wait counts from now on."""
        self._counts_spare = is_wanted
        self._note()

    def push(self, request: RequestKey, deadline: float, arrival: int, *, is_spare: bool) -> None:
        """See `RequestQueue.push`."""
        (self._spare if is_spare else self._ordinary).push(request, deadline, arrival)
        self._note()

    def pop(self) -> RequestKey:
        """Take the first one; one must be waiting."""
        request = (self._ordinary or self._spare).pop()
        self._note()
        return request

    def discard(self, request: RequestKey) -> bool:
        """See `RequestQueue.discard`."""
        is_found = self._ordinary.discard(request) or self._spare.discard(request)
        self._note()
        return is_found

    def expire(self, now: float) -> list[RequestKey]:
        """Take out all whose deadline is reached."""
        expired = self._ordinary.expire(now) + self._spare.expire(now)
        if expired:
            self._note()
        return expired

    def clear(self) -> list[RequestKey]:
        """Take out all, in order."""
        waiting = self._ordinary.clear() + self._spare.clear()
        self._note()
        return waiting

    def _note(self) -> None:
        waiting = len(self._ordinary)
        if self._counts_spare and self._spare:
            waiting += len(self._spare)
        self._seconds.note(self._now(), waiting)
