"""Ranks of replicas: numbers from 0 by which the code of a deployment splits work between its replicas.

A rank stays with its replica as long as the ranks of all have no gaps. They get gaps while replicas come and go; these
are closed by as few changes as possible, and only once no replica is missing or about to start, because user code may
redistribute data whenever a rank changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from serve_common.names import HostId, ReplicaTag
from serve_common.protocol.reports import ReplicaRank
from serve_controller.core.checkpoint import Draft
from serve_controller.core.objects import Backend, Replica, ReplicaState
from serve_controller.core.transitions import IN_HOST_GOAL


class _Numbers:
    """Numbers from 0 for names, each given once; the smallest free one comes first."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._taken: set[int] = set()
        self._next = 0

    def take(self, name: str, number: int) -> bool:
        """Give this number, unless it is taken; returns whether the name has it."""
        if number in self._taken:
            return self._numbers.get(name) == number
        self._numbers[name] = number
        self._taken.add(number)
        return True

    def give(self, name: str) -> int:
        """The number that the name has, or else the smallest free one."""
        while name not in self._numbers:
            self.take(name, self._next)
            self._next += 1
        return self._numbers[name]


class FreeRanks:
    """The ranks that a backend's replicas do not have."""

    def __init__(self, replicas: Iterable[Replica]) -> None:
        """``replicas``: all of the backend; those that are in no host's goal have no rank any more."""
        self._ranks = _Numbers()
        self._nodes = _Numbers()
        self._locals: defaultdict[HostId, _Numbers] = defaultdict(_Numbers)
        for replica in replicas:
            if replica.rank is not None and replica.host_id is not None and replica.state in IN_HOST_GOAL:
                self._ranks.take(replica.replica_tag, replica.rank.rank)
                self._nodes.take(replica.host_id, replica.rank.node_rank)
                self._locals[replica.host_id].take(replica.replica_tag, replica.rank.local_rank)

    def assign(self, tag: ReplicaTag, host_id: HostId) -> ReplicaRank:
        """The smallest free rank, for a new replica on that host."""
        return ReplicaRank(
            rank=self._ranks.give(tag),
            node_rank=self._nodes.give(host_id),
            local_rank=self._locals[host_id].give(tag),
        )


def renew_ranks(draft: Draft, backend: Backend) -> None:
    """Give ranks to replicas that run without, close gaps once all wanted ones run, and announce a new world size."""
    replicas = draft.get_replicas(backend.backend_tag)
    ranked = [r for r in replicas.values() if r.state in IN_HOST_GOAL and r.host_id is not None]
    if not ranked or backend.num_wanted == 0:
        return
    if any(replica.rank is None for replica in ranked):
        free = FreeRanks(ranked)
        _put_ranks(draft, ranked, {r.replica_tag: free.assign(r.replica_tag, _host(r)) for r in ranked})
    elif len(ranked) == backend.num_wanted and all(r.state is not ReplicaState.STARTING for r in ranked):
        _put_ranks(draft, ranked, _closed(ranked))
    if backend.world_size != backend.num_wanted:
        draft.put(msgspec.structs.replace(backend, world_size=backend.num_wanted))
        for host_id in sorted({_host(replica) for replica in ranked}):
            before = draft.base.hosts.get(host_id)
            if before is not None and before.generation == draft.hosts[host_id].generation:
                draft.renew_host_goal(host_id)


def _put_ranks(draft: Draft, replicas: Iterable[Replica], ranks: Mapping[ReplicaTag, ReplicaRank]) -> None:
    for replica in sorted(replicas, key=lambda r: r.replica_tag):
        rank = ranks[replica.replica_tag]
        if rank != replica.rank:
            generation = draft.renew_host_goal(_host(replica))
            draft.put(msgspec.structs.replace(replica, rank=rank, generation=generation))


def _closed(replicas: Iterable[Replica]) -> dict[ReplicaTag, ReplicaRank]:
    """Ranks without gaps: a number that is too high becomes the lowest missing one."""
    known = {r.replica_tag: (_host(r), r.rank) for r in replicas if r.rank is not None}
    ranks = _without_gaps({tag: rank.rank for tag, (_, rank) in known.items()})
    nodes = _without_gaps({host_id: rank.node_rank for host_id, rank in known.values()})
    on_hosts: defaultdict[HostId, dict[str, int]] = defaultdict(dict)
    for tag, (host_id, rank) in known.items():
        on_hosts[host_id][tag] = rank.local_rank
    local = {host_id: _without_gaps(numbers) for host_id, numbers in on_hosts.items()}
    return {
        tag: ReplicaRank(
            rank=ranks.give(tag), node_rank=nodes.give(host_id), local_rank=local[host_id].give(tag)
        )
        for tag, (host_id, _) in known.items()
    }


def _without_gaps(numbers: Mapping[str, int]) -> _Numbers:
    closed = _Numbers()
    ordered = sorted(numbers, key=lambda name: (numbers[name], name))
    left = [n for n in ordered if numbers[n] >= len(ordered) or not closed.take(n, numbers[n])]
    for name in left:
        closed.give(name)
    return closed


def _host(replica: Replica) -> HostId:
    assert replica.host_id is not None, "a replica in a host's goal has a host"
    return replica.host_id
