"""The controller dies before and after every effect of a whole story, and nothing acknowledged is lost."""

from __future__ import annotations

import random

import pytest

from tests.simulation.scenario import STORY, build_world, play
from tests.simulation.world import Faults, World


def effects_of_the_story() -> int:
    world = build_world()
    play(world)
    return world.boundary.count


def test_the_story_without_faults_keeps_every_promise() -> None:
    world = build_world()
    outcome = play(world)
    assert outcome.violations == []
    assert [status for _, status in outcome.goals] == [step.ends for step in STORY]


def test_the_same_seed_gives_the_same_trace() -> None:
    faults = Faults(loss=0.1, doubling=0.1, delay_max_s=0.3)
    first, second = build_world(seed=7, faults=faults), build_world(seed=7, faults=faults)
    play(first)
    play(second)
    assert first.boundary.names == second.boundary.names
    assert first.time == second.time
    assert first.store.rows == second.store.rows


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_crash_at_each_single_effect_loses_nothing(after: bool) -> None:
    broken, fired = [], set()
    count = effects_of_the_story()
    for number in range(count):
        world = build_world(crashes=frozenset({(number, after)}))
        outcome = play(world)
        fired |= {name for _, name, _ in world.boundary.fired}
        assert [n for n, _, _ in world.boundary.fired] == [number], "the crash must really have happened"
        if outcome.violations:
            broken.append((number, world.boundary.fired, outcome.violations[:3]))
    assert broken == []
    assert fired == {"record_command", "record_plan", "publish_snapshot", "send_host_goal", "reply"}


def kill_things(world: World, dice: random.Random) -> None:
    """Deaths at random times: replicas, and hosts that come back later."""
    # What dies may do so in the very moment of a success, so the checks that look at what runs do not apply.
    world.after_cycle_checks = world.after_cycle_checks[:2]
    for _ in range(dice.randrange(1, 4)):
        host = dice.choice(world.hosts)
        world.after(
            dice.uniform(0.5, 10.0),
            lambda host=host: [host.kill_replica(tag) for tag in sorted(host.running())[:1]],
            lambda: world.is_stormy,
        )
    if dice.random() < 0.5:
        host, at, down_s = dice.choice(world.hosts), dice.uniform(0.5, 8.0), dice.choice([0.5, 4.0, 20.0])
        world.after(at, host.stop, lambda: world.is_stormy)
        world.after(at + down_s, host.start, lambda: not host.is_up)


def take_away_store_or_bus(world: World, dice: random.Random) -> None:
    """Postgres or NATS is away for a while."""
    at = dice.uniform(0.5, 6.0)
    back_at = at + dice.uniform(0.2, 12.0)
    kind = dice.randrange(3)
    if kind == 0:
        world.after(at, world.bus.go)
        world.after(back_at, world.bus.come)
    elif kind == 1:
        world.after(at, lambda: setattr(world.store, "loses_answers", True))
        world.after(back_at, lambda: setattr(world.store, "loses_answers", False))
    else:
        world.after(at, lambda: setattr(world.store, "available", False))
        world.after(back_at, lambda: setattr(world.store, "available", True))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", range(6))
def test_random_faults_lose_nothing(block: int) -> None:
    """Crashes in pairs and threes, lost, late, doubled messages, deaths, store and bus away; seeds are printed."""
    broken = []
    for seed in range(block * 25, block * 25 + 25):
        dice = random.Random(seed)
        crashes = frozenset((dice.randrange(110), dice.random() < 0.5) for _ in range(dice.randrange(4)))
        faults = Faults(
            loss=dice.choice([0.0, 0.05, 0.2]),
            doubling=dice.choice([0.0, 0.2]),
            delay_max_s=dice.choice([0.002, 0.3, 2.0]),
        )
        world = build_world(seed=seed, faults=faults, crashes=crashes, controllers=dice.choice([1, 2]))
        if dice.random() < 0.4:
            kill_things(world, dice)
        if dice.random() < 0.4:
            take_away_store_or_bus(world, dice)
        outcome = play(world)
        if outcome.violations:
            broken.append((f"seed {seed}", world.boundary.fired, outcome.violations[:3]))
    assert broken == []
