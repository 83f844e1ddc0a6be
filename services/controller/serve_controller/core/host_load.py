"""Capacity taken on a host, in whole units of each resource."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from immutables import Map

from serve_controller.core.objects import Replica
from serve_controller.core.transitions import IN_HOST_GOAL, WANTED

UNITS: Final = 10_000
"""Ray counts resources in steps of 0.0001."""


def in_units(amount: float) -> int:
    """An amount of a resource as a whole number of Ray's steps."""
    return round(amount * UNITS)


class HostLoad(msgspec.Struct, frozen=True):
    """Capacity taken on a host.

    It is an index, because placing one replica must not scan all others, and it counts in whole numbers, because a sum
    that is changed thousands of times must stay exact.
    """

    taken: Map[str, int] = Map()
    """Units of each resource, including those of replicas that are still stopping."""
    goal_bytes: int = 0
    """Size of the replicas in the host's goal."""
    num_wanted: int = 0
    """Replicas that should run there."""


def changed_load(load: HostLoad, replica: Replica, sign: int) -> HostLoad:
    """``load`` with the replica's share added (1) or taken away (-1)."""
    taken = load.taken
    for name, amount in replica.needs.items():
        units = taken.get(name, 0) + sign * in_units(amount)
        taken = taken.set(name, units) if units else taken.delete(name) if name in taken else taken
    return HostLoad(
        taken,
        load.goal_bytes + (sign * replica.goal_bytes if replica.state in IN_HOST_GOAL else 0),
        load.num_wanted + (sign if replica.state in WANTED else 0),
    )


def fits(free: Mapping[str, int], needs: Mapping[str, float]) -> bool:
    """Whether ``needs`` can be taken from ``free`` units."""
    return all(free.get(name, 0) >= in_units(amount) for name, amount in needs.items())


NO_LOAD: Final = HostLoad()
