"""`muster delete`: a deployment stops, in order, and is gone."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
import typer

from muster.cli import output
from muster.cli.connection import StackChoice
from muster.cli.deploying import show_progress
from muster.cli.exit_codes import ExitCode
from muster.cli.options import (
    JsonOption,
    NatsOption,
    NoWaitOption,
    PasswordFileOption,
    TimeoutOption,
    UserOption,
)
from muster.cli.session import Session, session_of
from serve_common.names import BackendTag, GoalId, deployment_tag
from serve_common.wires.views import GoalStatus, GoalView


class DeleteOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a delete ended, as far as we waited."""

    name: str
    goal_id: GoalId | None
    """None: there was no such deployment."""
    status: GoalStatus | None = None
    """None: not waited for, or nothing to wait for."""
    error: str = ""
    message: str = ""

    @property
    def exit_code(self) -> ExitCode:
        """For the end of the program."""
        match self.status:
            case None | GoalStatus.SUCCEEDED:
                return ExitCode.OK
            case GoalStatus.PENDING:
                return ExitCode.TIMED_OUT
            case GoalStatus.FAILED | GoalStatus.SUPERSEDED:
                return ExitCode.FAILED


def delete(
    context: typer.Context,
    *,
    name: Annotated[str, typer.Argument(help="deployment or app/deployment.")],
    timeout_s: TimeoutOption = 120.0,
    no_wait: NoWaitOption = False,
    as_json: JsonOption = False,
    nats: NatsOption = None,
    user: UserOption = None,
    password_file: PasswordFileOption = None,
) -> None:
    """Delete a deployment and wait until its replicas are gone.

    Example:
      muster delete digits

    Requests in flight finish first. Deleting what does not exist is a
    success.
    """
    session = session_of(context)
    with session.reporting(
        as_json=as_json, interrupted=f"stopped waiting; the delete goes on: 'muster status {name}'"
    ):
        tag = deployment_tag(name)
        stack = StackChoice(nats=nats, user=user, password_file=password_file)
        outcome = asyncio.run(_delete(session, stack, tag, timeout_s=timeout_s, is_waiting=not no_wait))
        if as_json:
            output.print_json(outcome)
        else:
            (output.say if outcome.exit_code is ExitCode.OK else output.complain)(_describe(outcome))
        if outcome.exit_code is not ExitCode.OK:
            raise typer.Exit(outcome.exit_code)


async def _delete(
    session: Session, options: StackChoice, tag: BackendTag, *, timeout_s: float, is_waiting: bool
) -> DeleteOutcome:
    with output.Progress(output.short_name(tag)) as progress:
        async with session.connect(session.find_stack(options), progress) as stack:
            goal_id = (await stack.admin.delete_deployment(tag)).goal_id
            if goal_id is None or not is_waiting:
                return DeleteOutcome(name=tag, goal_id=goal_id)
            view: GoalView = await stack.admin.wait_for_goal(
                goal_id, deadline_s=timeout_s, on_progress=lambda goal: show_progress(goal, progress)
            )
            return DeleteOutcome(
                name=tag, goal_id=goal_id, status=view.status, error=view.error, message=view.message
            )


def _describe(outcome: DeleteOutcome) -> str:
    name = output.short_name(outcome.name)
    match outcome.status:
        case None if outcome.goal_id is None:
            return f"nothing to do: there is no deployment {name}"
        case None:
            return f"accepted as {outcome.goal_id}; 'muster status {name}' shows how it goes"
        case GoalStatus.SUCCEEDED:
            return f"{name} is deleted"
        case GoalStatus.PENDING:
            return f"error: {name} is not gone yet: {outcome.message}\nIt goes on; 'muster status {name}' shows how."
        case GoalStatus.FAILED:
            return f"error: {name} could not be deleted: {outcome.error}"
        case GoalStatus.SUPERSEDED:
            return f"error: another change of {name} came after this one: {outcome.error}"
