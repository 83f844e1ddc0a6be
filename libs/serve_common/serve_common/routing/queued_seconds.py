"""How long requests have waited in a queue so far, all together, those that still wait included.

Why an integral and not a gauge of the queue's length: its rate over any window is the mean number that waited in that
window, however rarely it is read, so whoever scales by it sees bursts between two readings too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

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
