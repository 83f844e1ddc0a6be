"""Ranks: unique while replicas come and go, without gaps once all run, and changed as seldom as possible."""

from __future__ import annotations

import random

import msgspec
import pytest

from serve_common.api.commands import DrainHost
from serve_common.names import HostId, ReplicaTag
from serve_common.protocol.reports import ReplicaRank
from serve_controller.core.checkpoint import Draft
from serve_controller.core.objects import Replica, ReplicaState
from serve_controller.core.ranks import FreeRanks, renew_ranks
from tests.support.control_loop.closed_loop import Loop
from tests.support.control_loop.orders import deploy
from tests.support.control_loop.pure_host import PureHost
from tests.support.controller_parts import TAG


def ranks_of(loop: Loop) -> dict[ReplicaTag, ReplicaRank]:
    """What hosts were told, by replica; every one was told the world size too."""
    told = {}
    for host in loop.hosts:
        for tag in host.running():
            goal = host.told[tag]
            assert goal.world_size == len(loop.running())
            assert goal.rank is not None
            told[tag] = goal.rank
    return told


def check_complete(loop: Loop) -> dict[ReplicaTag, ReplicaRank]:
    """Every number from 0 is there once: of all replicas, of the hosts, and of the replicas on each host."""
    told = ranks_of(loop)
    assert sorted(r.rank for r in told.values()) == list(range(len(told)))
    used = [host for host in loop.hosts if host.running()]
    nodes = []
    for host in used:
        on_host = [told[tag] for tag in host.running()]
        assert len({r.node_rank for r in on_host}) == 1
        nodes.append(on_host[0].node_rank)
        assert sorted(r.local_rank for r in on_host) == list(range(len(on_host)))
    assert sorted(nodes) == list(range(len(used)))
    return told


def two_hosts(num: int) -> Loop:
    loop = Loop(PureHost("host-1", cpus=8), PureHost("host-2", cpus=8))
    loop.done(deploy(num=num))
    loop.settle()
    return loop


def test_replicas_get_all_numbers_from_zero_on() -> None:
    assert len(check_complete(two_hosts(5))) == 5


def test_more_replicas_leave_the_ranks_that_are_there() -> None:
    loop = two_hosts(2)
    before = check_complete(loop)
    loop.done(deploy(num=6))
    loop.settle()
    after = check_complete(loop)
    assert {tag: after[tag] for tag in before} == before


def test_fewer_replicas_close_the_gaps() -> None:
    loop = two_hosts(6)
    loop.done(deploy(num=3))
    loop.settle()
    assert len(check_complete(loop)) == 3


def test_the_successor_of_a_dead_replica_has_its_rank() -> None:
    loop = two_hosts(4)
    before = check_complete(loop)
    victim = next(tag for tag, rank in before.items() if rank.rank == 0)
    next(host for host in loop.hosts if victim in host.running()).kill(victim)
    loop.settle()
    after = check_complete(loop)
    others = before.keys() - {victim}
    assert {tag: after[tag].rank for tag in others} == {tag: before[tag].rank for tag in others}


def test_an_update_ends_without_gaps() -> None:
    loop = two_hosts(4)
    loop.done(deploy(num=4, version="v2"))
    loop.settle()
    assert len(check_complete(loop)) == 4


def test_a_drained_host_gives_its_number_away() -> None:
    loop = two_hosts(4)
    loop.done(DrainHost(host_id=HostId("host-1")))
    loop.settle()
    assert {rank.node_rank for rank in check_complete(loop).values()} == {0}


def test_replicas_of_a_controller_without_ranks_get_them() -> None:
    loop = two_hosts(3)
    draft = Draft(loop.checkpoint)
    for replica in draft.get_replicas(TAG).values():
        draft.put(msgspec.structs.replace(replica, rank=None))
    before = draft.checkpoint()
    draft = Draft(before)
    renew_ranks(draft, draft.backends[TAG])
    ranks = [r.rank for r in draft.get_replicas(TAG).values()]
    assert sorted(r.rank for r in ranks if r is not None) == [0, 1, 2]
    assert all(draft.hosts[h].generation > before.hosts[h].generation for h in before.hosts)


@pytest.mark.parametrize("seed", range(20))
def test_a_free_rank_is_the_smallest_that_nobody_has(seed: int) -> None:
    dice = random.Random(seed)
    taken = dice.sample(range(12), 6)
    replicas = [
        Replica(
            replica_tag=ReplicaTag(f"{TAG}#{number}"),
            backend_tag=TAG,
            code_version=1,
            config_version=1,
            state=ReplicaState.STOPPING if number == taken[0] else ReplicaState.RUNNING,
            since=0.0,
            host_id=HostId("host-1"),
            rank=ReplicaRank(rank=number, node_rank=0, local_rank=number),
        )
        for number in taken
    ]
    free, left = FreeRanks(replicas), sorted(set(range(20)) - set(taken[1:]))
    given = [free.assign(ReplicaTag(f"{TAG}#{100 + n}"), HostId(f"host-{n}")) for n in range(2, 6)]
    assert [rank.rank for rank in given] == left[:4], f"seed {seed}"
    assert [rank.node_rank for rank in given] == [1, 2, 3, 4]
    assert {rank.local_rank for rank in given} == {0}
