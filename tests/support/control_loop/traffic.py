"""Requests that reach the closed loop's backends as its snapshots say, and what becomes of them."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

from serve_common.names import BackendTag, EndpointTag
from serve_common.protocol.snapshots import EndpointSnapshot
from serve_common.protocol.subjects import endpoint_key
from tests.support.control_loop.closed_loop import Loop

Behaviour = Callable[[random.Random], tuple[int, float]]
"""Status and seconds of one request."""


def model(
    *,
    errors: float = 0.002,
    refusals: float = 0.0,
    median_s: float = 0.05,
    spread: float = 0.5,
    slow_from: float = 1.0,
    slowdown: float = 1.0,
) -> Behaviour:
    """A model whose times are log-normal; those above the quantile ``slow_from`` take ``slowdown`` times as long."""
    slow_from_s = math.inf if slow_from >= 1 else median_s * math.exp(spread * _normal_quantile(slow_from))

    def behave(dice: random.Random) -> tuple[int, float]:
        drawn, seconds = dice.random(), dice.lognormvariate(math.log(median_s), spread)
        if seconds > slow_from_s:
            seconds *= slowdown
        return (500 if drawn < errors else 400 if drawn < errors + refusals else 200), seconds

    return behave


def _normal_quantile(share: float) -> float:
    low, high = -8.0, 8.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 0.5 * (1 + math.erf(middle / math.sqrt(2))) < share else (low, middle)
    return low


class Traffic:
    """Clients of one deployment."""

    def __init__(
        self, loop: Loop, tag: str, old: Behaviour, new: Behaviour, *, rate: float, seed: int
    ) -> None:
        """``old`` and ``new`` are what versions do, ``rate`` is in requests per second."""
        self._loop, self._tag = loop, BackendTag(tag)
        self._old, self._new, self._rate = old, new, rate
        self._dice = random.Random(seed)
        self.served: Counter[BackendTag] = Counter()
        """Requests by backend, copies apart."""
        self.failed: Counter[BackendTag] = Counter()
        self.copied: Counter[BackendTag] = Counter()
        self.differing: dict[BackendTag, float] = {}
        """By shadow, the share of its responses that differ; empty compares nothing."""

    def flow(self, seconds: float) -> None:
        """Requests of so many seconds, all of which end."""
        snapshot = self._loop.bucket.get(endpoint_key(EndpointTag(self._tag)))
        content = None if snapshot is None else snapshot.content
        if not isinstance(content, EndpointSnapshot):
            return
        count = round(self._rate * seconds)
        for tag, weight in content.traffic.items():
            number = self._drawn(count * weight)
            self.served[tag] += number
            self.failed[tag] += self._end(tag, number)
        for tag, share in content.shadows.items():
            number = self._drawn(count * share)
            self.copied[tag] += number
            self._end(tag, number)
        if self.differing:
            self._compare(self._drawn(count * min(content.shadows.values(), default=0.0)))

    def _compare(self, number: int) -> None:
        for tag, share in self.differing.items():
            counts = self._loop.get_counter(tag)
            counts.compared += number
            counts.different += sum(self._dice.random() < share for _ in range(number))

    def _drawn(self, mean: float) -> int:
        """A number of requests about ``mean``; a Poisson number by its normal approximation where it is large."""
        if mean > 50:
            return max(0, round(self._dice.gauss(mean, math.sqrt(mean))))
        limit, product, number = math.exp(-mean), self._dice.random(), 0
        while product > limit:
            product *= self._dice.random()
            number += 1
        return number

    def _end(self, tag: BackendTag, number: int) -> int:
        counts = self._loop.get_counter(tag)
        behave = self._new if self._runs_new(tag) else self._old
        failed = 0
        for _ in range(number):
            status, seconds = behave(self._dice)
            counts.add(status, seconds)
            failed += status >= 500
        return failed

    def _runs_new(self, tag: BackendTag) -> bool:
        backend = self._loop.checkpoint.backends.get(tag)
        return backend is not None and backend.target.version == "v2"
