"""Three queues as one: ordinary requests, suspects that not every slot is for, and spare ones, which come last.

Why not one queue with another order: deadlines order each of them; what is spare must count neither as depth nor
against the limit, or a copy of a request could keep a real one out; and a suspect that must wait holds up nobody.

Why it keeps the seconds of waiting: every coming and going passes here, and those who get a slot at once never do.
"""

from __future__ import annotations

from typing import final

from serve_common.routing.queued_seconds import Clock, QueuedSeconds
from serve_common.routing.request_queue import RequestKey, RequestQueue


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
