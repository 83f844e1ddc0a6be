"""Requests that wait for a slot of a replica which several routers share: first come, first served.

Why here and not in the routers: none of them knows of the others, so whoever asked again soonest would be served most.
Bounded, and only requests that are whole and whose router says that it has nowhere else to go.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, final

from serve_replica_host.replica.exchange import Exchange

WAITING_MAX: Final = 1_000


@final
class WaitingRoom:
    """By reply subject, in the order of arrival; all methods are called under the lock of its `BusSide`."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: dict[bytes, Exchange] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, reply: object) -> bool:
        return reply in self._held

    @property
    def is_full(self) -> bool:
        """True when no more are kept."""
        return len(self._held) >= WAITING_MAX

    def add(self, exchange: Exchange) -> None:
        """Keep it, behind all others."""
        self._held[exchange.reply] = exchange

    def __iter__(self) -> Iterator[Exchange]:
        return iter(self._held.values())

    def discard(self, reply: bytes) -> Exchange | None:
        """Nobody wants it any more; None when it does not wait."""
        return self._held.pop(reply, None)

    def take_first(self) -> Exchange:
        """The one that has waited longest; there must be one."""
        return self._held.pop(next(iter(self._held)))

    def take_late(self, now: float) -> list[Exchange]:
        """Those whose deadline is over."""
        late = [exchange for exchange in self._held.values() if now >= exchange.deadline]
        for exchange in late:
            del self._held[exchange.reply]
        return late

    def take_all(self) -> list[Exchange]:
        """All, in order."""
        held = list(self._held.values())
        self._held.clear()
        return held
