"""Commands that change something: each says only what it is about, and all send, wait, report and dry-run alike."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import typer

from muster.cli import output
from muster.cli.exit_codes import ExitCode
from muster.cli.intent import ChangeResult, Intent, Outcome
from muster.cli.options import DryRunOption, NoWaitOption, TimeoutOption
from muster.cli.perform import perform
from muster.cli.session import Session, session_of
from muster.cli.show_plan import show_plan
from muster.cli.signature import STACK_OPTIONS, composed, parameter, stack_choice
from muster.cli.wording import describe
from muster.client.address import StackAddress
from serve_common.errors import BadField
from serve_common.wires.views import PlanView

DRY_RUN = "dry_run"
"""By this parameter a changing command is known."""


def changing(
    *, timeout_s: float = 120.0, options: Sequence[inspect.Parameter] = ()
) -> Callable[[Callable[..., Intent]], Callable[..., None]]:
    """Make a command of a function that turns ``(session, *, arguments)`` into an `Intent`.

    ``options`` are added to its own; those that were given reach it as the keyword argument ``given``, by name.
    """
    names = [each.name for each in options]
    shared = (
        *options,
        parameter("timeout_s", TimeoutOption, timeout_s),
        parameter("no_wait", NoWaitOption, default=False),
        parameter(DRY_RUN, DryRunOption, default=False),
        *STACK_OPTIONS,
    )

    def make(build: Callable[..., Intent]) -> Callable[..., None]:
        def run(context: typer.Context, values: dict[str, Any]) -> None:
            session = session_of(context)
            as_json, waits = values.pop("as_json"), values.pop("timeout_s")
            no_wait, dry_run = values.pop("no_wait"), values.pop(DRY_RUN)
            choice = stack_choice(values)
            if options:
                taken = {name: values.pop(name) for name in names}
                values["given"] = {name: value for name, value in taken.items() if value is not None}
            with session.reporting(as_json=as_json):
                intent = build(session, **values)
                address = session.find_stack(choice)
                if dry_run:
                    _show_plan(asyncio.run(_plan(session, address, intent)), intent, as_json=as_json)
                    return
                if intent.question:
                    confirm(intent.question)
            goes_on = f"stopped waiting; the change goes on: '{intent.look}'"
            with session.reporting(as_json=as_json, interrupted=goes_on):
                outcome = asyncio.run(
                    _perform(session, address, intent, timeout_s=waits, is_waiting=not no_wait)
                )
                _show(outcome, intent, as_json=as_json)
                if outcome.exit_code is not ExitCode.OK:
                    raise typer.Exit(outcome.exit_code)

        return composed(build, run, shared)

    return make


async def _plan(session: Session, address: StackAddress, intent: Intent) -> PlanView:
    with output.Progress(intent.what) as progress:
        async with session.connect(address, progress) as stack:
            return await stack.admin.plan(intent.command)


async def _perform(
    session: Session, address: StackAddress, intent: Intent, *, timeout_s: float, is_waiting: bool
) -> Outcome:
    with output.Progress(intent.what) as progress:
        async with session.connect(address, progress) as stack:
            return await perform(
                stack.admin,
                intent,
                timeout_s=timeout_s,
                is_waiting=is_waiting,
                host=address.host,
                progress=progress,
            )


def confirm(question: str) -> None:
    """Ask a person; whoever says no ends the program. Raises `BadField` where nobody answers."""
    try:
        is_sure = typer.confirm(question, err=True)
    except typer.Abort as error:
        output.complain("")
        raise BadField("--yes", "is needed where nobody answers; nothing was changed") from error
    if not is_sure:
        output.complain("nothing was changed")
        raise typer.Exit(ExitCode.FAILED)


def _show_plan(view: PlanView, intent: Intent, *, as_json: bool) -> None:
    if as_json:
        output.print_json(view)
    else:
        show_plan(view, intent)


def _show(outcome: Outcome, intent: Intent, *, as_json: bool) -> None:
    if as_json:
        output.print_json(outcome)
        if outcome.result is not ChangeResult.FAILED:
            return
    tell = output.say if outcome.exit_code is ExitCode.OK else output.complain
    for line in describe(outcome, intent):
        tell(line)
