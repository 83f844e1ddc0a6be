"""The requests that ended lately, with their answers: what a router asks for whose connection was cut meanwhile.

Why: an answer that leaves while its router is reconnecting reaches nobody, and a request may be lost the same way. Who
remembers can say the answer again, or say for certain that the request never began; both spare the client an error.

Why two generations and no time for each: this is part of every request's cost. The elder is dropped as a whole when the
younger is old enough, or full; what was dropped early is known to be.
"""

from __future__ import annotations

from typing import Final, final

KEPT_S: Final = 5.0
"""At least, unless there is too much; longer than a reconnect and the probe after it take."""
GENERATION_MAX: Final = 5_000
"""Requests."""
GENERATION_BYTES_MAX: Final = 4 * 1024 * 1024
ANSWER_BYTES_MAX: Final = 64 * 1024
"""A longer answer is not kept, only that it ended."""


@final
class RecentReplies:
    """By reply subject; all methods run on one loop. Times are `time.monotonic`."""

    __slots__ = ("_bytes", "_elder", "_forgotten_at", "_since", "_younger", "last_at")

    def __init__(self) -> None:
        self.last_at = float("-inf")
        """When a request ended last."""
        self._younger: dict[bytes, bytes] = {}
        self._elder: dict[bytes, bytes] = {}
        self._bytes = 0
        self._since = float("-inf")
        """When the younger generation began."""
        self._forgotten_at = float("-inf")
        """Everything that ended after this is held: a replica's process is the only one of its tag, so nothing ended
        before it began."""

    def __contains__(self, reply: object) -> bool:
        return reply in self._younger or reply in self._elder

    def add(self, reply: bytes, answer: bytes, now: float) -> None:
        """The request of ``reply`` has ended, or never will begin; ``answer`` is the one frame that says so, if any."""
        younger = self._younger
        if now - self._since > KEPT_S or len(younger) >= GENERATION_MAX or self._bytes > GENERATION_BYTES_MAX:
            younger = self._begin_generation(now)
        size_bytes = len(answer)
        if size_bytes > ANSWER_BYTES_MAX:
            answer, size_bytes = b"", 0
        younger[reply] = answer
        self._bytes += size_bytes
        self.last_at = now

    def answer(self, reply: bytes) -> bytes:
        """The answer of a request that ended; empty when it is not kept."""
        return self._younger.get(reply) or self._elder.get(reply, b"")

    def covers(self, since: float) -> bool:
        """Whether all that ended after ``since`` is held."""
        return since > self._forgotten_at

    def _begin_generation(self, now: float) -> dict[bytes, bytes]:
        if self._elder:
            self._forgotten_at = self._since
        self._elder, self._younger = self._younger, {}
        self._bytes = 0
        self._since = now
        return self._younger
