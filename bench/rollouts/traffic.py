"""The requests that rollouts are compared on: what versions do, and counts of it that are cheap to make.

Why not request by request: a run has a hundred thousand of them. The number of requests in a second is Poisson, that of
failures binomial, and the others are spread over the buckets of time by a multinomial number. That is the same
distribution as that of requests which are independent of each other, at a hundredth of the cost.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from serve_common.names import BackendTag, EndpointTag
from serve_common.protocol.snapshots import EndpointSnapshot
from serve_common.protocol.subjects import endpoint_key
from serve_common.routing.request_counts import BUCKETS_MAX, get_bucket_start_s
from tests.support.control_loop.closed_loop import Loop

RATE: Final = 300.0
"""Requests per second of the deployment."""
MEDIAN_S: Final = 0.05
SPREAD: Final = 0.5
"""Standard deviation of the logarithm of the old version's times: p99 is 160 ms."""
ERRORS: Final = 0.002
"""Share of the old version's requests that fail."""
_Z_P99: Final = 2.3263478740408408
OLD_P99_S: Final = MEDIAN_S * math.exp(SPREAD * _Z_P99)


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """What a version does with its requests."""

    errors: float = ERRORS
    """Share of the requests that fail; the others take a time."""
    slow_from_z: float = math.inf
    """Times above this many standard deviations (of the logarithm) take ``slowdown`` times as long."""
    slowdown: float = 1.0


def share_within(version: Version, seconds: float) -> float:
    """Share of the times of ``version`` that are at most ``seconds``."""
    if seconds <= 0:
        return 0.0
    z = math.log(seconds / MEDIAN_S) / SPREAD
    z_slow = z - math.log(version.slowdown) / SPREAD
    return _normal(min(z, version.slow_from_z)) + max(_normal(z_slow) - _normal(version.slow_from_z), 0.0)


def _normal(z: float) -> float:
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


def share_between(version: Version, ends_s: tuple[float, ...]) -> NDArray[np.float64]:
    """Share of the times in each of the intervals up to ``ends_s``; the last one has no end."""
    within = [0.0, *(share_within(version, end) for end in ends_s), 1.0]
    return np.diff(np.array(within))


@cache
def _bucket_shares(version: Version) -> tuple[int, NDArray[np.float64]]:
    """The first bucket of `routing.request_counts` with a share worth counting, and the shares from there on."""
    starts = tuple(get_bucket_start_s(bucket) for bucket in range(1, BUCKETS_MAX + 1))
    shares = share_between(version, starts)
    used = np.flatnonzero(shares > 1e-9)
    shares = shares[used[0] : used[-1] + 1]
    return int(used[0]), shares / shares.sum()


class Traffic:
    """Clients of one deployment in the closed loop, whose requests go where its snapshots say."""

    def __init__(self, loop: Loop, tag: str, versions: dict[str, Version], rng: np.random.Generator) -> None:
        """``versions``: what each does, by its name."""
        self._loop, self._tag, self._versions, self._rng = loop, tag, versions, rng
        self.served: dict[BackendTag, int] = {}
        """Number of requests by backend."""

    def flow(self, seconds: float) -> None:
        """Requests of so many seconds, all of which end."""
        snapshot = self._loop.bucket.get(endpoint_key(EndpointTag(self._tag)))
        assert snapshot is not None
        assert isinstance(snapshot.content, EndpointSnapshot)
        for tag, weight in snapshot.content.traffic.items():
            number = int(self._rng.poisson(RATE * seconds * weight))
            self.served[tag] = self.served.get(tag, 0) + number
            backend = self._loop.checkpoint.backends[tag]
            self._count(tag, number, self._versions[backend.target.version or ""])

    def _count(self, tag: BackendTag, number: int, version: Version) -> None:
        counter = self._loop.get_counter(tag)
        failed = int(self._rng.binomial(number, version.errors))
        counter.errors += failed
        counter.successes += number - failed
        first, shares = _bucket_shares(version)
        buckets = counter._buckets
        for at, count in enumerate(self._rng.multinomial(number - failed, shares).tolist(), start=first):
            if count:
                buckets[at] = buckets.get(at, 0) + count
