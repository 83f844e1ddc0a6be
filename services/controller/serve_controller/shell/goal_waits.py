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
from serve_common.wires.views import GoalStatus, GoalView
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.observed import ObservedState
from serve_controller.core.views import view_goal

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


class GoalViews:
    """Views of pending goals, kept while nothing changes: a thousand may give up waiting for one goal at once."""

    def __init__(self) -> None:
        self._of: tuple[Checkpoint, ObservedState] | None = None
        self._views: dict[GoalId, GoalView] = {}

    def view(self, checkpoint: Checkpoint, observed: ObservedState, goal_id: GoalId) -> GoalView:
        """See `core.views.view_goal`."""
        if self._of is None or self._of[0] is not checkpoint or self._of[1] is not observed:
            self._of, self._views = (checkpoint, observed), {}
        view = self._views.get(goal_id)
        if view is None:
            view = view_goal(checkpoint, observed, goal_id)
            if view.status is GoalStatus.PENDING:
                self._views[goal_id] = view
        return view
