"""`muster rollout …`: start a judged rollout, watch it, and change what becomes of it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from muster.cli import parsing
from muster.cli.changes import ChangeRequest, change_command
from muster.cli.config_options import (
    BACKEND_OPTIONS,
    CODE_OPTIONS,
    build_replica_config,
    parse_backend_overrides,
)
from muster.cli.help import Commands
from muster.cli.output import Cell, Progress, print_json_line, print_table, table
from muster.cli.queries import DeploymentName, ReadRequest, query_command, stream_command
from muster.cli.session import ExitCode, Session
from muster.cli.terminal import get_console, render
from muster.client.requests import StackAddress
from serve_common.api.commands import ControlRollout, RolloutAction, StartRollout
from serve_common.api.queries import GetRollouts
from serve_common.api.rollout_views import RolloutView
from serve_common.api.views import GoalStatus
from serve_common.config.rollout import RolloutConfig
from serve_common.errors import TransientError
from serve_common.names import deployment_tag, short_name

app = Commands(
    help="""Roll out a new version step by step: start, list, watch, pause, resume, step, promote, abort.

    At each step the new version is compared, request by request, with as many replicas of the old one. It goes on once
    its requests have shown that it is no worse, and is aborted once they have shown that it is. Until then it stays.
    """
)
_RETRY_S: Final = 15.0
_BAR_WIDTH: Final = 24
_STYLES: Final = {"passed": "green", "failed": "red", "unknown": "yellow"}


@change_command(timeout_s=86_400.0, options=(*CODE_OPTIONS, *BACKEND_OPTIONS))
def start(
    session: Session,
    *,
    name: DeploymentName,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="IMPORT_PATH", help="New class or function. Default: the present one."),
    ] = None,
    version: Annotated[
        str | None, typer.Option("--version", metavar="VERSION", help="Label of the new code, such as v2.")
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            "--steps",
            metavar="STEPS",
            help="Steps with commas between, each [shadow] N% [DURATION] [wait]. "
            f"Default: those of the deployment's --rollout, or '{', '.join(RolloutConfig().steps)}'.",
        ),
    ] = None,
    limits: Annotated[
        str | None,
        typer.Option(
            "--limits",
            metavar="JSON|@FILE",
            help="Other settings of the rollout, as a JSON object by field name, such as "
            "'{\"max_latency_ratio\": 2}'.",
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Try a version again that was aborted a short time ago.")
    ] = False,
    overrides: Mapping[str, Any],
) -> ChangeRequest:
    """Roll out a new version of a deployment, and wait until it is promoted or aborted.

    Examples:
      muster rollout start hello --to hello:Hello --version v2
      muster rollout start hello --version v2 --steps 'shadow 100% 60s, 5%, 100%'

    What is not given stays as it is deployed. An abort is a failure, whose error has the figures.
    """
    tag = deployment_tag(name)
    replica_config = _replica_fields(session, to, overrides)
    fields = dict(parsing.read_object(limits, session.directory, "--limits"))
    if steps is not None:
        fields["steps"] = [step.strip() for step in steps.split(",")]
    backend_fields = _backend_fields(session, overrides)
    what = short_name(tag)
    return ChangeRequest(
        command=StartRollout(
            name=tag,
            replica_config=replica_config,
            backend_config=backend_fields,
            version=version,
            rollout_fields=fields,
            again=again,
        ),
        what=what,
        done=f"runs the new version{f' {version}' if version else ''}: every step passed",
        progress_command=f"muster rollout watch {what}",
        deployment=tag,
    )


def _replica_fields(session: Session, to: str | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the code that are set."""
    changed = {each.name for each in CODE_OPTIONS if overrides.get(each.name) is not None}
    if to is None and not changed:
        return {}
    built = msgspec.to_builtins(build_replica_config(to or "module:attribute", overrides, session.directory))
    fields: dict[str, Any] = {}
    if to is not None:
        fields |= {"import_path": built["import_path"], "code": ""}
    fields |= {name: built[name] for name in ("app_dir", "init_args", "init_kwargs") if name in changed}
    if changed - {"app_dir", "init_args", "init_kwargs"}:
        fields["ray_actor_options"] = built.get("ray_actor_options", {})
    return fields


def _backend_fields(session: Session, overrides: Mapping[str, Any]) -> dict[str, Any]:
    names = {each.name for each in BACKEND_OPTIONS}
    changed = {name: value for name, value in overrides.items() if name in names and value is not None}
    return parse_backend_overrides(changed, None, session.directory) if changed else {}


@query_command
def list_rollouts() -> ReadRequest[list[RolloutView]]:
    """List rollouts: of each deployment the present one, or the last."""
    return ReadRequest(GetRollouts(), _show_list)


def _show_list(views: Sequence[RolloutView]) -> None:
    rows = table("name", "version", "step", "state", "why")
    for view in views:
        rows.add_row(
            Cell(short_name(view.backend_tag)),
            Cell(view.version or "-"),
            Cell(f"{view.step + 1}/{len(view.steps)} ({view.steps[view.step]})"),
            Cell(view.outcome or view.state, style="red" if view.outcome == "aborted" else ""),
            Cell(view.reason),
        )
    print_table("Rollouts", rows)


@stream_command
async def watch(
    session: Session, address: StackAddress, *, name: DeploymentName, as_json: bool = False
) -> None:
    """Watch a rollout until it is decided: its step, and what its requests have shown.

    Example:
      muster rollout watch hello

    Of what is not shown yet it says about how many more requests that needs. The exit code is 0 where it was
    promoted. With --json, prints a line of JSON at each change.
    """
    query, last = GetRollouts(name=deployment_tag(name)), None
    with Progress("rollout") as progress, ExitStack() as screen:
        async with session.connect(address, progress, retry_for_s=_RETRY_S) as stack:
            live = None
            while True:
                try:
                    [view] = await stack.admin.call(query)
                except TransientError as error:
                    progress.show(str(error))
                    await asyncio.sleep(1)
                    continue
                progress.stop()
                if view != last:
                    last = view
                    if as_json:
                        print_json_line(msgspec.json.encode(view).decode())
                    elif not sys.stdout.isatty():
                        get_console().print(_line(view), soft_wrap=True)
                    else:
                        live = live or screen.enter_context(Live(console=get_console(), auto_refresh=False))
                        live.update(_drawn(view), refresh=True)
                if view.outcome:
                    break
                await asyncio.sleep(0.5)
    if view.outcome != "promoted":
        raise typer.Exit(ExitCode.FAILED)


def _line(view: RolloutView) -> str:
    state = view.outcome or view.state
    gates = "; ".join(
        f"{gate.kind} {gate.status}"
        + (f" (about {gate.requests_needed} more requests)" if gate.requests_needed else "")
        for gate in view.gates
    )
    at = f"step {view.step + 1}/{len(view.steps)} {view.steps[view.step]}"
    found = view.differences.examples if view.differences and view.outcome == "aborted" else []
    examples = f" ({'; '.join(found)})" if found else ""
    needed = max((gate.requests_needed or 0 for gate in view.gates if gate.status == "unknown"), default=0)
    more = f"; about {needed} more requests are needed" if needed and view.reason and not view.outcome else ""
    return f"{short_name(view.backend_tag)} {state}, {at}: {view.reason or gates}{more}{examples}"


def _drawn(view: RolloutView) -> Group:
    rows = table("gate", "status", "needs", "figures")
    for gate in view.gates:
        needs = "-" if gate.status != "unknown" else "?"
        if gate.requests_needed:
            needs = f"about {gate.requests_needed:,} more requests"
        rows.add_row(
            Cell(gate.kind),
            Cell(gate.status, style=_STYLES.get(gate.status, "")),
            Cell(needs),
            Cell(gate.text),
        )
    return Group(
        Text(
            f"{short_name(view.backend_tag)} {view.version or ''}: {view.outcome or view.state}", style="bold"
        ),
        *(Text(f"  ✓ {one.step}: {one.requests:,} requests compared; {one.why}") for one in view.passed),
        Text(f"  {_bar(view)} {view.steps[view.step]}{'' if view.is_in_force else ' (its replicas start)'}"),
        render(rows),
        *map(Text, _differences(view)),
        Text(view.reason, style="red" if view.outcome == "aborted" else "yellow"),
    )


def _differences(view: RolloutView) -> list[str]:
    found = view.differences
    if found is None:
        return []
    figures = f"{found.different:,} of {found.compared:,} compared answers differ"
    return [
        f"  {figures}; baseline: {found.baseline_different:,}",
        *(f"    {example}" for example in found.examples),
    ]


def _bar(view: RolloutView) -> str:
    done = len(view.steps) if view.outcome == "promoted" else view.step
    filled = round(_BAR_WIDTH * done / len(view.steps))
    return f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] step {view.step + 1} of {len(view.steps)}:"


ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for the history.")]


def _control(name: str, action: RolloutAction, done: str, *, reason: str = "") -> ChangeRequest:
    tag = deployment_tag(name)
    return ChangeRequest(
        command=ControlRollout(name=tag, action=action, reason=reason),
        what=short_name(tag),
        done=done,
        already="is that way already",
        progress_command=f"muster rollout watch {short_name(tag)}",
        ends=GoalStatus.FAILED if action is RolloutAction.ABORT else GoalStatus.SUCCEEDED,
    )


@change_command()
def pause(*, name: DeploymentName) -> ChangeRequest:
    """Keep a rollout at its step.

    Example:
      muster rollout pause hello

    A version that is shown to be worse is still aborted.
    """
    return _control(name, RolloutAction.PAUSE, "stays at its step")


@change_command()
def resume(*, name: DeploymentName) -> ChangeRequest:
    """Let a paused rollout go on.

    Example:
      muster rollout resume hello
    """
    return _control(name, RolloutAction.RESUME, "goes on")


@change_command()
def step(*, name: DeploymentName) -> ChangeRequest:
    """Let the present step pass, whatever its requests have shown so far.

    Example:
      muster rollout step hello

    Also one that waits for a person, as `wait` in its steps says.
    """
    return _control(name, RolloutAction.STEP, "goes to its next step")


@change_command()
def promote(*, name: DeploymentName) -> ChangeRequest:
    """Skip the other steps: the new version takes the place of the old one.

    Example:
      muster rollout promote hello
    """
    return _control(name, RolloutAction.PROMOTE, "is promoted")


@change_command()
def abort(*, name: DeploymentName, reason: ReasonOption = "") -> ChangeRequest:
    """Give all requests back to the old version, and end the rollout.

    Example:
      muster rollout abort hello --reason 'answers look wrong'

    Waits until no request goes to the new version any more.
    """
    return _control(name, RolloutAction.ABORT, "is aborted", reason=reason)


app.command("start")(start)
app.command("list")(list_rollouts)
app.command("watch")(watch)
for _command in (pause, resume, step, promote, abort):
    app.command(_command.__name__)(_command)
