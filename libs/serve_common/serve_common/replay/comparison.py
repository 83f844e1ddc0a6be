"""Whether a new version differs from the old one: each request goes to the old, to the old again, and to the new.

The three-way comparison is that of Diffy (Twitter, 2015): what differs between two responses of the old version is
noise, such as ids and timestamps. Diffy compares rates by rule of thumb. Here counts decide, by an exact test:

If the versions are equal, then of one request the second old response and the new one may be exchanged without anyone
noticing. So of the requests in which exactly one of them differs from the first response, at some path, either is the
one with probability 1/2: a sign test on what differs only once. The evidence is an e-process: the likelihood of
alternatives, in which it is the new one more often, divided by that of 1/2. At every moment its mean is at most 1 if
the versions are equal, so that the probability that it *ever* exceeds 1/p is at most p (Ville's inequality), however
often it is looked at, and whichever requests are sent again because of what was seen so far.

There are many paths, and they are not known before. The k-th path that differs gets the share 1/(k(k+1)) of the
probability of a false alarm, and its evidence starts with the requests after the one that brought it up: the shares
sum to 1, so the probability that an equal version is accused of anything stays below `FALSE_ALARM_PROBABILITY`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum
from typing import Final, final

import msgspec

from serve_common.replay.differences import (
    DifferenceKey,
    DifferenceKind,
    Differences,
    Example,
    ReplayedResponse,
    ResponseComparator,
    build_example,
)

FALSE_ALARM_PROBABILITY: Final = 0.001
"""Probability, at most, that a version that does not differ is accused of any difference."""
PATHS_MAX: Final = 5_000
"""Paths that are counted one by one; differences at further ones count together."""
_OTHERS: Final = DifferenceKey("(all other paths)", DifferenceKind.VALUE)
_ALTERNATIVES: Final = ((0.999, 0.5), (0.95, 0.125), (0.8, 0.125), (0.65, 0.125), (0.55, 0.125))
"""Probabilities that it is the new version where only one differs, with their weights. The first is a path without
noise, the most frequent case."""
_LOGS: Final = tuple((math.log(w), math.log(2 * p), math.log(2 * (1 - p))) for p, w in _ALTERNATIVES)


class PathStatus(Enum):
    """What the counts say about a path."""

    DIFFERENT = "different"
    """The new version differs."""
    NOISE = "noise"
    """The old version differs from itself as well."""
    UNKNOWN = "unknown"
    """Only the new version differs, in too few requests to tell."""


class PathResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was found at one path."""

    path: str
    kind: DifferenceKind
    status: PathStatus
    differing: int
    """Requests in which the new version's response differs from the old one's."""
    noisy: int
    """Requests in which the old version's second response differs from its first."""
    only_new: int
    """Comparisons, repeated ones included, in which the new response alone differs from the old one."""
    only_old: int
    """Comparisons in which the old version's second response alone does."""
    requests_needed: int | None
    """About how many more comparisons in which only the new version differs would show that it does; None where the
    status is no longer open."""
    request_id: str
    """A request that shows it."""
    example: Example


class ComparisonResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay found."""

    status: PathStatus | None
    """The worst of all paths; None when nothing but noise was found."""
    requests: int
    """Requests that were compared."""
    repeats: int
    """Comparisons of requests that were sent again, because only the new version had differed."""
    share_max: float
    """Largest share of requests for which a difference that is always there could have gone unseen, but for a
    probability of `FALSE_ALARM_PROBABILITY`."""
    paths: list[PathResult]
    """Every path with a difference, the worst first."""


@final
class _PathCounts:
    """Counts of one path, and the evidence against it."""

    __slots__ = (
        "differing",
        "example",
        "is_different",
        "noisy",
        "only_new",
        "only_old",
        "request_id",
        "threshold",
    )

    def __init__(self, number: int) -> None:
        """``number`` counts the paths that differed, from 1."""
        self.differing = self.noisy = 0
        self.only_new = self.only_old = 0
        self.threshold = math.log(number * (number + 1) / FALSE_ALARM_PROBABILITY)
        self.is_different = False
        self.request_id = ""
        self.example = Example("", "")

    def log_evidence(self) -> float:
        """Natural logarithm of the evidence: the weighted mean over the alternatives."""
        logs = [weight + self.only_new * new + self.only_old * old for weight, new, old in _LOGS]
        highest = max(logs)
        return highest + math.log(math.fsum(math.exp(log - highest) for log in logs))

    def add(self, *, only_new: bool) -> None:
        """Count a comparison in which one of both differs."""
        if only_new:
            self.only_new += 1
        else:
            self.only_old += 1
        if self.log_evidence() >= self.threshold:
            self.is_different = True  # for good: the evidence has exceeded it once

    @property
    def is_open(self) -> bool:
        """Whether more comparisons are likely to show a difference: where there is noise, evidence must lead."""
        is_noisy = self.noisy > 0 or self.only_old > 0
        return not self.is_different and (not is_noisy or self.log_evidence() > 0)

    def status(self) -> PathStatus:
        """What the counts say."""
        if self.is_different:
            return PathStatus.DIFFERENT
        is_leaning = self.differing > self.noisy and (not self.noisy or self.log_evidence() > 0)
        return PathStatus.UNKNOWN if is_leaning else PathStatus.NOISE

    def requests_needed(self) -> int:
        """Comparisons in which only the new version differs that would exceed the threshold, should no others come."""
        missing = self.threshold - self.log_evidence()
        return max(1, math.ceil(missing / max(new for _, new, _ in _LOGS)))


@final
class Comparison:
    """Counts the differences of replayed requests, and decides by path."""

    def __init__(self, comparator: ResponseComparator) -> None:
        self._comparator = comparator
        self._paths: dict[DifferenceKey, _PathCounts] = {}
        self._requests = self._repeats = 0

    def add(
        self,
        request_id: str,
        old: ReplayedResponse,
        again: ReplayedResponse,
        new: ReplayedResponse,
        *,
        is_repeat: bool = False,
    ) -> frozenset[DifferenceKey]:
        """Count one comparison; ``is_repeat`` for a request that was compared before, with the same ``old``.

        Returns the paths at which only the new response differs. Which of ``again`` and ``new`` is fetched first must
        be drawn at random each time.
        """
        noise, found = self._comparator.compare(old, again), self._comparator.compare(old, new)
        if is_repeat:
            self._repeats += 1
        else:
            self._requests += 1
        # In an order that does not depend on which of the two responses differs.
        for key in sorted({*noise, *found}, key=lambda key: (key.path, key.kind.value)):
            self._count(key, request_id, noise, found, is_repeat=is_repeat)
        return frozenset(found.keys() - noise.keys())

    def _count(
        self,
        key: DifferenceKey,
        request_id: str,
        noise: Differences,
        found: Differences,
        *,
        is_repeat: bool,
    ) -> None:
        in_noise, in_found = key in noise, key in found
        counted = key if key in self._paths or len(self._paths) < PATHS_MAX else _OTHERS
        counts = self._paths.get(counted)
        if counts is None:
            # This comparison brought the path up, so it is no evidence.
            counts = self._paths[counted] = _PathCounts(len(self._paths) + 1)
        elif in_noise != in_found:
            counts.add(only_new=in_found)
        if not is_repeat:
            counts.differing += in_found
            counts.noisy += in_noise
        if in_found and (not counts.request_id or not in_noise):
            counts.request_id, counts.example = request_id, build_example(found[key])

    def is_worth_repeating(self, keys: Iterable[DifferenceKey]) -> bool:
        """Whether another comparison of the same request could decide about one of these paths."""
        return any((counts := self._paths.get(key)) is not None and counts.is_open for key in keys)

    def result(self) -> ComparisonResult:
        """What was found so far."""
        paths = [
            PathResult(
                path=key.path,
                kind=key.kind,
                status=(status := counts.status()),
                differing=counts.differing,
                noisy=counts.noisy,
                only_new=counts.only_new,
                only_old=counts.only_old,
                requests_needed=counts.requests_needed() if status is PathStatus.UNKNOWN else None,
                request_id=counts.request_id,
                example=counts.example,
            )
            for key, counts in self._paths.items()
        ]
        order = [PathStatus.DIFFERENT, PathStatus.UNKNOWN, PathStatus.NOISE]
        paths.sort(key=lambda one: (order.index(one.status), -one.differing, one.path, one.kind.value))
        worst = paths[0].status if paths else None
        return ComparisonResult(
            status=None if worst is PathStatus.NOISE else worst,
            requests=self._requests,
            repeats=self._repeats,
            share_max=1 - FALSE_ALARM_PROBABILITY ** (1 / self._requests) if self._requests else 1.0,
            paths=paths,
        )
