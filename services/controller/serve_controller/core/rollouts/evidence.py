"""Evidence from counts that a canary is worse than its baseline, or that it is fine.

Requests of both fail (or are slow) each with some probability. A *block* counts those that ended within some time. The
evidence against a hypothesis is an e-process: at every moment its mean is at most 1 while the hypothesis holds, so the
probability that it *ever* exceeds 1/p is at most p (Ville's inequality), however often one looks and whenever one
stops. It is that of Turner, Ly and Grünwald, "Generic E-variables for exact sequential k-sample tests that allow for
optional stopping" (2021), and for hypotheses with a margin of Turner and Grünwald, "Exact anytime-valid confidence
intervals for contingency tables and beyond" (2022): the likelihood of an alternative divided by that of the point of
the hypothesis that is nearest to it. Alternatives are a fixed grid with weights, whose mean is an e-process too.

Why that the ratio is right: its expectation in one block is A(u)^n · B(v)^m with A and B linear in the true rates u and
v, its logarithm is concave, and at the nearest point of the hypothesis it is 0 with no ascent into the hypothesis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

_RATES: Final = (0.0005, 0.003, 0.01, 0.03, 0.1, 0.3, 0.6)
"""Rates of the baseline in the alternatives."""
_INCREASES: Final = (0.01, 0.03, 0.1, 0.3)
"""By how much the canary's rate is higher where it is worse."""
_RATIOS: Final = (0.05, 0.3, 0.6, 1.0)
"""The canary's rate as a share of the baseline's where it is fine."""
_ALL: Final = 0.99
"""The canary's rate where it always fails."""
_WEIGHT_OF_ALL: Final = 0.25
"""Weight of the alternatives that it always fails: that is the most frequent fault, and to be found first."""
_RATE_MIN: Final = 1e-6
_ITERATIONS_MAX: Final = 60
_PRECISION: Final = 1e-12
"""Relative precision of the nearest point."""


class Side(Enum):
    """What the hypothesis says, and so what speaks against it."""

    WORSE = "worse"
    """Hypothesis: the canary's rate is at most the baseline's, and a margin. Evidence says that it is worse."""
    FINE = "fine"
    """Hypothesis: the canary's rate is at least the baseline's, and a margin. Evidence says that it is fine."""


class RequestBlock(msgspec.Struct, frozen=True, array_like=True):
    """Requests of both versions, and how many of them were bad."""

    canary: int = 0
    canary_bad: int = 0
    baseline: int = 0
    baseline_bad: int = 0

    def plus(self, other: RequestBlock) -> RequestBlock:
        """The sum of two blocks."""
        return RequestBlock(
            self.canary + other.canary,
            self.canary_bad + other.canary_bad,
            self.baseline + other.baseline,
            self.baseline_bad + other.baseline_bad,
        )

    @property
    def has_both(self) -> bool:
        """Whether both versions have requests: without either there is nothing to compare."""
        return self.canary > 0 and self.baseline > 0


class _Alternative(NamedTuple):
    canary: float
    baseline: float
    weight: float


def _worse() -> tuple[_Alternative, ...]:
    pairs = [(rate + more, rate) for rate in _RATES for more in _INCREASES if rate + more < _ALL]
    share, share_of_all = (1 - _WEIGHT_OF_ALL) / len(pairs), _WEIGHT_OF_ALL / len(_RATES)
    return (
        *(_Alternative(canary, baseline, share) for canary, baseline in pairs),
        *(_Alternative(_ALL, baseline, share_of_all) for baseline in _RATES),
    )


def _fine() -> tuple[_Alternative, ...]:
    pairs = [(max(rate * ratio, _RATE_MIN), rate) for rate in _RATES for ratio in _RATIOS]
    return tuple(_Alternative(canary, baseline, 1 / len(pairs)) for canary, baseline in pairs)


_ALTERNATIVES: Final = {Side.WORSE: _worse(), Side.FINE: _fine()}
_WEIGHTS: Final = {
    side: tuple(alternative.weight for alternative in alternatives)
    for side, alternatives in _ALTERNATIVES.items()
}


def no_evidence(side: Side) -> tuple[float, ...]:
    """The logarithms of the evidence for each alternative before the first block."""
    return (0.0,) * len(_ALTERNATIVES[side])


def with_block(
    logs: Sequence[float], side: Side, block: RequestBlock, margin: float, gain_max: float = math.inf
) -> tuple[float, ...]:
    """The evidence after one more block, which must be telling.

    Valid as long as nobody decides where a block ends by what is in it. No block adds more than ``gain_max`` (a
    logarithm): the requests of a replica that stands still for a moment are slow together, and are no independent
    trials. A ratio that is cut is smaller, so its mean stays at most 1.
    """
    divisor = math.gcd(block.canary, block.baseline)
    ratios = _log_ratios(side, margin, block.canary // divisor, block.baseline // divisor)
    bad, baseline_bad = block.canary_bad, block.baseline_bad
    good, baseline_good = block.canary - bad, block.baseline - baseline_bad
    # Each judgement comes through here some 200 times: a list from unpacked tuples takes half of the time.
    gains = [
        bad * of_bad + good * of_good + baseline_bad * of_baseline_bad + baseline_good * of_baseline_good
        for of_bad, of_good, of_baseline_bad, of_baseline_good in ratios
    ]
    return tuple([log + (min(gain_max, gain)) for log, gain in zip(logs, gains, strict=True)])


def log_evidence(logs: Sequence[float], side: Side) -> float:
    """Natural logarithm of the evidence: of the weighted mean over the alternatives."""
    highest, exp = max(logs), math.exp
    return highest + math.log(
        math.fsum([weight * exp(log - highest) for weight, log in zip(_WEIGHTS[side], logs, strict=True)])
    )


def requests_to_go(
    logs: Sequence[float], side: Side, seen: RequestBlock, margin: float, threshold: float
) -> int | None:
    """About how many more requests of the canary the evidence needs to reach ``threshold`` (a logarithm).

    Supposes that both go on as they were ``seen``. None where it would never: the rates do not say so.
    """
    missing = threshold - log_evidence(logs, side)
    if missing <= 0:
        return 0
    # A rate of exactly 0 or 1 after few requests is no estimate: half a request is added to each side.
    canary = (seen.canary_bad + 0.5) / (seen.canary + 1) if seen.canary_bad else 0.0
    baseline = (seen.baseline_bad + 0.5) / (seen.baseline + 1) if seen.baseline_bad else 0.0
    ratio = seen.baseline / seen.canary if seen.has_both else 1.0
    best: float | None = None
    for log, alternative in zip(logs, _ALTERNATIVES[side], strict=True):
        each = _log_ratio(alternative, side, margin, 1.0, ratio)
        growth = canary * each.canary_bad + (1 - canary) * each.canary_good
        growth += ratio * (baseline * each.baseline_bad + (1 - baseline) * each.baseline_good)
        if growth > 1e-9:
            needed = (threshold - log - math.log(alternative.weight)) / growth
            best = needed if best is None else min(best, needed)
    return None if best is None else max(1, math.ceil(best))


class _LogRatio(NamedTuple):
    """Logarithm of an alternative's likelihood by that of the nearest point of the hypothesis, for each request."""

    canary_bad: float
    canary_good: float
    baseline_bad: float
    baseline_good: float


_NO_LOG_RATIO: Final = _LogRatio(0.0, 0.0, 0.0, 0.0)


@lru_cache(4096)
def _log_ratios(side: Side, margin: float, canary: int, baseline: int) -> tuple[_LogRatio, ...]:
    """For each alternative, in a block with ``canary`` to ``baseline`` requests."""
    return tuple(
        _log_ratio(alternative, side, margin, canary, baseline) for alternative in _ALTERNATIVES[side]
    )


def _log_ratio(
    alternative: _Alternative, side: Side, margin: float, canary: float, baseline: float
) -> _LogRatio:
    near = _nearest(alternative, side, canary, baseline, margin)
    if near is None:
        return _NO_LOG_RATIO
    canary_null, baseline_null = near
    return _LogRatio(
        math.log(alternative.canary / canary_null),
        math.log((1 - alternative.canary) / (1 - canary_null)),
        math.log(alternative.baseline / baseline_null),
        math.log((1 - alternative.baseline) / (1 - baseline_null)),
    )


def _nearest(
    alternative: _Alternative, side: Side, canary: float, baseline: float, margin: float
) -> tuple[float, float] | None:
    """Rates of canary and baseline in the hypothesis that are nearest to ``alternative``; None if it is in there.

    Nearest by Kullback-Leibler divergence, weighted by the numbers of requests: where its derivative along the border
    of the hypothesis is 0.
    """
    excess = alternative.canary - alternative.baseline - margin
    if excess <= 0 if side is Side.WORSE else excess >= 0:
        return None
    if margin == 0:
        rate = (canary * alternative.canary + baseline * alternative.baseline) / (canary + baseline)
        return rate, rate
    ends = (alternative.baseline, alternative.canary - margin)
    low, high = max(min(ends), 1e-12), min(max(ends), 1 - margin - 1e-12)
    # Multiplied by both variances the derivative is a cubic: Newton's method, and a bisection where that leaves the
    # interval that the root is in.
    rate = (low + high) / 2
    for _ in range(_ITERATIONS_MAX):
        moved = rate + margin
        variance, moved_variance = rate * (1 - rate), moved * (1 - moved)
        above_canary, above_baseline = moved - alternative.canary, rate - alternative.baseline
        slope = canary * above_canary * variance + baseline * above_baseline * moved_variance
        bend = canary * (variance + above_canary * (1 - 2 * rate))
        bend += baseline * (moved_variance + above_baseline * (1 - 2 * moved))
        low, high = (low, rate) if slope > 0 else (rate, high)
        step = slope / bend if bend else high
        if abs(step) <= _PRECISION * rate or high - low <= _PRECISION * rate:
            break
        rate = rate - step if low < rate - step < high else (low + high) / 2
    return rate + margin, rate
