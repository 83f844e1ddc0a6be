"""Evidence of rollouts: it misleads as rarely as it promises, and it finds what is clear."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from serve_common.config.rollout import RolloutConfig
from serve_common.protocol.reports import RequestCounts
from serve_controller.core.rollouts.evidence import (
    _ALTERNATIVES,
    RequestBlock,
    Side,
    _Alternative,
    _nearest,
    log_evidence,
    no_evidence,
    with_block,
)
from serve_controller.core.rollouts.judge import new_gates, with_counts

SEED = 20_261_127
SIZES = ((15, 15), (7, 9), (40, 38), (3, 60), (25, 4))
"""Requests of canary and baseline in blocks that follow each other."""
HYPOTHESES = [
    # Side, canary's rate, baseline's rate, margin: on the border of the hypothesis, and within it.
    (Side.WORSE, 0.002, 0.002, 0.0),
    (Side.WORSE, 0.05, 0.05, 0.0),
    (Side.WORSE, 0.5, 0.5, 0.0),
    (Side.WORSE, 0.01, 0.1, 0.0),
    (Side.WORSE, 0.06, 0.05, 0.01),
    (Side.FINE, 0.012, 0.002, 0.01),
    (Side.FINE, 0.07, 0.05, 0.02),
    (Side.FINE, 0.05, 0.05, 0.0),
    (Side.FINE, 0.3, 0.05, 0.01),
    (Side.FINE, 1.0, 0.002, 0.01),
]


def simulate(
    rng: np.random.Generator, side: Side, rates: tuple[float, float], margin: float, blocks: int
) -> Iterator[float]:
    """Logarithm of the evidence after each of so many blocks in which ``rates`` are canary's and baseline's."""
    logs = no_evidence(side)
    for at in range(blocks):
        canary, baseline = SIZES[at % len(SIZES)]
        bad = int(rng.binomial(canary, rates[0])), int(rng.binomial(baseline, rates[1]))
        logs = with_block(logs, side, RequestBlock(canary, bad[0], baseline, bad[1]), margin)
        yield log_evidence(logs, side)


def make_rng(*more: int) -> np.random.Generator:
    print(f"seed {SEED}, {more}")
    return np.random.default_rng([SEED, *more])


def probability(number: int, bad: int, rate: float) -> float:
    """Probability of exactly ``bad`` of ``number`` requests."""
    return math.comb(number, bad) * rate**bad * (1 - rate) ** (number - bad)


@pytest.mark.parametrize(("side", "canary", "baseline", "margin"), HYPOTHESES)
@pytest.mark.parametrize(("canary_size", "baseline_size"), [(1, 1), (9, 9), (3, 20), (20, 3)])
@pytest.mark.parametrize("gain_max", [0.3, math.inf])
def test_its_mean_after_a_block_is_at_most_1_while_the_hypothesis_holds(
    side: Side,
    canary: float,
    baseline: float,
    margin: float,
    canary_size: int,
    baseline_size: int,
    gain_max: float,
) -> None:
    mean = 0.0
    for canary_bad in range(canary_size + 1):
        for baseline_bad in range(baseline_size + 1):
            block = RequestBlock(canary_size, canary_bad, baseline_size, baseline_bad)
            logs = with_block(no_evidence(side), side, block, margin, gain_max)
            evidence = math.exp(log_evidence(logs, side))
            assert evidence <= math.exp(gain_max) + 1e-9
            mean += (
                evidence
                * probability(canary_size, canary_bad, canary)
                * probability(baseline_size, baseline_bad, baseline)
            )
    assert mean <= 1 + 1e-9


@pytest.mark.parametrize(("side", "canary", "baseline", "margin"), HYPOTHESES)
def test_over_many_blocks_it_stays_small_while_the_hypothesis_holds(
    side: Side, canary: float, baseline: float, margin: float
) -> None:
    rng, runs = make_rng(HYPOTHESES.index((side, canary, baseline, margin))), 250
    ends, highest = [], []
    for _ in range(runs):
        logs = list(simulate(rng, side, (canary, baseline), margin, blocks=20))
        ends.append(math.exp(logs[-1]))
        highest.append(max(logs))
    assert np.mean(ends) <= 1 + 4 * np.std(ends) / math.sqrt(runs)
    for p in (0.02, 0.05, 0.2):
        ever = np.mean([log >= -math.log(p) for log in highest])
        assert ever <= p + 4 * math.sqrt(p * (1 - p) / runs), f"p = {p}"


@pytest.mark.parametrize(
    ("side", "canary", "baseline", "margin", "blocks"),
    [
        (Side.WORSE, 1.0, 0.002, 0.0, 1),
        (Side.WORSE, 0.102, 0.002, 0.0, 40),
        (Side.WORSE, 0.05, 0.002, 0.0, 80),
        (Side.WORSE, 0.5, 0.3, 0.0, 40),
        (Side.FINE, 0.002, 0.002, 0.01, 120),
        (Side.FINE, 0.0, 0.0, 0.01, 60),
        (Side.FINE, 0.02, 0.2, 0.0, 30),
    ],
)
def test_it_shows_clear_differences_soon(
    side: Side, canary: float, baseline: float, margin: float, blocks: int
) -> None:
    rng, runs = make_rng(blocks), 60
    threshold = -math.log(0.05 if side is Side.FINE else 0.001)
    found = sum(
        any(log >= threshold for log in simulate(rng, side, (canary, baseline), margin, blocks))
        for _ in range(runs)
    )
    assert found >= 0.95 * runs


@pytest.mark.parametrize("is_canary_first", [True, False])
def test_a_block_without_both_versions_waits_for_the_other(is_canary_first: bool) -> None:
    config, nothing = RolloutConfig(), RequestCounts()
    one, other = RequestCounts(successes=9, errors=1), RequestCounts(successes=20)
    gate = with_counts(new_gates(), config, nothing, nothing)[0]
    assert gate == new_gates()[0]
    pair = (one, nothing) if is_canary_first else (nothing, other)
    waiting = with_counts(with_counts(new_gates(), config, *pair), config, *pair)
    for test in (waiting[0].worse, waiting[0].fine):
        assert test.logs == no_evidence(test.side)
        assert test.seen == RequestBlock()
        assert test.pending == (RequestBlock(20, 2, 0, 0) if is_canary_first else RequestBlock(0, 0, 40, 0))
    complete = with_counts(waiting, config, *((nothing, other) if is_canary_first else (one, nothing)))
    block = RequestBlock(20, 2, 20, 0) if is_canary_first else RequestBlock(10, 1, 40, 0)
    for test, margin in ((complete[0].worse, 0.0), (complete[0].fine, config.max_error_increase)):
        assert test.pending == RequestBlock()
        assert test.seen == block
        assert test.logs == with_block(no_evidence(test.side), test.side, block, margin)


Rates = NDArray[np.float64]


def divergence(
    alternative: _Alternative, canary: Rates, baseline: Rates, sizes: tuple[float, float]
) -> Rates:
    """Kullback-Leibler divergence of ``alternative`` from these rates, weighted by the numbers of requests."""

    def of_one(rate: float, null: Rates) -> Rates:
        return rate * np.log(rate / null) + (1 - rate) * np.log((1 - rate) / (1 - null))

    return sizes[0] * of_one(alternative.canary, canary) + sizes[1] * of_one(alternative.baseline, baseline)


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("margin", [0.0, 0.0001, 0.01, 0.02, 0.3])
@pytest.mark.parametrize("sizes", [(1, 1), (75, 80), (1000, 3), (0.2, 50)])
def test_the_nearest_point_has_the_least_divergence_along_the_border(
    side: Side, margin: float, sizes: tuple[float, float]
) -> None:
    grid = np.concatenate([np.logspace(-9, -2, 1000), np.linspace(0.01, 1 - margin - 1e-6, 1000)])
    for alternative in _ALTERNATIVES[side]:
        near = _nearest(alternative, side, *sizes, margin)
        excess = alternative.canary - alternative.baseline - margin
        assert (near is None) == (excess <= 0 if side is Side.WORSE else excess >= 0)
        if near is None:
            continue
        canary, baseline = near
        assert canary - baseline == pytest.approx(margin, abs=1e-12)
        # The derivative changes its sign there.
        step = 1e-4 * min(baseline, 1 - canary)
        moves = np.array([0.0, -step, step])
        least, before, after = divergence(alternative, canary + moves, baseline + moves, sizes)
        assert least <= divergence(alternative, grid + margin, grid, sizes).min() + 1e-12
        slope, bend = (after - before) / (2 * step), (after + before - 2 * least) / step**2
        assert abs(slope) <= 0.01 * bend * min(baseline, 1 - canary) + 1e-6
