"""What became of the requests of one backend, counted by a router for the judgement of rollouts.

Times are counted in buckets of equal ratio, because a comparison must see a slowdown of a half, which the buckets of
Prometheus' histograms are too wide for.
"""

from __future__ import annotations

import math
from typing import Final, final

from serve_common.names import GoalId
from serve_common.protocol.reports import RequestCounts

BUCKETS_PER_OCTAVE: Final = 8
"""A bucket is 9 % wide."""
SHORTEST_S: Final = 0.0005
BUCKETS_MAX: Final = 200
"""The last one begins at some four hours."""
_INVERSE: Final = 1 / SHORTEST_S


def get_bucket(seconds: float) -> int:
    """The bucket of a time: bucket ``n`` begins at ``SHORTEST_S * 2 ** (n / BUCKETS_PER_OCTAVE)`` seconds."""
    ratio = seconds * _INVERSE
    return min(int(math.log2(ratio) * BUCKETS_PER_OCTAVE), BUCKETS_MAX) if ratio > 1 else 0


def get_bucket_start_s(bucket: int) -> float:
    """Seconds at which a bucket begins."""
    return float(SHORTEST_S * 2 ** (bucket / BUCKETS_PER_OCTAVE))


@final
class RequestCounter:
    """Running counts of one backend in this process, for one rollout."""

    __slots__ = ("_buckets", "client_errors", "compared", "different", "errors", "rollout_id", "successes")

    def __init__(self, rollout_id: GoalId) -> None:
        self.rollout_id = rollout_id
        self.successes = 0
        self.client_errors = 0
        self.errors = 0
        self.compared = 0
        """Responses to copies that were compared; maintained by `dispatch.response_comparisons`."""
        self.different = 0
        self._buckets: dict[int, int] = {}

    def add(self, status: int, seconds: float | None) -> None:
        """Count a request that was answered with ``status`` after so long; 0 for one without a (whole) response.

        ``seconds`` None: the time says nothing, as that of a WebSocket.
        """
        if not 0 < status < 500:
            self.errors += 1
            return
        if status < 400:
            self.successes += 1
        else:
            self.client_errors += 1
        if seconds is not None:
            self.add_time(seconds)

    def add_time(self, seconds: float) -> None:
        """Count a time only, such as that after which a client left."""
        bucket = get_bucket(seconds)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    def report(self) -> RequestCounts:
        """The counts as they are reported."""
        return RequestCounts(
            rollout_id=self.rollout_id,
            successes=self.successes,
            client_errors=self.client_errors,
            errors=self.errors,
            times=dict(self._buckets),
            compared=self.compared,
            different=self.different,
        )


def renewed_counter(known: RequestCounter | None, rollout_id: GoalId) -> RequestCounter | None:
    """The counter for a rollout: ``known``, or a new one for another rollout; None for none (an empty id).

    Requests that began before keep the former counter, which nobody reports any more.
    """
    if not rollout_id:
        return None
    is_same = known is not None and known.rollout_id == rollout_id
    return known if is_same else RequestCounter(rollout_id)
