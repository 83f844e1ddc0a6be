"""Whether the bus answers this controller, judged by its own round trips.

Why beside what the client tells: a NATS that hangs resets no connection, and the client notices that only after ten
seconds and more. Whoever is silent meanwhile is silent for no fault of theirs.
"""

from __future__ import annotations

from typing import Final, final

PING_EVERY_S: Final = 1.0
ANSWER_WITHIN_S: Final = 2.0
"""A round trip that takes longer says that the bus is away."""


@final
class BusLiveness:
    """Takes in round trips, and says when the bus went and came."""

    def __init__(self, now: float) -> None:
        self.is_away = False
        self._answered_at = now
        """When the newest answer came, or the connection."""

    def went(self) -> None:
        """The connection is lost."""
        self.is_away = True

    def came(self, now: float) -> None:
        """The connection is there again."""
        self.is_away = False
        self._answered_at = now

    def unanswered(self, begun_at: float) -> bool:
        """What was asked at ``begun_at`` was not answered within `ANSWER_WITHIN_S`; True when the bus went by that."""
        if self.is_away or begun_at < self._answered_at:
            return False  # it was lost with a connection that has been made anew since
        self.is_away = True
        return True

    def answered(self, now: float) -> bool:
        """The bus answered; True when it was away until now.

        It counts as away also while nobody noticed: this process may have stood still itself, and what others said
        meanwhile may not have been read yet.
        """
        was_away = self.is_away or now - self._answered_at > PING_EVERY_S + ANSWER_WITHIN_S
        self.came(now)
        return was_away
