"""The controller dies before and after every effect of a whole story, and nothing acknowledged is lost."""

from __future__ import annotations

import itertools
import random

import pytest

from serve_controller.shell.boundary import EFFECTS
from tests.simulation.clients import Step
from tests.simulation.scenario import (
    GROUP_STORY,
    PAIR_STORY,
    ROLLOUT_STORY,
    STORY,
    effects_of,
    run_stall,
    run_story,
    run_stuck,
)
from tests.simulation.world import Faults

PAIRS = 60
"""Of some ten thousand; `make simulate` tries them all."""


def test_the_story_without_faults_keeps_every_promise() -> None:
    assert run_story(STORY).violations == []


def test_the_story_on_a_bad_network_keeps_every_promise() -> None:
    """Its goals end as they must even then: what is lost or late costs time only."""
    faults = Faults(loss=0.2, doubling=0.2, delay_max_s=0.3, effect_max_s=0.05)
    assert run_story(STORY, faults=faults).violations == []


def test_what_is_stuck_on_a_host_is_replaced() -> None:
    assert run_stuck().violations == []


def test_a_leader_that_stands_still_for_long_takes_nobody_for_lost() -> None:
    assert run_stall().violations == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("story", [PAIR_STORY, GROUP_STORY], ids=["a deployment", "an application"])
def test_a_crash_at_each_single_effect_loses_nothing(after: bool, story: list[Step]) -> None:
    """`make simulate` does so with a longer story too."""
    broken, fired = [], set()
    for number in range(effects_of(story)):
        outcome = run_story(story, frozenset({(number, after)}))
        fired |= {name for _, name, _ in outcome.crashed}
        assert [n for n, _, _ in outcome.crashed] == [number], "the crash must really have happened"
        if outcome.violations:
            broken.append((outcome.name, outcome.violations))
    assert broken == []
    assert fired == {*EFFECTS} - {"retract_snapshot"}, "nothing foreign is in the simulated bucket"


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_crash_in_a_rollout_loses_nothing(after: bool) -> None:
    """At every eighth effect; `make simulate` does so at every one, and in pairs."""
    count = effects_of(ROLLOUT_STORY)
    outcomes = [run_story(ROLLOUT_STORY, frozenset({(n, after)})) for n in range(after, count, 8)]
    assert [(o.name, o.violations) for o in outcomes if o.violations] == []
    assert all(len(outcome.crashed) == 1 for outcome in outcomes)


def test_pairs_of_crashes_lose_nothing() -> None:
    points = [(n, after) for n in range(effects_of(PAIR_STORY)) for after in (False, True)]
    pairs = random.Random(1).sample(list(itertools.combinations(points, 2)), PAIRS)
    outcomes = [run_story(PAIR_STORY, frozenset(pair)) for pair in pairs]
    assert [(o.name, o.violations) for o in outcomes if o.violations] == []
    assert sum(len(o.crashed) == 2 for o in outcomes) > PAIRS // 2
