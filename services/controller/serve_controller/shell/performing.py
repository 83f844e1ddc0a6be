"""How a plan's actions are performed, once what they stand for is recorded.

Why apart from the term: whatever fails here is no loss. It is looked at again, and the next plan says it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import structlog

from serve_common.errors import BusUnavailable, LimitReached
from serve_common.ports import Clock
from serve_controller.core.attention import Attention
from serve_controller.core.host_goals import SendHostGoal
from serve_controller.core.reconcile import Action, PublishSnapshot, RetractSnapshot
from serve_controller.ports import HostLink, Publisher
from serve_controller.shell.boundary import Boundary
from serve_controller.shell.hearing import Hearing

_log = structlog.get_logger()

BUS_RETRY_S: Final = 0.5


class Performing:
    """Performs actions and takes in what became of them."""

    def __init__(
        self,
        host_link: HostLink,
        publisher: Publisher,
        boundary: Boundary,
        hearing: Hearing,
        clock: Clock,
        *,
        on_change: Callable[[], None],
    ) -> None:
        """``hearing`` learns what was sent and published; ``on_change`` is called when a plan should be made soon."""
        self._host_link = host_link
        self._publisher = publisher
        self._boundary = boundary
        self._hearing = hearing
        self._clock = clock
        self._on_change = on_change

    async def perform_all(self, actions: Sequence[Action]) -> float | None:
        """Perform a plan's actions in their order. Returns when to look again at the latest, or None."""
        for number, action in enumerate(actions):
            try:
                await self._perform(action)
            except LimitReached as error:
                # Trying again cannot help this one, and it must not hold up the others.
                _log.error("action_impossible", action=type(action).__name__, error=str(error))
            except BusUnavailable as error:
                _log.warning("plan_not_performed", error=str(error))
                self._hearing.attending.add(_of_actions(actions[number:]))
                return self._clock.now() + BUS_RETRY_S
        return self._hearing.next_at()

    async def _perform(self, action: Action) -> None:
        match action:
            case PublishSnapshot():
                revision = await self._boundary.cross(
                    "publish_snapshot", lambda: self._publisher.publish(action.key, action.snapshot)
                )
                self._hearing.hear_bucket({action.key: (revision, action.snapshot.snapshot_id)}, whole=False)
                self._on_change()
            case RetractSnapshot():
                revision = self._hearing.revision_of(action.key)
                await self._boundary.cross(
                    "retract_snapshot", lambda: self._publisher.retract(action.key, revision)
                )
                self._hearing.retracted(action.key)
            case SendHostGoal():
                goal = action.goal
                await self._boundary.cross("send_host_goal", lambda: self._host_link.send_goal(goal))
                self._hearing.sent(goal.host_id, (goal.epoch, goal.generation), self._clock.now())


def _of_actions(actions: Sequence[Action]) -> Attention:
    """What to look at again because these were not performed."""
    return Attention(
        hosts=frozenset(a.goal.host_id for a in actions if isinstance(a, SendHostGoal)),
        keys=frozenset(a.key for a in actions if not isinstance(a, SendHostGoal)),
    )
