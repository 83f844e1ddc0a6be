"""Token buckets: how much each caller may do, decided without a clock.

Why buckets and not windows: a caller that has been quiet may send a burst at once, and nobody can send twice as much
around the moment in which a window ends. Why bounded: callers choose their addresses, and each costs memory here; the
one that has been quiet for longest is forgotten first, and would have been full again the soonest.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import final


@final
class TokenBuckets:
    """One bucket of ``burst`` tokens for each key, filled at ``rate_per_s``."""

    def __init__(self, *, rate_per_s: float, burst: float, keys_max: int) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._keys_max = keys_max
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Tokens and when there were so many; the longest unused first."""

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: str, now: float) -> float:
        """Take a token from the bucket of ``key``: 0 when there was one, else in how many seconds there will be."""
        tokens, since = self._buckets.get(key, (self._burst, now))
        tokens = min(self._burst, tokens + max(now - since, 0.0) * self._rate_per_s)
        wait_s = 0.0 if tokens >= 1 else (1 - tokens) / self._rate_per_s
        self._buckets[key] = (tokens if wait_s else tokens - 1, now)
        self._buckets.move_to_end(key)
        if len(self._buckets) > self._keys_max:
            self._buckets.popitem(last=False)
        return wait_s
