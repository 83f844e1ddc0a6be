"""Callers that wait for goals.

Why by goal: a thousand may wait at once while other goals come and go, and nobody should look again before there is
something to see.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from serve_common.errors import LimitReached
from serve_common.names import GoalId

WAITERS_MAX: Final = 20_000


class GoalWaits:
    """Who waits for which goal."""

    def __init__(self) -> None:
        self._waiting: dict[GoalId, set[asyncio.Future[None]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    async def changed(self, goal_id: GoalId) -> None:
        """Return when `wake` names the goal, or at `wake_all`. Raises `LimitReached` when too many wait already."""
        if self._count >= WAITERS_MAX:
            raise LimitReached(f"{WAITERS_MAX} callers wait for goals already")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(goal_id, set()).add(waiter)
        self._count += 1
        try:
            await waiter
        finally:
            self._count -= 1
            others = self._waiting.get(goal_id)
            if others is not None:
                others.discard(waiter)
                if not others:
                    del self._waiting[goal_id]

    def wake(self, goal_ids: Iterable[GoalId]) -> None:
        """Let those look again who wait for one of these goals."""
        for goal_id in goal_ids:
            for waiter in self._waiting.get(goal_id, ()):
                if not waiter.done():
                    waiter.set_result(None)

    def wake_all(self) -> None:
        """Let everybody look again."""
        self.wake(list(self._waiting))
