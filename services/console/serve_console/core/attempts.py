"""Limits on attempts to sign in: each costs time and memory, and guesses must not get far."""

from __future__ import annotations

from typing import Final, final

_NAMES_MAX: Final = 10_000


@final
class Attempts:
    """Delays the next attempt of a name or from an address after failures: by 2, 4, 8 … seconds.

    Why delays and no lock: those who know a name could otherwise keep its owner out.
    """

    def __init__(self, *, free: int, longest_s: float) -> None:
        """``free`` failures cost nothing; the longest delay is ``longest_s``."""
        self._free = free
        self._longest_s = longest_s
        self._failures: dict[str, tuple[int, float]] = {}

    def get_delay_s(self, key: str, now: float) -> float:
        """Seconds until another attempt is accepted; 0: now."""
        count, at = self._failures.get(key, (0, 0.0))
        if count < self._free:
            return 0.0
        wait_s = min(self._longest_s, 2.0 ** min(count - self._free + 1, 30))
        return max(0.0, at + wait_s - now)

    def fail(self, key: str, now: float) -> None:
        """Count a failure. Beyond 10,000 names the oldest are forgotten."""
        count, at = self._failures.pop(key, (0, 0.0))
        is_forgiven = now - at > 2 * self._longest_s
        self._failures[key] = (1 if is_forgiven else count + 1, now)
        while len(self._failures) > _NAMES_MAX:
            del self._failures[next(iter(self._failures))]

    def succeed(self, key: str) -> None:
        """Forget the failures of ``key``."""
        self._failures.pop(key, None)
