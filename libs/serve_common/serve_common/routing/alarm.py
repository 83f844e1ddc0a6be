"""When a router says that requests wait for a backend that was scaled to zero.

Why not once per request: a burst of a thousand should cost a message or two, and a message that was lost must cost no
more than the time until the next one.
"""

from __future__ import annotations

from typing import Final, final

from serve_common.wires.wake import AGAIN_S

SOON_S: Final = 0.02
"""After a message that told of one request alone, another may follow with what has come since: the first says that a
replica is needed, the second for how many requests."""


@final
class Alarm:
    """What was said last, and when."""

    __slots__ = ("_told", "_told_at")

    def __init__(self) -> None:
        self._told = 0
        self._told_at = float("-inf")

    def is_due(self, now: float, waiting: int) -> bool:
        """Whether to say now that so many wait, which must be at least one."""
        since_s = now - self._told_at
        return since_s >= AGAIN_S or (self._told == 1 < waiting and since_s >= SOON_S)

    def told(self, now: float, waiting: int) -> None:
        """It was said."""
        self._told, self._told_at = waiting, now

    def rest(self) -> None:
        """Nothing is to be said for now; the next time begins anew."""
        self._told, self._told_at = 0, float("-inf")
