"""`muster goal wait`: for changes that were begun with --no-wait, or by somebody else."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from muster.cli import output
from muster.cli.connection import StackChoice
from muster.cli.exit_codes import ExitCode
from muster.cli.group import group
from muster.cli.intent import EXIT_CODES, RESULT_OF
from muster.cli.options import (
    CredsOption,
    JsonOption,
    NatsOption,
    PasswordFileOption,
    TimeoutOption,
    UserOption,
)
from muster.cli.perform import show_progress
from muster.cli.session import Session, session_of
from serve_common.names import GoalId
from serve_common.wires.views import GoalStatus, GoalView

app = group("Changes that were begun: wait.")


@app.command()
def wait(
    context: typer.Context,
    *,
    goal_id: Annotated[str, typer.Argument(metavar="GOAL", help="As --no-wait printed it.")],
    timeout_s: TimeoutOption = 600.0,
    as_json: JsonOption = False,
    nats: NatsOption = None,
    creds: CredsOption = None,
    user: UserOption = None,
    password_file: PasswordFileOption = None,
) -> None:
    """Wait until a change is done, and tell how it ended.

    Example:
      muster goal wait goal-7 --timeout-s 60

    With --timeout-s 0 it only tells how things stand.
    """
    session = session_of(context)
    with session.reporting(as_json=as_json, interrupted="stopped waiting; the change goes on"):
        stack = StackChoice(nats=nats, creds=creds, user=user, password_file=password_file)
        view = asyncio.run(_wait(session, stack, GoalId(goal_id), timeout_s))
        code = EXIT_CODES[RESULT_OF[view.status]]
        if as_json:
            output.print_json(view)
        else:
            (output.say if code is ExitCode.OK else output.complain)(_describe(view))
        if code is not ExitCode.OK:
            raise typer.Exit(code)


async def _wait(session: Session, choice: StackChoice, goal_id: GoalId, timeout_s: float) -> GoalView:
    with output.Progress(goal_id) as progress:
        async with session.connect(session.find_stack(choice), progress) as stack:
            return await stack.admin.wait_for_goal(
                goal_id, deadline_s=timeout_s, on_progress=lambda goal: show_progress(goal, progress)
            )


def _describe(view: GoalView) -> str:
    match view.status:
        case GoalStatus.SUCCEEDED:
            return f"{view.goal_id} succeeded"
        case GoalStatus.PENDING:
            return f"error: {view.goal_id} is not done yet: {view.message}"
        case GoalStatus.FAILED:
            return f"error: {view.goal_id} failed:\n{view.error.rstrip()}"
        case GoalStatus.SUPERSEDED:
            return f"error: another change came after {view.goal_id}: {view.error}"
