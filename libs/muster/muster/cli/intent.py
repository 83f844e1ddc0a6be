"""What a person asked to change, how it ended, and what that means for the exit code."""

from __future__ import annotations

from enum import Enum

import msgspec

from muster.cli.exit_codes import ExitCode
from serve_common.names import GoalId
from serve_common.wires.commands import Change, CreateEndpoint, Deploy, DeployApplication, Shutdown
from serve_common.wires.views import DeploymentView, GoalStatus


class Intent(msgspec.Struct, frozen=True, kw_only=True):
    """A command and the words in which its end is told."""

    command: Change | Shutdown
    what: str
    """What it is about, such as ``endpoint digits``."""
    done: str
    """What then is true of it, such as ``is created``."""
    already: str = "is already as given"
    """What is true of it when there is nothing to do."""
    look: str = "muster status"
    """The command that shows how it goes."""
    deployment: str | None = None
    """The deployment whose replicas tell how it went."""
    question: str = ""
    """Asked before anything is sent; empty for none."""

    @property
    def route(self) -> str | None:
        """Where HTTP reaches what it makes."""
        match self.command:
            case Deploy() | DeployApplication():
                return self.command.route_prefix
            case CreateEndpoint():
                return self.command.route
            case _:
                return None

    @property
    def methods(self) -> list[str]:
        """By which HTTP reaches it; empty for what has no route."""
        match self.command:
            case Deploy() | DeployApplication() | CreateEndpoint():
                return self.command.methods
            case _:
                return []


class ChangeResult(Enum):
    """How a change ended, as far as we waited."""

    UNCHANGED = "unchanged"
    ACCEPTED = "accepted"
    """Recorded; not waited for."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SUPERSEDED = "superseded"
    PENDING = "pending"
    """The time to wait is over."""


EXIT_CODES = {
    ChangeResult.UNCHANGED: ExitCode.OK,
    ChangeResult.ACCEPTED: ExitCode.OK,
    ChangeResult.SUCCEEDED: ExitCode.OK,
    ChangeResult.FAILED: ExitCode.FAILED,
    ChangeResult.SUPERSEDED: ExitCode.FAILED,
    ChangeResult.PENDING: ExitCode.TIMED_OUT,
}
RESULT_OF = {
    GoalStatus.SUCCEEDED: ChangeResult.SUCCEEDED,
    GoalStatus.FAILED: ChangeResult.FAILED,
    GoalStatus.SUPERSEDED: ChangeResult.SUPERSEDED,
    GoalStatus.PENDING: ChangeResult.PENDING,
}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What is known at the end of a change; with ``--json`` this is what is printed."""

    result: ChangeResult
    goal_id: GoalId | None
    """The last one waited for; None: there was nothing to do and never had been."""
    goal_ids: list[GoalId] = []
    """All of them; only a shutdown has several."""
    error: str = ""
    """Of a failed one the user's traceback or the reason; of a superseded one what replaced it; of an unchanged one
    how the older change ended that made it so, if that failed."""
    message: str = ""
    """Of a pending one: what it waits for."""
    took_s: float
    deployment: DeploymentView | None = None
    urls: list[str] = []
    """Where HTTP reaches it, when proxies told their addresses."""

    @property
    def exit_code(self) -> ExitCode:
        """For the end of the program."""
        return EXIT_CODES[self.result]
