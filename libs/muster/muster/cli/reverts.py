"""Changes whose command is found in what the controller knows, such as its audit log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import typer

from muster.cli.changes import ChangeOutcome, ChangeRequest, perform, print_outcome, print_plan
from muster.cli.output import Progress
from muster.cli.session import ExitCode, Session, StackChoice
from muster.client.admin import AdminClient, Stack
from serve_common.api.queries import Plan
from serve_common.api.views import PlanView


def run_revert(
    session: Session,
    choice: StackChoice,
    title: str,
    build: Callable[[AdminClient], Awaitable[ChangeRequest]],
    *,
    timeout_s: float,
    no_wait: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Make the change that ``build`` finds in what the controller knows, as `change_command` makes others."""
    with session.reporting(
        as_json=as_json, interrupted="stopped waiting; the change goes on: 'muster status'"
    ):
        address = session.find_stack(choice)

        async def work(stack: Stack, progress: Progress) -> tuple[ChangeRequest, PlanView | ChangeOutcome]:
            change = await build(stack.admin)
            if dry_run:
                return change, await stack.admin.call(Plan.for_command(change.command))
            outcome = await perform(
                stack.admin,
                change,
                timeout_s=timeout_s,
                is_waiting=not no_wait,
                host=address.host,
                progress=progress,
                http_url=address.http_url,
            )
            return change, outcome

        change, found = session.run(address, title, work)
        if isinstance(found, PlanView):
            print_plan(found, change, as_json=as_json)
            return
        print_outcome(found, change, as_json=as_json)
        if found.exit_code is not ExitCode.OK:
            raise typer.Exit(found.exit_code)
