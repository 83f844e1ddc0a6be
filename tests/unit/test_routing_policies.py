"""Replica policies as snapshots set them, and wishes that come before them: versions, pinned keys, models."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from serve_common.config.backend import OutlierEjection, ReplicaPolicyName
from serve_common.names import BackendTag, ReplicaTag
from serve_common.protocol.snapshots import BackendProtection, BackendSnapshot
from serve_common.routing.queues import RequestKey
from serve_common.routing.replica_choice import Affinity, stable_hash
from serve_common.routing.request_events import Dispatch, Queued, Refusal, SendTo
from serve_common.routing.router import Router

TAG = BackendTag("d/a")
R = [ReplicaTag(f"d/a#{i}") for i in range(4)]


class World:
    """A router with numbered requests."""

    def __init__(self, **backend: Any) -> None:
        self.router = Router(TAG, random.Random(3).random, lambda: 0.0)
        self.last = 0
        self.apply(**backend)

    def apply(self, *, replicas=R, limit=100, versions=None, draining=(), **protection) -> list[Dispatch]:
        snapshot = BackendSnapshot(
            backend_tag=TAG,
            replicas=list(replicas),
            draining=list(draining),
            max_concurrent_queries=limit,
            max_queued_requests=100,
            protection=BackendProtection(**protection),
            code_versions=versions or {},
        )
        return list(self.router.apply(snapshot, 0.0).dispatches)

    def submit(self, wish: Affinity | None = None) -> ReplicaTag | None:
        self.last += 1
        outcome = self.router.submit(RequestKey(self.last), 9.0, wish=wish)
        return outcome.replica if isinstance(outcome, SendTo) else None

    def end(self, request: int) -> list[Dispatch]:
        return list(self.router.finished(RequestKey(request)))

    def take(self, count: int, wish: Affinity | None = None) -> list[ReplicaTag | None]:
        return [self.submit(wish) for _ in range(count)]


def shard(key: str) -> Affinity:
    return Affinity(shard_hash=stable_hash(key))


def test_round_robin_takes_all_in_turn_and_starts_with_the_next_when_one_is_full() -> None:
    world = World(replica_policy=ReplicaPolicyName.ROUND_ROBIN, limit=2)
    assert sorted(world.take(4)) == R
    assert sorted(world.take(4)) == R
    assert world.submit() is None
    assert len(world.end(3)) == 1


def test_fixed_packing_fills_a_batch_before_the_next_replica() -> None:
    world = World(replica_policy=ReplicaPolicyName.FIXED_PACKING, packing_num=3)
    taken = world.take(12)
    assert [len(set(taken[at : at + 3])) for at in range(0, 12, 3)] == [1, 1, 1, 1]
    assert sorted(set(taken)) == R
    assert world.take(3) == taken[:3]


def test_fixed_packing_leaves_a_row_that_cannot_go_on() -> None:
    world = World(replica_policy=ReplicaPolicyName.FIXED_PACKING, packing_num=3, limit=2)
    taken = world.take(8)
    assert [len(set(taken[at : at + 2])) for at in range(0, 8, 2)] == [1, 1, 1, 1]
    assert sorted(set(taken)) == R


def test_a_random_choice_is_even_and_power_of_two_is_more_so() -> None:
    spreads = {}
    for policy in (ReplicaPolicyName.RANDOM, ReplicaPolicyName.POWER_OF_TWO_CHOICES):
        counts = Counter(World(replica_policy=policy, limit=1000).take(400))
        assert len(counts) == 4
        spreads[policy] = max(counts.values()) - min(counts.values())
    assert spreads[ReplicaPolicyName.POWER_OF_TWO_CHOICES] < 6 < spreads[ReplicaPolicyName.RANDOM] < 80


def test_a_snapshot_changes_the_policy_at_once_and_keeps_an_unchanged_ones_memory() -> None:
    world = World(replica_policy=ReplicaPolicyName.FIXED_PACKING, packing_num=4)
    first = world.take(2)
    world.apply(replica_policy=ReplicaPolicyName.FIXED_PACKING, packing_num=4)
    assert world.take(2) == first  # the row goes on
    world.apply(replica_policy=ReplicaPolicyName.FIXED_PACKING, packing_num=2)
    taken = world.take(4)
    assert taken[0] == taken[1] != taken[2] == taken[3]
    world.apply(replica_policy=ReplicaPolicyName.ROUND_ROBIN)
    assert len(set(world.take(4))) == 4


def test_a_key_stays_with_its_replica_and_comes_back_to_it() -> None:
    world = World(limit=3)
    (home,) = {world.submit(shard("anna")) for _ in range(3)}
    second = world.submit(shard("anna"))  # home is full: nobody waits while another is free
    assert second not in (None, home)
    world.end(1)
    assert world.submit(shard("anna")) == home
    world.apply(replicas=[tag for tag in R if tag != home])
    assert world.submit(shard("anna")) == second
    world.apply()
    assert world.submit(shard("anna")) == home


@pytest.mark.parametrize("why", ["draining", "busy", "silent", "ejected"])
def test_a_pinned_replica_that_takes_nothing_is_passed_over_for_the_next_of_the_key(why: str) -> None:
    world = World(outlier_ejection=OutlierEjection(consecutive_failures=1))
    home = world.submit(shard("anna"))
    assert home is not None
    match why:
        case "draining":
            world.apply(replicas=[tag for tag in R if tag != home], draining=[home])
        case "busy":
            (dispatch,) = world.router.refused(RequestKey(1), home, Refusal.BUSY, 0.0)
            assert dispatch.replica != home
        case "silent":
            world.router.quarantine(home, 0.0)
        case "ejected":
            world.router.failed(RequestKey(1), 0.0)
    nexts = set(world.take(5, shard("anna")))
    assert len(nexts) == 1
    assert home not in nexts


def test_a_pinned_request_that_waits_takes_whatever_is_free_first() -> None:
    world = World(replicas=R[:2], limit=1)
    home, other = world.take(2, shard("anna"))
    assert world.submit(shard("anna")) is None
    assert world.end(2) == [Dispatch(RequestKey(3), other)]
    assert home != other


def test_the_preferred_version_is_taken_while_one_of_it_is_open() -> None:
    world = World(limit=2, versions={R[0]: 1, R[1]: 1, R[2]: 2, R[3]: 2})
    assert set(world.take(4, Affinity(code_version=2))) == {R[2], R[3]}
    assert set(world.take(4, Affinity(code_version=2))) == {R[0], R[1]}  # they are full
    assert world.router.submit(RequestKey(99), 9.0, wish=Affinity(code_version=2)) == Queued()
    world.apply(limit=9)  # all run the same version now: no wish to fulfil, and none to fail
    assert len(set(world.take(8, Affinity(code_version=2)))) == 4


def test_a_key_is_pinned_among_the_replicas_of_its_version() -> None:
    versions = {R[0]: 1, R[1]: 1, R[2]: 2, R[3]: 2}
    world = World(versions=versions)
    for key in "abcdefgh":
        for version in (1, 2):
            (taken,) = set(world.take(3, Affinity(version, stable_hash(key))))
            assert versions[taken] == version


MODEL = Affinity(model_id="m")


def test_a_model_is_used_where_it_is_held_and_loaded_in_one_place_otherwise() -> None:
    world = World()
    (loading,) = set(world.take(10, MODEL))  # nobody holds it yet
    holder = next(tag for tag in R if tag != loading)
    assert world.router.hold(holder, frozenset({"m", "n"}))
    assert set(world.take(10, MODEL)) == {holder}
    world.router.hold(holder, frozenset({"n"}))
    assert set(world.take(10, MODEL)) == {loading}
    assert not world.router.hold(ReplicaTag("d/a#99"), frozenset({"m"}))


def test_different_models_are_loaded_in_different_places() -> None:
    world = World(limit=1000)
    places = Counter(world.submit(Affinity(model_id=f"m{number}")) for number in range(400))
    assert sorted(places) == R
    assert min(places.values()) > 60


def test_a_hot_model_spreads_to_replicas_that_have_far_less_to_do() -> None:
    world = World(limit=10)
    world.router.hold(R[1], frozenset({"m"}))
    assert set(world.take(5, MODEL)) == {R[1]}
    spread = world.submit(MODEL)
    assert spread != R[1]
    world.router.hold(spread, frozenset({"m"}))
    assert set(world.take(4, MODEL)) == {
        spread
    }  # it has less in flight than the other holder, and is not hot
    third = world.submit(MODEL)
    assert third not in (R[1], spread)


def test_a_hot_model_stays_where_it_is_when_all_others_are_as_busy() -> None:
    world = World(limit=10)
    world.take(20)  # five each
    world.router.hold(R[1], frozenset({"m"}))
    assert set(world.take(3, MODEL)) == {R[1]}


def test_a_key_comes_before_a_model() -> None:
    world = World()
    home = world.submit(shard("anna"))
    other = next(tag for tag in R if tag != home)
    world.router.hold(other, frozenset({"m"}))
    assert world.submit(Affinity(None, stable_hash("anna"), "m")) == home
