"""Commands that change state: send, wait, report; with --dry-run only the plan is shown."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import msgspec
import typer

from muster.cli.output import (
    Cell,
    Progress,
    print_error,
    print_json,
    print_line,
    print_table,
    shorten,
    style_state,
    table,
)
from muster.cli.queries import (
    STACK_OPTIONS,
    DryRunOption,
    NoWaitOption,
    TimeoutOption,
    build_command,
    call_builder,
    parameter,
    pop_stack_choice,
)
from muster.cli.session import ExitCode, Session, StackChoice, get_session
from muster.client.admin import AdminClient
from muster.client.requests import proxy_urls
from serve_common.api.commands import (
    ChangeReply,
    Command,
    CreateEndpoint,
    Deploy,
    DeployApplication,
    Shutdown,
)
from serve_common.api.queries import GetDeploymentInfo, GetHttpProxies, Plan
from serve_common.api.views import DeploymentStatus, DeploymentView, GoalStatus, GoalView, PlanView
from serve_common.errors import BadField, BusUnavailable, NotFound, ServeError
from serve_common.names import GoalId, short_name


class ChangeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A command and the texts of its report."""

    command: Command[ChangeReply] | Shutdown
    what: str
    """Subject of the report, such as ``endpoint digits``."""
    done: str
    """Predicate after success, such as ``is created``."""
    already: str = "is already as given"
    """Predicate when there was nothing to do."""
    progress_command: str = "muster status"
    """The command that shows progress."""
    deployment: str | None = None
    """The deployment whose replicas are reported at the end; None for none."""
    question: str = ""
    """Confirmation prompt before anything is sent; empty for none. ``{address}`` in it is that of the stack."""
    ends: GoalStatus = GoalStatus.SUCCEEDED
    """How its goal ends when the change is made: that of a rollout fails when it is aborted as wanted."""
    without_stack: str = ""
    """What is said, and is no failure, where no stack is found; empty: it is a failure."""

    @property
    def route(self) -> str | None:
        """HTTP path prefix of what the command creates; None without a route."""
        match self.command:
            case Deploy() | DeployApplication():
                return self.command.route_prefix
            case CreateEndpoint():
                return self.command.route
            case _:
                return None

    @property
    def methods(self) -> list[str]:
        """Accepted HTTP methods of what the command creates; empty when it creates no route."""
        match self.command:
            case Deploy() | DeployApplication() | CreateEndpoint():
                return self.command.methods
            case _:
                return []


class ChangeResult(Enum):
    """How a change ended, as far as the command waited."""

    UNCHANGED = "unchanged"
    ACCEPTED = "accepted"
    """Recorded; not waited for."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SUPERSEDED = "superseded"
    PENDING = "pending"
    """The timeout passed first."""


EXIT_CODES = {
    ChangeResult.UNCHANGED: ExitCode.OK,
    ChangeResult.ACCEPTED: ExitCode.OK,
    ChangeResult.SUCCEEDED: ExitCode.OK,
    ChangeResult.FAILED: ExitCode.FAILED,
    ChangeResult.SUPERSEDED: ExitCode.FAILED,
    ChangeResult.PENDING: ExitCode.TIMED_OUT,
}
RESULT_BY_STATUS = {
    GoalStatus.SUCCEEDED: ChangeResult.SUCCEEDED,
    GoalStatus.FAILED: ChangeResult.FAILED,
    GoalStatus.SUPERSEDED: ChangeResult.SUPERSEDED,
    GoalStatus.PENDING: ChangeResult.PENDING,
}


class ChangeOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a change command; printed with ``--json``."""

    result: ChangeResult
    goal_id: GoalId | None
    """The last goal waited for; None: there was nothing to do and never had been."""
    goal_ids: list[GoalId] = []
    """All goals; only a shutdown has several."""
    error: str = ""
    """FAILED: the user's traceback or the reason. SUPERSEDED: the goal that replaced it. UNCHANGED: the error of the
    earlier change that produced the current state, if that failed."""
    message: str = ""
    """PENDING: what the goal waits for."""
    took_s: float
    deployment: DeploymentView | None = None
    urls: list[str] = []
    """URLs of the route, if live proxies reported their addresses."""

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of the program for this result."""
        return EXIT_CODES[self.result]


async def perform(
    admin: AdminClient,
    change: ChangeRequest,
    *,
    timeout_s: float,
    is_waiting: bool,
    host: str,
    progress: Progress,
    http_url: str = "",
) -> ChangeOutcome:
    """Send the change and wait. Raises what the controller raises.

    ``http_url`` is the base of reported URLs; empty: the addresses of proxies, in which ``host`` replaces wildcards.
    """
    loop = asyncio.get_running_loop()
    started_at = loop.time()
    goal_ids, updating = await _send(admin, change)
    goal_id = goal_ids[-1] if goal_ids else None

    def elapsed_s() -> float:
        return loop.time() - started_at

    if not is_waiting:
        result = ChangeResult.ACCEPTED if updating else ChangeResult.UNCHANGED
        return ChangeOutcome(result=result, goal_id=goal_id, goal_ids=goal_ids, took_s=elapsed_s())
    if not updating:
        # The goal belongs to an earlier change: it matters here only while it is still pending.
        older = await _ended(admin, goal_ids)
        if older is None or older.status is not GoalStatus.PENDING:
            deployment = await _deployment(admin, change)
            return ChangeOutcome(
                result=ChangeResult.UNCHANGED,
                goal_id=goal_id,
                goal_ids=goal_ids,
                error="" if older is None else older.error,
                took_s=elapsed_s(),
                deployment=deployment,
                urls=await _urls(admin, change, host, http_url),
            )
    view: GoalView | None = None
    for each in goal_ids:
        remaining_s = max(0.0, timeout_s - elapsed_s())
        view = await admin.wait_for_goal(
            each, deadline_s=remaining_s, on_progress=lambda goal: show_progress(goal, progress)
        )
        if view.status is not GoalStatus.SUCCEEDED:
            break
    status = GoalStatus.SUCCEEDED if view is None or view.status is change.ends else view.status
    result = RESULT_BY_STATUS[status]
    return ChangeOutcome(
        result=result,
        goal_id=goal_id if view is None else view.goal_id,
        goal_ids=goal_ids,
        error="" if view is None or result is ChangeResult.SUCCEEDED else view.error,
        message="" if view is None else view.message,
        took_s=elapsed_s(),
        deployment=await _deployment(admin, change),
        urls=await _urls(admin, change, host, http_url) if result is ChangeResult.SUCCEEDED else [],
    )


def show_progress(goal: GoalView, progress: Progress) -> None:
    """Show what a pending goal waits for."""
    if goal.status is GoalStatus.PENDING:
        progress.show(goal.message)


async def _send(admin: AdminClient, change: ChangeRequest) -> tuple[list[GoalId], bool]:
    command = change.command
    if isinstance(command, Shutdown):
        goal_ids = (await admin.call(command)).goal_ids
        return goal_ids, bool(goal_ids)
    reply = await admin.call(command)
    return ([] if reply.goal_id is None else [reply.goal_id]), reply.updating


async def _ended(admin: AdminClient, goal_ids: Sequence[GoalId]) -> GoalView | None:
    for goal_id in goal_ids:
        try:
            return await admin.wait_for_goal(goal_id, deadline_s=0.0)
        except NotFound:
            return None  # ended so long ago that it is no longer retained
    return None


async def _deployment(admin: AdminClient, change: ChangeRequest) -> DeploymentView | None:
    if change.deployment is None:
        return None
    try:
        return await admin.call(GetDeploymentInfo(name=change.deployment))
    except NotFound:
        return None


async def _urls(admin: AdminClient, change: ChangeRequest, host: str, http_url: str) -> list[str]:
    if change.route is None:
        return []
    if http_url:
        return [f"{http_url}{change.route}"]
    try:
        proxies = await admin.call(GetHttpProxies())
    except ServeError:
        return []  # only a convenience: the change itself is done
    return [f"{base}{change.route}" for base in proxy_urls(proxies, host)]


def show_plan(view: PlanView, what: str, already: str) -> None:
    """Print which replicas would start, stop or be reconfigured, and why.

    ``what`` and ``already`` are as in `ChangeRequest`.
    """
    if not view.updating:
        print_line(f"nothing to do: {what} {already}")
    elif view.replicas:
        counts = Counter(each.action.value for each in view.replicas)
        would = ", ".join(f"{count} to {action}" for action, count in counts.items())
        rows = table("action", "backend", "replica", "why")
        for each in view.replicas:
            replica = "(new)" if each.replica_tag is None else short_name(each.replica_tag)
            rows.add_row(
                style_state(each.action.value),
                Cell(short_name(each.backend_tag)),
                Cell(replica),
                Cell(each.why),
            )
        print_table(f"{what}: {would}", rows)
    else:
        print_line(f"{what}: would change; no replica is touched")
    for note in view.notes:
        print_line(f"note: {note}")
    print_line("this was a dry run; nothing was changed")


_SERVING = frozenset({"running", "updating"})


def describe(outcome: ChangeOutcome, change: ChangeRequest) -> list[str]:
    """Lines that report the outcome and, where known, what to do next."""
    what, deployment = change.what, outcome.deployment
    match outcome.result:
        case ChangeResult.UNCHANGED:
            state = "" if deployment is None else f"; it is {deployment.status.value}"
            lines = [f"nothing to do: {what} {change.already}{state}"]
            if deployment is not None and deployment.message:
                lines.append(deployment.message)
            elif deployment is None and outcome.error:
                lines.append(f"note: its last change, {outcome.goal_id}, failed: {shorten(outcome.error)}")
        case ChangeResult.ACCEPTED:
            lines = [f"accepted as {', '.join(outcome.goal_ids) or 'done'}; {_progress_hint(change)}"]
        case ChangeResult.SUCCEEDED:
            serving = "" if deployment is None else f": {_serving(deployment)}"
            lines = [f"{what} {change.done}{serving} ({outcome.took_s:.1f} s)"]
        case ChangeResult.FAILED:
            lines = [f"error: {what}: the change failed:", outcome.error.rstrip()]
            lines += _after_failure(outcome, change)
        case ChangeResult.SUPERSEDED:
            lines = [f"error: another change of {what} came after this one: {outcome.error}"]
        case ChangeResult.PENDING:
            reason = f": {outcome.message}" if outcome.message else ""
            lines = [
                f"error: {what}: not done after {outcome.took_s:.0f} s{reason}",
                f"It goes on; {_progress_hint(change)}, 'muster goal wait {outcome.goal_id}' waits for it.",
            ]
    return [*lines, *(_curl(url, change) for url in outcome.urls)]


def _progress_hint(change: ChangeRequest) -> str:
    return f"'{change.progress_command}' shows how it goes"


def _after_failure(outcome: ChangeOutcome, change: ChangeRequest) -> list[str]:
    lines = []
    command = change.command
    if (
        isinstance(command, Deploy)
        and "ModuleNotFoundError" in outcome.error
        and not command.replica_config.app_dir
    ):
        lines.append("hint: --app-dir sets the directory that replicas import the module from")
    if change.deployment is None:
        return lines
    deployment = outcome.deployment
    serving = [] if deployment is None else [r for r in deployment.replicas if r.state in _SERVING]
    if serving:
        version = f" (version {serving[0].version})" if serving[0].version else ""
        lines.append(f"What served before still serves: {_replicas(len(serving))}{version}.")
    elif deployment is not None and _is_at_zero(deployment):
        lines.append("What was there before is back, scaled to zero as it was.")
    else:
        lines.append(f"Nothing serves {change.what}.")
    return lines


def _is_at_zero(deployment: DeploymentView) -> bool:
    is_well = deployment.status is DeploymentStatus.HEALTHY
    return is_well and deployment.backend_config.num_replicas == 0


def _serving(deployment: DeploymentView) -> str:
    count = sum(replica.state in _SERVING for replica in deployment.replicas)
    version = f", version {deployment.version}" if deployment.version else ""
    return f"{_replicas(count)}{version}"


def _replicas(count: int) -> str:
    return f"{count} replica" if count == 1 else f"{count} replicas"


def _curl(url: str, change: ChangeRequest) -> str:
    flag = "" if not change.methods or "GET" in change.methods else f"-X {change.methods[0]} "
    return f"  curl {flag}{url}"


DRY_RUN = "dry_run"
"""Parameter of every command that has a plan: those that change what is deployed."""


class ChangeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options that all commands that change something have."""

    timeout_s: float
    no_wait: bool
    dry_run: bool
    as_json: bool


ChangeRun = Callable[[Session, StackChoice, ChangeOptions], None]
"""Does and reports a change that takes several commands."""


def change_command(
    *, timeout_s: float = 120.0, options: Sequence[inspect.Parameter] = ()
) -> Callable[[Callable[..., ChangeRequest | ChangeRun]], Callable[..., None]]:
    """Turn a function from ``([session], *, arguments)`` to `ChangeRequest` into a command.

    The function only says what the change is; sending, waiting, report and dry run are the same for all. Where one
    command is not enough, it returns a `ChangeRun`.

    ``options`` are added to its own parameters; those set on the command line are passed as the keyword argument
    ``overrides``, by name.
    """
    names = [each.name for each in options]
    shared = (
        *options,
        parameter("timeout_s", TimeoutOption, timeout_s),
        parameter("no_wait", NoWaitOption, default=False),
        parameter(DRY_RUN, DryRunOption, default=False),
        *STACK_OPTIONS,
    )

    def make(build: Callable[..., ChangeRequest | ChangeRun]) -> Callable[..., None]:
        def run(context: typer.Context, values: dict[str, Any]) -> None:
            session = get_session(context)
            as_json, wait_s = values.pop("as_json"), values.pop("timeout_s")
            no_wait, dry_run = values.pop("no_wait"), values.pop(DRY_RUN)
            choice = pop_stack_choice(values)
            if options:
                parsed = {name: values.pop(name) for name in names}
                values["overrides"] = {name: value for name, value in parsed.items() if value is not None}
            with session.reporting(as_json=as_json):
                change = call_builder(build, session, values)
            if not isinstance(change, ChangeRequest):
                shared_options = ChangeOptions(
                    timeout_s=wait_s, no_wait=no_wait, dry_run=dry_run, as_json=as_json
                )
                with session.reporting(
                    as_json=as_json, interrupted="stopped waiting; changes that were sent go on"
                ):
                    change(session, choice, shared_options)
                return
            with session.reporting(as_json=as_json):
                try:
                    address = session.find_stack(choice)
                except BusUnavailable as error:
                    if as_json or not change.without_stack:
                        raise
                    print_error(f"{change.without_stack}: {error}")
                    return
                if dry_run:
                    query = Plan.for_command(change.command)
                    view = session.run(address, change.what, lambda stack, _progress: stack.admin.call(query))
                    print_plan(view, change, as_json=as_json)
                    return
                if change.question:
                    confirm(change.question.replace("{address}", address.where))
            interrupted_message = f"stopped waiting; the change goes on: '{change.progress_command}'"
            with session.reporting(as_json=as_json, interrupted=interrupted_message):
                outcome = session.run(
                    address,
                    change.what,
                    lambda stack, progress: perform(
                        stack.admin,
                        change,
                        timeout_s=wait_s,
                        is_waiting=not no_wait,
                        host=address.host,
                        progress=progress,
                        http_url=address.http_url,
                    ),
                )
                print_outcome(outcome, change, as_json=as_json)
                if outcome.exit_code is not ExitCode.OK:
                    raise typer.Exit(outcome.exit_code)

        return build_command(build, run, shared)

    return make


def confirm(question: str) -> None:
    """Ask for confirmation; a refusal exits with `ExitCode.FAILED`. Raises `BadField` without an interactive input."""
    try:
        is_sure = typer.confirm(question, err=True)
    except typer.Abort as error:
        print_error("")
        raise BadField("--yes", "is needed when input is not interactive; nothing was changed") from error
    if not is_sure:
        print_error("Aborted!")
        raise typer.Exit(ExitCode.FAILED)


def print_plan(view: PlanView, change: ChangeRequest, *, as_json: bool) -> None:
    """Print what a change would do."""
    if as_json:
        print_json(view)
    else:
        show_plan(view, change.what, change.already)


def print_outcome(outcome: ChangeOutcome, change: ChangeRequest, *, as_json: bool) -> None:
    """Print how a change ended."""
    if as_json:
        print_json(outcome)
        if outcome.result is not ChangeResult.FAILED:
            return
    emit = print_line if outcome.exit_code is ExitCode.OK else print_error
    for line in describe(outcome, change):
        emit(line)
