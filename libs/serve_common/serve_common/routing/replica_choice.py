"""Which of the replicas that have a free slot takes the next request.

Why several policies behind one Protocol: the router's bookkeeping is the same for all of them, and none of them may
touch it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import Final, Protocol, TypeVar, final

from serve_common.values.backend_config import ReplicaPolicyName

Draw = Callable[[], float]
"""Gives the next random number in [0, 1)."""


class Load(Protocol):
    """What a policy may know of a replica that has a free slot."""

    @property
    def requests(self) -> Sized:
        """What this router has sent there and has not ended."""
        ...

    @property
    def turn(self) -> int:
        """Number of the router's choice that fell on this replica last; 0 for never."""
        ...


L = TypeVar("L", bound=Load)


class ReplicaPolicy(Protocol):
    """Chooses one of many. What a policy remembers of earlier choices is its own."""

    def choose(self, replicas: Sequence[L], draw: Draw) -> L:
        """One of ``replicas``, which is not empty."""
        ...


@final
class PowerOfTwoChoices:
    """Of two replicas taken at random the one with less in flight: nearly as even as knowing all, at constant cost."""

    def choose(self, replicas: Sequence[L], draw: Draw) -> L:
        """One of ``replicas``."""
        count = len(replicas)
        if count == 1:
            return replicas[0]
        first = int(draw() * count)
        second = int(draw() * (count - 1))
        if second >= first:
            second += 1
        one, other = replicas[first], replicas[second]
        return one if len(one.requests) <= len(other.requests) else other


@final
class RoundRobin:
    """The replica whose last turn is the longest ago. Looks at all of them."""

    def choose(self, replicas: Sequence[L], draw: Draw) -> L:  # noqa: ARG002 - part of the Protocol
        """One of ``replicas``."""
        return min(replicas, key=lambda replica: replica.turn)


@final
class RandomChoice:
    """Any of them, all alike."""

    def choose(self, replicas: Sequence[L], draw: Draw) -> L:
        """One of ``replicas``."""
        return replicas[int(draw() * len(replicas))]


@final
class FixedPacking:
    """The same replica so many times in a row, then the one whose last turn is the longest ago.

    A row ends early when its replica is not among those to choose from: nobody waits for a batch to fill.
    """

    def __init__(self, packing_num: int) -> None:
        """``packing_num`` is the length of a row, at least 1."""
        self._packing_num = packing_num
        self._current: object | None = None
        self._row = 0

    def choose(self, replicas: Sequence[L], draw: Draw) -> L:  # noqa: ARG002 - part of the Protocol
        """One of ``replicas``."""
        if self._row < self._packing_num:
            for replica in replicas:
                if replica is self._current:
                    self._row += 1
                    return replica
        chosen = min(replicas, key=lambda replica: replica.turn)
        self._current, self._row = chosen, 1
        return chosen


_POWER_OF_TWO_CHOICES: Final = PowerOfTwoChoices()


def policy_named(name: ReplicaPolicyName, packing_num: int) -> ReplicaPolicy:
    """The policy of that name, with nothing remembered."""
    match name:
        case ReplicaPolicyName.POWER_OF_TWO_CHOICES:
            return _POWER_OF_TWO_CHOICES
        case ReplicaPolicyName.ROUND_ROBIN:
            return RoundRobin()
        case ReplicaPolicyName.RANDOM:
            return RandomChoice()
        case ReplicaPolicyName.FIXED_PACKING:
            return FixedPacking(packing_num)
