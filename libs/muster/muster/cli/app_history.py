"""`muster app history`, `muster app rollback`: an application's former states, each of them a whole.

Why from the audit log: it has every accepted command as it was, so an application goes back by the command that made
its former state, all or nothing as any deploy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
import typer

from muster.cli.changes import ChangeRequest
from muster.cli.completion import complete_application
from muster.cli.output import (
    Cell,
    format_time,
    print_line,
    print_table,
    style_state,
    table,
)
from muster.cli.queries import (
    DryRunOption,
    NoWaitOption,
    ReadRequest,
    TimeoutOption,
    query_command,
    stack_command,
)
from muster.cli.reverts import run_revert
from muster.cli.session import Session, StackChoice
from muster.client.admin import AdminClient
from serve_common.api.commands import DeployApplication
from serve_common.api.queries import GetHistory, ListDeployments
from serve_common.api.views import GoalStatus, HistoryView
from serve_common.errors import BadField, NotFound
from serve_common.names import check_name

_ENTRIES_MAX: Final = 200
"""Newest changes of an application that are looked at."""

AppName = Annotated[
    str,
    typer.Argument(metavar="APP", help="Name of the application.", autocompletion=complete_application),
]


class FormerState(msgspec.Struct, frozen=True, kw_only=True):
    """One deploy of an application."""

    id: int
    """Number of the change, for ``--to``."""
    at: float
    """When it was accepted, in seconds since 1970."""
    principal: str
    """Name that the client claimed."""
    status: str
    """How its goal ended; empty when that is no longer known."""
    is_current: bool
    request: DeployApplication
    """The command."""


async def fetch_states(admin: AdminClient, name: str) -> list[FormerState]:
    """The deploys of an application since it was last deleted, the newest first.

    Raises `NotFound` for an application that was never deployed.
    """
    states: list[FormerState] = []
    for entry in await admin.call(GetHistory(limit=_ENTRIES_MAX, subject=name)):
        if entry.subject != name or entry.verb != DeployApplication.verb:
            continue
        try:
            request = msgspec.convert(entry.request, DeployApplication)
        except msgspec.ValidationError:
            continue  # of a version that had other fields
        status = await _fetch_status(admin, entry)
        has_current = any(each.is_current for each in states)
        states.append(
            FormerState(
                id=entry.id,
                at=entry.at,
                principal=entry.principal,
                status=status,
                is_current=not has_current and status in {GoalStatus.SUCCEEDED.value, ""},
                request=msgspec.structs.replace(request, request_id=None),
            )
        )
    if not states:
        raise NotFound(f"there is no application {name!r}, and none is in the history")
    return states


async def _fetch_status(admin: AdminClient, entry: HistoryView) -> str:
    if entry.goal_id is None:
        return ""
    try:
        return (await admin.wait_for_goal(entry.goal_id, deadline_s=0.0)).status.value
    except NotFound:
        return ""  # ended too long ago


@query_command
def history(*, name: AppName) -> ReadRequest[list[FormerState]]:
    """Show the deploys of an application that 'muster app rollback' can return to.

    Example:
      muster app history shop

    The newest comes first. With --json each has its whole command.
    """
    check_name(name, "APP")

    def show(states: Sequence[FormerState]) -> None:
        rows = table("change", "at", "claimed by", "status", "route", "deployments")
        for state in states:
            deployments = (
                f"{each.name} {each.version}" if each.version else each.name
                for each in state.request.deployments
            )
            rows.add_row(
                Cell(f"{state.id}{' (now)' if state.is_current else ''}"),
                Cell(format_time(state.at)),
                Cell(state.principal or "-"),
                style_state(state.status or "-"),
                Cell(state.request.route_prefix or "-"),
                Cell(", ".join(deployments)),
            )
        print_table(f"Deploys of {name}", rows)
        if len(states) > 1:
            print_line(f"'muster app rollback {name} --to CHANGE' goes back to one")

    return ReadRequest(lambda admin: fetch_states(admin, name), show)


async def build_rollback(admin: AdminClient, name: str, to: int | None) -> ChangeRequest:
    """The deploy by which the application goes back. Raises `NotFound`, and `BadField` naming ``--to``."""
    states = await fetch_states(admin, check_name(name, "APP"))
    current = next((each for each in states if each.is_current), None)
    if to is not None:
        target = next((each for each in states if each.id == to), None)
        if target is None:
            there = ", ".join(str(each.id) for each in states)
            raise BadField("--to", f"{to} is no deploy of {name}; there are: {there}")
    else:
        target = next((each for each in states if _is_former(each, current)), None)
        if target is None:
            raise NotFound(
                f"application {name} has no earlier state that succeeded; 'muster app history {name}'"
            )
    return ChangeRequest(
        command=await _with_present_sizes(admin, target.request),
        what=f"application {name}",
        done=f"is rolled back to change {target.id}",
        already=f"is as of change {target.id} already",
        progress_command="muster app list",
    )


def _is_former(state: FormerState, current: FormerState | None) -> bool:
    if current is None:
        return state.status == GoalStatus.SUCCEEDED.value
    has_failed = state.status not in {GoalStatus.SUCCEEDED.value, ""}
    return state.id < current.id and not has_failed and state.request != current.request


async def _with_present_sizes(admin: AdminClient, request: DeployApplication) -> DeployApplication:
    """The request with the number of replicas that each deployment has now, as a rollback of a deployment keeps it."""
    sizes = {
        each.name.rpartition("/")[2]: each.backend_config.num_replicas
        for each in await admin.call(ListDeployments())
        if each.application == request.name
    }
    deployments = [
        msgspec.structs.replace(
            spec,
            backend_config=msgspec.structs.replace(
                spec.backend_config, num_replicas=sizes.get(spec.name, spec.backend_config.num_replicas)
            ),
        )
        for spec in request.deployments
    ]
    return msgspec.structs.replace(request, deployments=deployments)


@stack_command
def rollback(
    session: Session,
    choice: StackChoice,
    *,
    name: AppName,
    to: Annotated[
        int | None,
        typer.Option(
            "--to", metavar="CHANGE", min=1, help="Deploy to return to, as 'muster app history' numbers it."
        ),
    ] = None,
    timeout_s: TimeoutOption = 600.0,
    no_wait: NoWaitOption = False,
    dry_run: DryRunOption = False,
    as_json: bool = False,
) -> None:
    """Return all deployments of an application to an earlier deploy, and wait until it serves.

    Examples:
      muster app rollback shop
      muster app rollback shop --to 12 --dry-run

    Without --to it returns to the last deploy that succeeded before the current one. The change is all or nothing:
    deployments that the earlier one did not have are deleted, deleted ones come back. Numbers of replicas stay as they
    are. Code that was uploaded need not be uploaded again.
    """
    run_revert(
        session,
        choice,
        f"application {name}",
        lambda admin: build_rollback(admin, name, to),
        timeout_s=timeout_s,
        no_wait=no_wait,
        dry_run=dry_run,
        as_json=as_json,
    )
