"""Pinned keys: spread by weight, the same in every process, and moved only where they must."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_common.names import BackendTag, ReplicaTag
from serve_common.routing.replica_choice import ReplicaSlots, choose_by_hash, score, stable_hash
from serve_common.routing.route_table import TrafficSplit

hashes = st.integers(0, 2**64 - 1)
weights = st.dictionaries(
    st.sampled_from([BackendTag(f"d/{letter}") for letter in "abcde"]),
    st.floats(0, 1),
    min_size=1,
)


def slots_of(count: int) -> list[ReplicaSlots]:
    return [ReplicaSlots(ReplicaTag(f"d/a#{ordinal}")) for ordinal in range(count)]


@given(hashes, st.permutations(slots_of(6)), st.integers(1, 5))
def test_a_replica_that_goes_moves_its_own_keys_only_and_takes_them_back(key, replicas, left) -> None:
    pinned = choose_by_hash(key, replicas)
    without = choose_by_hash(key, replicas[:left])
    assert without is pinned or pinned not in replicas[:left]
    assert choose_by_hash(key, sorted(replicas, key=lambda slots: slots.tag)) is pinned


@given(hashes, weights, weights)
def test_a_key_moves_only_to_a_backend_whose_weight_grew_against_the_one_it_leaves(key, old, new) -> None:
    before, after = TrafficSplit(old).choose_for(key), TrafficSplit(new).choose_for(key)
    assert (before is None) == (max(old.values()) == 0)
    assert after is None or new[after] > 0
    if before is not None and after is not None and before != after and new.get(before):
        assert new[after] * old[before] >= old.get(after, 0.0) * new[before]


@given(hashes, weights)
def test_a_backend_that_is_left_out_moves_its_own_keys_only(key, traffic) -> None:
    split = TrafficSplit(traffic)
    pinned = split.choose_for(key)
    for tag in traffic:
        if tag != pinned:
            assert split.without([tag]).choose_for(key) == pinned


def test_keys_are_spread_over_backends_by_weight_and_over_replicas_evenly() -> None:
    split = TrafficSplit({BackendTag("d/a"): 0.7, BackendTag("d/b"): 0.2, BackendTag("d/c"): 0.1})
    replicas = slots_of(5)
    keys = [stable_hash(f"user-{number}") for number in range(20_000)]
    backends = [split.choose_for(key) for key in keys]
    for tag, share in (("d/a", 0.7), ("d/b", 0.2), ("d/c", 0.1)):
        assert backends.count(BackendTag(tag)) / len(keys) == pytest.approx(share, abs=0.012)
    # One backend's keys must not be those of some of its replicas only.
    mine = [key for key, tag in zip(keys, backends, strict=True) if tag == "d/a"]
    taken = [choose_by_hash(key, replicas) for key in mine]
    for slots in replicas:
        assert taken.count(slots) / len(mine) == pytest.approx(0.2, abs=0.015)


def test_a_small_shift_of_weight_moves_about_as_many_keys() -> None:
    a, b = BackendTag("d/a"), BackendTag("d/b")
    before, after = TrafficSplit({a: 0.9, b: 0.1}), TrafficSplit({a: 0.8, b: 0.2})
    keys = [stable_hash(f"user-{number}") for number in range(20_000)]
    moves = [(before.choose_for(key), after.choose_for(key)) for key in keys]
    assert moves.count((b, a)) == 0
    assert moves.count((a, b)) / len(keys) == pytest.approx(0.1, abs=0.01)


def test_hashes_are_the_same_in_every_process_and_each_bit_matters() -> None:
    assert stable_hash("user-1") == 0x9AAC_5A86_21EA_E188
    assert stable_hash("\ud800") != stable_hash("")  # what a header may hold is no reason to fail
    chance = random.Random(7)
    flips = []
    for _ in range(2_000):
        key, member = chance.getrandbits(64), chance.getrandbits(64)
        flipped = score(key, member) ^ score(key ^ 1 << chance.randrange(64), member)
        flips.append(flipped.bit_count())
    assert sum(flips) / len(flips) == pytest.approx(32, abs=0.5)
