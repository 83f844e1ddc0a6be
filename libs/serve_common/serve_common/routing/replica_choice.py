"""Which of the replicas that have a free slot takes the next request.

Why several policies behind one Protocol: the router's bookkeeping is the same for all of them, and none of them may
touch it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, final

Draw = Callable[[], float]
"""Gives the next random number in [0, 1)."""


class Load(Protocol):
    """What a policy may know of a replica that has a free slot."""

    @property
    def in_flight(self) -> int:
        """Requests that this router has sent there and that have not ended."""
        ...

    @property
    def turn(self) -> int:
        """Number of the router's choice that fell on this replica last; 0 for never."""
        ...


L = TypeVar("L", bound=Load)


class ReplicaPolicy(Protocol):
    """Chooses one of many."""

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
        return one if one.in_flight <= other.in_flight else other


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
