"""Clients that behave as the guarantees ask of them: a command is sent until it is answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from serve_common.api.commands import ChangeReply, Command, ShutdownReply
from serve_common.api.views import GoalStatus
from serve_common.errors import CommandRefused, ServeError
from serve_common.names import GoalId

if TYPE_CHECKING:
    from tests.simulation.world import World

TIMEOUT_S: Final = 2.0
RETRY_S: Final = 0.3
WAIT_S: Final = 40.0
"""How long a client waits for a goal before it goes on."""


@dataclass(frozen=True)
class Step:
    """One thing that a client does."""

    command: Command[Any]
    waits: bool = True
    """For the goal's end, before the next step."""
    think_s: float = 0.0
    ends: GoalStatus | None = None
    """How the goal must end; None: as it may."""


class Client:
    """Does its steps one after the other."""

    def __init__(self, world: World, name: str, steps: list[Step]) -> None:
        self.world, self.name, self.steps = world, name, steps
        self.acknowledged: list[GoalId] = []
        self.refusals = 0
        self._at = 0
        self._attempt = 0
        self._next()

    @property
    def is_done(self) -> bool:
        """Whether every step was answered, and waited for."""
        return self._at >= len(self.steps)

    def lose(self, goal_ids: set[GoalId]) -> None:
        """The store that had acknowledged these went back in time."""
        self.acknowledged = [goal_id for goal_id in self.acknowledged if goal_id not in goal_ids]

    def _next(self) -> None:
        if not self.is_done:
            self.world.after(self.steps[self._at].think_s, self._send)

    def _advance(self) -> None:
        self._at += 1
        self._next()

    def _send(self) -> None:
        self._attempt += 1
        attempt, world = self._attempt, self.world
        command = self.steps[self._at].command
        serving = [c for c in world.controllers if c.is_up and c.term is not None]
        if not world.bus.available or not serving:
            world.after(RETRY_S, lambda: self._again(attempt))
            return
        payload = msgspec.json.encode(command)
        controller = serving[0] if len(serving) == 1 else world.dice.choice(serving)

        def answer(reply: bytes | ServeError | None) -> None:
            world.send(lambda: self._answered(attempt, reply))

        world.send(lambda: controller.call(command.verb, payload, answer))
        world.after(TIMEOUT_S, lambda: self._again(attempt))

    def _again(self, attempt: int) -> None:
        if attempt == self._attempt:
            self._send()

    def _answered(self, attempt: int, reply: bytes | ServeError | None) -> None:
        if attempt != self._attempt:
            return  # given up by then, and asked again
        match reply:
            case CommandRefused():
                self._attempt += 1
                self.refusals += 1
                self.world.trace(f"{self.name} is refused: {str(reply)[:100]}")
                self._advance()
            case bytes():
                self._attempt += 1
                self._acknowledged(reply)
            case _:
                self.world.after(RETRY_S, lambda: self._again(attempt))

    def _acknowledged(self, payload: bytes) -> None:
        step = self.steps[self._at]
        reply = msgspec.json.decode(payload, type=step.command.reply_type())
        goal_ids: list[GoalId] = []
        match reply:
            case ShutdownReply():
                goal_ids = reply.goal_ids
            case ChangeReply() if reply.goal_id is not None:
                goal_ids = [reply.goal_id]
        goal_ids = [goal_id for goal_id in goal_ids if goal_id not in self.world.lost_goals]
        self.acknowledged += goal_ids
        if step.waits and goal_ids:
            self._wait(step, goal_ids, self.world.time + WAIT_S)
        else:
            self._advance()

    def _wait(self, step: Step, goal_ids: list[GoalId], until: float) -> None:
        goals = self.world.store.checkpoint.goals
        goal_ids = [goal_id for goal_id in goal_ids if goal_id not in self.world.lost_goals]
        for goal_id in goal_ids:
            self.world.check(goal_id in goals, f"{goal_id} was acknowledged and is lost")
        if any(goals[g].status is GoalStatus.PENDING for g in goal_ids) and self.world.time < until:
            self.world.after(0.1, lambda: self._wait(step, goal_ids, until))
            return
        for goal_id in goal_ids:
            status = goals[goal_id].status
            self.world.check(
                step.ends in (None, status), f"{goal_id} of {type(step.command).__name__} ended {status}"
            )
        self._advance()
