"""The slots of a replica: what is in flight, as a set of requests that each leave it exactly once.

Why apart: whatever ends a request, its slot must come back, and only one place gives it back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, final

from serve_replica_host.ports import RequestMetrics
from serve_replica_host.replica.exchange import Exchange
from serve_replica_host.replica.recent_replies import RecentReplies
from serve_replica_host.replica.waiting_room import WaitingRoom

_LOOK_S: Final = 0.005


@final
class Slots:
    """Holds the exchanges of one replica, under the lock of its `BusSide`."""

    def __init__(
        self, now: Callable[[], float], metrics: RequestMetrics, on_free: Callable[[], None]
    ) -> None:
        """``now`` is `time.monotonic` or a stand-in; ``on_free`` is called when one of ``waiting`` may get a slot."""
        self.waiting: Final = WaitingRoom()
        self._on_free = on_free
        self.held: dict[bytes, Exchange] = {}
        """By reply subject."""
        self.recent: Final = RecentReplies()
        """Those that have given their slots back."""
        self._now = now
        self._metrics = metrics
        self._ended_s = 0.0
        """How long the requests that are gone were here, all together."""

    def take(self, exchange: Exchange) -> None:
        """``exchange`` is in flight from now on."""
        self.held[exchange.reply] = exchange

    def release(self, exchange: Exchange, status: int, ended_at: float | None = None) -> None:
        """Give the slot back, counted under ``status``; does nothing when it was given back.

        ``ended_at`` is when its answer left, None for now.
        """
        if self.held.pop(exchange.reply, None) is None:
            return
        exchange.outgoing = None
        exchange.incoming = None
        now = self._now() if ended_at is None else ended_at
        self.recent.add(exchange.reply, exchange.last_frame, now)
        seconds = now - exchange.began_at
        self._ended_s += seconds
        self._metrics.count_answered(status, seconds)
        if exchange.trace is not None:
            exchange.trace.end(status, now)
        if self.waiting:
            self._on_free()

    def leave_waiting(self, exchange: Exchange) -> None:
        """``exchange`` has waited and never got a slot."""
        self._ended_s += self._now() - exchange.began_at

    def ongoing_seconds(self, now: float) -> float:
        """How long requests have been here so far, all together, those that wait or are in flight included."""
        here: float = sum(now - exchange.began_at for exchange in (*self.held.values(), *self.waiting))
        return self._ended_s + here

    async def wait_idle(self) -> None:
        """Wait until nothing is in flight."""
        # Whoever ends the last request may be another thread, which cannot set an event of this loop.
        while self.held:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
