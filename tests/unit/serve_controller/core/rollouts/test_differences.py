"""Differing responses as a gate: in shadow steps, where a limit is set, with a margin on both sides."""

from __future__ import annotations

import math
import random

import pytest

from serve_common.api.commands import RolloutAction
from serve_common.api.queries import GetRollouts
from serve_common.config.rollout import RolloutConfig, check_rollout_config, parse_steps
from serve_common.errors import BadField
from serve_common.names import BackendTag, EndpointTag
from serve_common.protocol.reports import RequestCounts
from serve_common.protocol.snapshots import EndpointSnapshot, ShadowComparison
from serve_common.protocol.subjects import endpoint_key
from serve_controller.core.rollouts.evidence import RequestBlock, Side, no_evidence, with_block
from serve_controller.core.rollouts.judge import (
    Gate,
    GateKind,
    GateStatus,
    _share,
    difference,
    new_gates,
    requests_needed,
    results,
    total,
    with_counts,
)
from serve_controller.core.rollouts.record import RolloutOutcome, RolloutState
from serve_controller.core.views.rollouts import view_rollouts
from tests.support.control_loop.rollout_world import BASELINE, CANARY, TAG, RolloutWorld
from tests.support.control_loop.traffic import model

CONFIG = RolloutConfig(steps=("shadow 50%", "50%", "100%"), max_difference_increase=0.02)
SHADOW, SPLIT, _ = parse_steps(CONFIG.steps)
ALPHA = CONFIG.false_abort_probability


def judged(canary: float, baseline: float, *, requests: int, seed: int = 1, config=CONFIG) -> Gate:
    """The gate after requests of which such shares differ, judged ten by ten."""
    rng = random.Random(seed)
    gates = new_gates(config, SHADOW)
    for _ in range(requests // 10):
        old = RequestCounts(compared=10, different=sum(rng.random() < baseline for _ in range(10)))
        new = RequestCounts(compared=10, different=sum(rng.random() < canary for _ in range(10)))
        gates = with_counts(gates, config, new, old)
    [gate] = [gate for gate in gates if gate.kind is GateKind.DIFFERENCES]
    return gate


def result(gate: Gate, config=CONFIG):
    return results((gate,), config, ALPHA)[0]


def test_it_exists_in_shadow_steps_with_a_limit_only() -> None:
    with_limit = {gate.kind for gate in new_gates(CONFIG, SHADOW)}
    assert with_limit == set(GateKind)
    for gates in (
        new_gates(),
        new_gates(RolloutConfig(steps=CONFIG.steps), SHADOW),
        new_gates(CONFIG, SPLIT),
    ):
        assert {gate.kind for gate in gates} == with_limit - {GateKind.DIFFERENCES}


def test_it_fails_once_more_differ_than_the_limit_allows() -> None:
    found = result(judged(0.1, 0.0, requests=400))
    assert found.status is GateStatus.FAILED
    assert found.text == "33 of 400 (8.25%) answers differ; baseline: 0 of 400 (0.00%)"


def test_it_passes_once_they_have_been_shown_to_be_fewer() -> None:
    assert result(judged(0.0, 0.0, requests=1_000)).status is GateStatus.PASSED
    assert result(judged(0.001, 0.001, requests=2_000)).status is GateStatus.PASSED
    assert result(judged(0.1, 0.1, requests=20_000)).status is GateStatus.PASSED, "noise is of both"


def test_what_differs_less_than_the_limit_is_no_reason_to_abort() -> None:
    found = [result(judged(0.02, 0.0, requests=3_000, seed=seed)).status for seed in range(40)]
    assert GateStatus.FAILED not in found
    assert found.count(GateStatus.PASSED) <= 4, "and one at the limit is not fine"


def test_it_says_what_is_missing() -> None:
    gate = judged(0.0, 0.0, requests=0)
    assert result(gate).status is GateStatus.UNKNOWN
    assert result(gate).text == "no answers were compared yet"
    more = requests_needed(judged(0.0, 0.0, requests=100), CONFIG, ALPHA)
    assert more is not None
    assert result(judged(0.0, 0.0, requests=100 + more + 10)).status is GateStatus.PASSED


def test_the_shares_of_all_gates_add_up_to_no_more_than_the_probability_of_a_false_abort() -> None:
    for config in (CONFIG, RolloutConfig()):
        kinds = [gate.kind for gate in new_gates(config, SHADOW)]
        assert sum(_share(kind, config) for kind in kinds) == pytest.approx(1.0)


def test_counts_are_summed_and_subtracted_like_the_others() -> None:
    one, other = RequestCounts(compared=5, different=1), RequestCounts(compared=7, different=2)
    assert total([one, other]) == RequestCounts(compared=12, different=3)
    assert difference(other, one) == RequestCounts(compared=2, different=1)
    assert difference(one, other) is None


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (RolloutConfig(steps=CONFIG.steps, max_difference_increase=0.0), "max_difference_increase"),
        (RolloutConfig(steps=CONFIG.steps, max_difference_increase=0.6), "max_difference_increase"),
        (RolloutConfig(max_difference_increase=0.02), "shadow step"),
        (RolloutConfig(ignored_paths=("$.a", "confidence")), r"rollout\.ignored_paths\[1\]"),
        (RolloutConfig(ignored_paths=("$.a",) * 51), r"rollout\.ignored_paths: has 51"),
        (RolloutConfig(difference_tolerance=-1.0), "difference_tolerance"),
    ],
)
def test_a_limit_that_judges_nothing_is_refused(config: RolloutConfig, field: str) -> None:
    with pytest.raises(BadField, match=field):
        check_rollout_config(config)
    check_rollout_config(CONFIG)


@pytest.mark.parametrize(
    ("share", "outcome"), [(0.2, RolloutOutcome.ABORTED), (0.0, RolloutOutcome.PROMOTED)]
)
def test_a_rollout_goes_by_it(share: float, outcome: RolloutOutcome) -> None:
    world = RolloutWorld(model())
    world.traffic.differing = {CANARY: share, BASELINE: 0.0}
    world.start(steps=CONFIG.steps, max_difference_increase=0.02)
    world.run(600, until=RolloutState.ENDED)
    assert world.rollout.outcome is outcome, world.rollout.progress
    if outcome is RolloutOutcome.ABORTED:
        assert world.rollout.reason.startswith("differences: ")
        assert world.rollout.passed == ()
    else:
        assert "answers differ" in world.rollout.passed[0].why


def test_proxies_compare_in_shadow_steps_only() -> None:
    world = RolloutWorld(model(), rate=100.0)
    world.start(steps=CONFIG.steps, difference_tolerance=0.5)
    world.run_to_step(0)
    rule = ShadowComparison(own=BackendTag(TAG), canary=CANARY, baseline=BASELINE, tolerance=0.5)
    assert endpoint(world).comparisons == [rule]
    world.do(RolloutAction.STEP)
    world.run_to_step(1)
    assert endpoint(world).comparisons == []


def endpoint(world: RolloutWorld) -> EndpointSnapshot:
    content = world.loop.bucket[endpoint_key(EndpointTag(TAG))].content
    assert isinstance(content, EndpointSnapshot)
    return content


def test_people_see_what_differs() -> None:
    world = RolloutWorld(model())
    world.start(steps=CONFIG.steps)
    world.run_to_step(0)
    query = GetRollouts(name="a")
    [view] = view_rollouts(world.loop.checkpoint, world.loop.observed, world.loop.now, query)
    assert view.differences is None
    world.traffic.differing = {CANARY: 0.5, BASELINE: 0.1}
    world.loop.differences = {CANARY: ["$.label: 3 instead of 8"], BASELINE: ["$.id: 1 instead of 2"]}
    world.run(5)
    world.do(RolloutAction.ABORT)
    world.loop.differences = {}
    world.run(10, until=RolloutState.ENDED)
    [view] = view_rollouts(world.loop.checkpoint, world.loop.observed, world.loop.now, query)
    assert view.differences is not None
    assert 0 < view.differences.baseline_different < view.differences.different < view.differences.compared
    assert view.differences.examples == ["$.label: 3 instead of 8"], "also once it has ended"


def test_without_a_limit_they_are_counted_and_judge_nothing() -> None:
    world = RolloutWorld(model())
    world.traffic.differing = {CANARY: 1.0, BASELINE: 0.0}
    world.start(steps=CONFIG.steps)
    world.run_to_step(1)
    counted = world.rollout.counted[CANARY]
    assert 0 < counted.different == counted.compared


@pytest.mark.parametrize("margin", [0.001, 0.01, 0.1, 0.5])
@pytest.mark.parametrize("rate", [0.0, 0.005, 0.05, 0.3])
def test_comparisons_of_the_same_request_are_no_more_evidence_than_independent_ones(
    margin: float, rate: float
) -> None:
    """Both are compared with one response of a caller. If that is what is odd, both differ at once."""

    def evidence(side: Side, canary: int, baseline: int) -> list[float]:
        block = RequestBlock(1, canary, 1, baseline)
        return [math.exp(log) for log in with_block(no_evidence(side), side, block, margin)]

    for side, excess in ((Side.WORSE, 0.0), (Side.WORSE, margin), (Side.FINE, margin)):
        both, only, none = evidence(side, 1, 1), evidence(side, 1, 0), evidence(side, 0, 0)
        for in_both, in_one, in_none in zip(both, only, none, strict=True):
            mean = rate * in_both + excess * in_one + (1 - rate - excess) * in_none
            assert mean <= 1 + 1e-9
