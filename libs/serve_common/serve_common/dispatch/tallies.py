"""Counting requests without slowing them: plain numbers here, read when metrics are scraped.

Why not a metrics library's own counters: they take a lock per label set and request. And why one tally per endpoint: it
is dropped with the endpoint, so what was once deployed does not stay in the metrics for ever.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import Enum
from typing import Final, final

from serve_common.metrics_catalogue.values import SECONDS_BUCKETS
from serve_common.names import BackendTag
from serve_common.values.endpoint_options import METHODS

BUCKETS_S: Final = SECONDS_BUCKETS
"""Upper bounds of the histogram of request seconds."""
OTHER_METHOD: Final = "other"
OTHER_STATUS: Final = 0
"""In the tallies, of an answer whose status is no HTTP status at all."""
CLIENT_GONE: Final = 499
"""Status in the tallies of a request whose client went away."""

_METHODS: Final = frozenset(METHODS)


class ShadowOutcome(Enum):
    """What became of the copy of a request."""

    ANSWERED = "answered"
    """With a status below 500."""
    ERROR = "error"
    """The backend answered that it failed."""
    FAILED = "failed"
    """There was no (whole) answer in time."""
    SKIPPED = "skipped"
    """It was not sent, for a limit or because its backend was scaled to zero."""


class EndpointTally:
    """Requests of one endpoint so far."""

    __slots__ = ("bucket_counts", "counts", "seconds_sum", "shadows")

    def __init__(self) -> None:
        self.counts: dict[tuple[str, int], int] = {}
        """By method and status."""
        self.bucket_counts = [0] * (len(BUCKETS_S) + 1)
        """Not cumulative; the last one is beyond all bounds."""
        self.seconds_sum = 0.0
        self.shadows: dict[tuple[BackendTag, ShadowOutcome], int] = {}
        """Copies of requests, by the backend that they were for."""

    def add_shadow(self, backend_tag: BackendTag, outcome: ShadowOutcome) -> None:
        """Count one copy that has ended."""
        key = (backend_tag, outcome)
        self.shadows[key] = self.shadows.get(key, 0) + 1

    def add(self, method: str, status: int, seconds: float) -> None:
        """Count one request that has ended."""
        try:
            self.counts[method, status] += 1
        except KeyError:
            key = (
                method if method in _METHODS else OTHER_METHOD,
                status if 100 <= status <= 999 else OTHER_STATUS,
            )
            self.counts[key] = self.counts.get(key, 0) + 1
        self.bucket_counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.seconds_sum += seconds


@final
class NoTally(EndpointTally):
    """Counts no requests: for measuring what counting costs."""

    __slots__ = ()

    def add(self, method: str, status: int, seconds: float) -> None:
        """Does nothing."""
