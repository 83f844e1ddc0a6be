"""Several changes that one command makes: planned together, and each reported as it ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import final

import msgspec
import typer

from muster.cli.changes import (
    ChangeOptions,
    ChangeOutcome,
    ChangeRequest,
    ChangeResult,
    describe,
    perform,
    show_plan,
)
from muster.cli.output import Progress, print_error, print_json, print_line
from muster.cli.session import ExitCode, Session, StackChoice
from muster.client.admin import Stack
from serve_common.api.views import PlanView
from serve_common.errors import CommandRefused


class ChangeEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How one of several changes ended; printed with ``--json``."""

    what: str
    outcome: ChangeOutcome


@final
class ChangeSet:
    """Makes changes one by one or side by side, and reports each."""

    def __init__(
        self,
        stack: Stack,
        progress: Progress,
        *,
        host: str,
        timeout_s: float,
        is_waiting: bool,
        report: Callable[[ChangeRequest, ChangeOutcome], None],
    ) -> None:
        """``host`` is as in `perform`; ``timeout_s`` is for each change, and ``report`` is called as it ends."""
        self.stack = stack
        self.progress = progress
        self.ended: list[ChangeEnd] = []
        self._host = host
        self._timeout_s = timeout_s
        self._is_waiting = is_waiting
        self._report = report

    @property
    def exit_code(self) -> ExitCode:
        """The worst of the changes that ended."""
        return max((each.outcome.exit_code for each in self.ended), default=ExitCode.OK)

    async def run(self, change: ChangeRequest, *, is_needed: bool = False) -> None:
        """Make one change. One that is refused fails like others.

        ``is_needed``: others need it, so it is waited for in any case.
        """
        try:
            outcome = await perform(
                self.stack.admin,
                change,
                timeout_s=self._timeout_s,
                is_waiting=self._is_waiting or is_needed,
                host=self._host,
                progress=self.progress,
            )
        except CommandRefused as error:
            outcome = ChangeOutcome(result=ChangeResult.FAILED, goal_id=None, error=str(error), took_s=0.0)
        self.add(change, outcome)

    def add(self, change: ChangeRequest, outcome: ChangeOutcome) -> None:
        """Report a change that has ended."""
        self.ended.append(ChangeEnd(what=change.what, outcome=outcome))
        self._report(change, outcome)


def print_end(change: ChangeRequest, outcome: ChangeOutcome) -> None:
    """Print how a change ended: on standard error unless it went well."""
    emit = print_line if outcome.exit_code is ExitCode.OK else print_error
    for line in describe(outcome, change):
        emit(line)


def run_changes(
    session: Session,
    choice: StackChoice,
    options: ChangeOptions,
    title: str,
    *,
    plan: Callable[[Stack], Awaitable[list[tuple[ChangeRequest, PlanView]]]],
    work: Callable[[ChangeSet], Awaitable[None]],
) -> None:
    """Do ``work``, or show its ``plan`` with ``--dry-run``. Exits with the worst code of the changes."""
    address = session.find_stack(choice)
    if options.dry_run:
        plans = session.run(address, title, lambda stack, _progress: plan(stack))
        if options.as_json:
            print_json([{"what": change.what, "plan": msgspec.to_builtins(view)} for change, view in plans])
        else:
            for change, view in plans:
                show_plan(view, change.what, change.already)
        return

    def report(change: ChangeRequest, outcome: ChangeOutcome) -> None:
        if not options.as_json:
            print_end(change, outcome)

    async def run(stack: Stack, progress: Progress) -> ChangeSet:
        changes = ChangeSet(
            stack,
            progress,
            host=address.host,
            timeout_s=options.timeout_s,
            is_waiting=not options.no_wait,
            report=report,
        )
        await work(changes)
        return changes

    done = session.run(address, title, run)
    if options.as_json:
        print_json(done.ended)
    if done.exit_code is not ExitCode.OK:
        raise typer.Exit(done.exit_code)
