"""The requests that ended lately, with their answers: what a router asks for whose connection was cut meanwhile.

Why: an answer that leaves while its router is reconnecting reaches nobody, and a request may be lost the same way. Who
remembers can say the answer again, or say for certain that the request never began; both spare the client an error.
Bounded in time, number and bytes; what falls out early is known to have fallen out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple, final

KEPT_S: Final = 5.0
"""Longer than a reconnect and the probe after it take."""
REPLIES_MAX: Final = 10_000
BYTES_MAX: Final = 8 * 1024 * 1024
ANSWER_BYTES_MAX: Final = 64 * 1024
"""A longer answer is not kept, only that it ended."""


class _Ended(NamedTuple):
    at: float
    answer: bytes


@final
class RecentReplies:
    """By reply subject; all methods run on one loop."""

    __slots__ = ("_bytes", "_forgotten_at", "_held", "_now")

    def __init__(self, now: Callable[[], float]) -> None:
        """``now`` is `time.monotonic` or a stand-in."""
        self._now = now
        self._held: OrderedDict[bytes, _Ended] = OrderedDict()  # a plain dict slows down as its oldest go
        self._bytes = 0
        self._forgotten_at = float("-inf")
        """Everything that ended after this is held: a replica's process is the only one of its tag, so nothing ended
        before it began."""

    def __contains__(self, reply: object) -> bool:
        return reply in self._held

    def add(self, reply: bytes, answer: bytes = b"") -> None:
        """The request of ``reply`` has ended, or never will begin; ``answer`` is the one frame that says so, if any."""
        held = self._held
        if reply in held:
            return
        now = self._now()
        if len(answer) > ANSWER_BYTES_MAX:
            answer = b""
        held[reply] = _Ended(now, answer)
        self._bytes += len(answer)
        while len(held) > REPLIES_MAX or self._bytes > BYTES_MAX:
            self._forget_oldest()
        for _ in range(2):  # two go for each that comes: what is old never piles up
            if now - next(iter(held.values())).at <= KEPT_S:
                break
            self._forget_oldest()

    def answer(self, reply: bytes) -> bytes:
        """The answer of a request that ended; empty when it is not kept."""
        ended = self._held.get(reply)
        return b"" if ended is None else ended.answer

    @property
    def last_at(self) -> float:
        """When a request ended last."""
        return next(reversed(self._held.values())).at if self._held else float("-inf")

    def covers(self, since: float) -> bool:
        """Whether all that ended after ``since`` is held."""
        return since > self._forgotten_at

    def _forget_oldest(self) -> None:
        _, ended = self._held.popitem(last=False)
        self._bytes -= len(ended.answer)
        self._forgotten_at = ended.at
