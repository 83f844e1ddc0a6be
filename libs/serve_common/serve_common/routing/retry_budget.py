"""How many requests may be sent a second time after a loss.

Why a budget: when replicas die under their load, second sendings are more of the load that kills them.
"""

from __future__ import annotations

from typing import Final, final

from serve_common.routing.recent_counts import RecentCounts

WINDOW_S: Final = 10.0
ALWAYS: Final = 10
"""Second sendings within the window that need no share of anything."""


@final
class RetryBudget:
    """Second sendings of one router, as a share of all that it was given within `WINDOW_S`."""

    __slots__ = ("_recent", "percent", "refused", "spent")

    def __init__(self, percent: float) -> None:
        self.percent = percent
        self.spent = 0
        """Second sendings so far."""
        self.refused = 0
        """Those that the budget did not allow."""
        self._recent = RecentCounts(WINDOW_S)

    def look(self, now: float, requests: int) -> None:
        """Take note of how many requests the router was given so far; see `RecentCounts.look`."""
        self._recent.look(now, requests, self.spent)

    def take(self, now: float, requests: int) -> bool:
        """True when one more second sending is allowed; it then counts as made."""
        recent, spent = self._recent.grown(now, requests, self.spent)
        if spent >= ALWAYS and 100.0 * (spent + 1) > self.percent * recent:
            self.refused += 1
            return False
        self.spent += 1
        return True
