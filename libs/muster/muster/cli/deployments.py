"""`muster deploy`, `call`, `scale`, `rollback`, `delete`, `plan`, `goal wait`, `shutdown`."""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from muster.cli import parsing
from muster.cli.changes import (
    DRY_RUN,
    EXIT_CODES,
    RESULT_BY_STATUS,
    ChangeRequest,
    change_command,
    show_progress,
)
from muster.cli.config_options import (
    BACKEND_OPTIONS,
    CODE_OPTIONS,
    ENDPOINT_OPTIONS,
    build_backend_config,
    build_endpoint_options,
    build_replica_config,
)
from muster.cli.output import Progress, print_error, print_json, print_line, short_name, write_body
from muster.cli.queries import (
    CredsOption,
    JsonOption,
    NatsOption,
    PasswordFileOption,
    TimeoutOption,
    UserOption,
    get_option_name,
    group,
)
from muster.cli.session import ExitCode, Session, StackChoice, get_session
from muster.client.requests import AdminReply
from serve_common.api.commands import DeleteDeployment, Deploy, Rollback, Scale, Shutdown
from serve_common.api.views import GoalStatus, GoalView
from serve_common.config.backend import NUM_REPLICAS_MAX
from serve_common.config.validation import check_between
from serve_common.errors import BadField
from serve_common.names import GoalId, check_route, deployment_tag


@change_command(timeout_s=600.0, options=(*CODE_OPTIONS, *BACKEND_OPTIONS, *ENDPOINT_OPTIONS))
def deploy(
    session: Session,
    *,
    import_path: Annotated[str, typer.Argument(help="Class or function to serve, as module:attribute.")],
    name: Annotated[str, typer.Option("--name", help="Name of the deployment.")],
    app: Annotated[
        str | None, typer.Option("--app", help="Application of the deployment. Default: default.")
    ] = None,
    route_prefix: Annotated[
        str | None,
        typer.Option(
            "--route-prefix", help="HTTP path prefix, such as /digits. Default: no route, NATS only."
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option("--methods", metavar="GET,POST", help="Accepted HTTP methods. Default: all."),
    ] = None,
    version: Annotated[
        str | None,
        typer.Option(
            "--version",
            help="Code version. Reusing it keeps running replicas; omitting it always replaces them.",
        ),
    ] = None,
    prev_version: Annotated[
        str | None,
        typer.Option("--prev-version", help="Refuse the change unless this version is deployed now."),
    ] = None,
    overrides: Mapping[str, Any],
) -> ChangeRequest:
    """Create or update a deployment, and wait until it serves.

    Examples:
      muster deploy digits:Digits --name digits --route-prefix /digits \\
        --app-dir examples/digits

      muster deploy digits:Digits --name digits --route-prefix /digits \\
        --app-dir examples/digits --num-replicas 3 --version 2 \\
        --user-config '{"threshold": 0.9}'

    A deploy is complete: options that are left out get their defaults
    again. When the new version cannot start, the previous one keeps
    serving.
    """
    tag = deployment_tag(f"{app}/{name}" if app is not None else name, "--name")
    request = Deploy(
        name=tag,
        replica_config=build_replica_config(import_path, overrides, session.directory),
        backend_config=build_backend_config(overrides, session.directory),
        route_prefix=None if route_prefix is None else check_route(route_prefix, "--route-prefix"),
        endpoint_options=build_endpoint_options(overrides),
        version=version,
        prev_version=prev_version,
        **parsing.read_methods(methods),
    )
    return build_deploy_request(request)


def build_deploy_request(request: Deploy) -> ChangeRequest:
    """Build the change request of a deploy, with the texts of its report."""
    what = short_name(request.name)
    return ChangeRequest(
        command=request,
        what=what,
        done="is deployed",
        progress_command=f"muster status {what}",
        deployment=request.name,
    )


Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the deployment, as deployment or app/deployment.")
]


@change_command()
def scale(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    name: Name,
    num_replicas: Annotated[int, typer.Argument(metavar="N", help="Number of replicas to run.")],
) -> ChangeRequest:
    """Change the number of replicas, and wait until they run.

    Example:
      muster scale digits 3

    Replicas that stay are not touched. The number holds until the next
    deploy. Autoscaling, if configured, is paused until
    'muster autoscaling resume'.
    """
    tag = deployment_tag(name)
    check_between(num_replicas, 0, NUM_REPLICAS_MAX, "N")
    what = short_name(tag)
    return ChangeRequest(
        command=Scale(backend_tag=tag, num_replicas=num_replicas),
        what=what,
        done=f"is scaled to {num_replicas}",
        already=f"has {num_replicas} replicas already",
        progress_command=f"muster status {what}",
        deployment=tag,
    )


@change_command(timeout_s=600.0)
def rollback(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    name: Name,
    to: Annotated[
        str | None, typer.Option("--to", metavar="VERSION", help="Version to return to, by its name.")
    ] = None,
    to_revision: Annotated[
        int | None,
        typer.Option(
            "--to-revision", min=1, help="Revision to return to, by its number in 'muster revisions'."
        ),
    ] = None,
) -> ChangeRequest:
    """Return a deployment to an earlier revision, and wait until it serves.

    Examples:
      muster rollback digits
      muster rollback digits --to v1
      muster rollback digits --to-revision 3

    By default the revision that last succeeded before the current one.
    """
    tag = deployment_tag(name)
    if to is not None and to_revision is not None:
        raise BadField("--to-revision", "and --to must not both be given")
    target = to_revision if to is None else to
    what = short_name(tag)
    words = "what it was before" if target is None else f"{'revision ' if to is None else ''}{target}"
    return ChangeRequest(
        command=Rollback(name=tag, to=target),
        what=what,
        done=f"is rolled back to {words}",
        already=f"is {words} already",
        progress_command=f"muster status {what}",
        deployment=tag,
    )


@change_command()
def delete(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    name: Name,
) -> ChangeRequest:
    """Delete a deployment and wait until its replicas are gone.

    Example:
      muster delete digits

    Requests in flight finish first. Deleting a deployment that does not
    exist succeeds.
    """
    tag = deployment_tag(name)
    what = short_name(tag)
    return ChangeRequest(
        command=DeleteDeployment(name=tag),
        what=what,
        done="is deleted",
        already="does not exist",
        progress_command=f"muster status {what}",
    )


app = group("Wait for a change to finish: wait.")


@app.command()
def wait(
    context: typer.Context,
    *,
    goal_id: Annotated[str, typer.Argument(metavar="GOAL", help="Goal id, as --no-wait printed it.")],
    timeout_s: TimeoutOption = 600.0,
    as_json: JsonOption = False,
    nats: NatsOption = None,
    creds: CredsOption = None,
    user: UserOption = None,
    password_file: PasswordFileOption = None,
) -> None:
    """Wait until a change is done, and print how it ended.

    Example:
      muster goal wait goal-7 --timeout-s 60

    With --timeout-s 0 it only prints the current state.
    """
    session = get_session(context)
    with session.reporting(as_json=as_json, interrupted="stopped waiting; the change goes on"):
        stack = StackChoice(nats=nats, creds=creds, user=user, password_file=password_file)
        view = asyncio.run(_wait(session, stack, GoalId(goal_id), timeout_s))
        code = EXIT_CODES[RESULT_BY_STATUS[view.status]]
        if as_json:
            print_json(view)
        else:
            (print_line if code is ExitCode.OK else print_error)(_describe(view))
        if code is not ExitCode.OK:
            raise typer.Exit(code)


async def _wait(session: Session, choice: StackChoice, goal_id: GoalId, timeout_s: float) -> GoalView:
    with Progress(goal_id) as progress:
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


ANY_ARGUMENTS = {
    "help_option_names": ["-h", "--help"],
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    # Options after the first word belong to the planned command.
    "allow_interspersed_args": False,
}


# Why there is a command beside --dry-run: users who want to know what a command would do search for a command before an
# option.
def plan(context: typer.Context) -> None:
    """Show what a changing command would do, and change nothing.

    Examples:
      muster plan scale digits 3
      muster plan deploy digits:Digits --name digits --num-replicas 3
      muster plan traffic set digits v2

    Shows which replicas would start, stop or be reconfigured, and why.
    Equivalent to the command with --dry-run.
    """
    session = get_session(context)
    root = context.find_root()
    words, command, rest = _named(root, context.args)
    with session.reporting(as_json="--json" in rest):
        if not words:
            raise BadField("plan", "needs a command, such as: muster plan scale digits 3")
        if not isinstance(command, TyperGroup):
            if all(each.name != DRY_RUN for each in command.params):
                raise BadField("plan", f"'{' '.join(words)}' changes nothing; there is nothing to plan")
            rest = [get_option_name(DRY_RUN), *rest]
    planned = root.command
    assert isinstance(planned, TyperGroup)
    _word, first, _rest = planned.resolve_command(root, words)
    assert first is not None
    with first.make_context(words[0], [*words[1:], *rest], parent=root) as inner:
        first.invoke(inner)


def _named(root: Any, arguments: list[str]) -> tuple[list[str], Any, list[str]]:
    """Split arguments into the command's words, the command, and its arguments. Raises typer's error if unknown."""
    words: list[str] = []
    command: Any = root.command
    rest = list(arguments)
    while rest and not rest[0].startswith("-") and isinstance(command, TyperGroup):
        word, found, rest = command.resolve_command(root, rest)
        words.append(word or "")
        command = found
    return words, command, rest


@change_command(timeout_s=600.0)
def shutdown(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> ChangeRequest:
    """Delete every application, deployment, endpoint and backend.

    Example:
      muster shutdown --dry-run

    Asks for confirmation. Requests in flight finish. The stack itself
    stays up.
    """
    return ChangeRequest(
        command=Shutdown(confirm="everything"),
        what="everything",
        done="is deleted",
        already="is deleted; there is nothing",
        question="" if yes else "Delete every application, deployment, endpoint and backend?",
    )


def call(
    context: typer.Context,
    *,
    name: Annotated[str, typer.Argument(help="Name of the deployment, as deployment or app/deployment.")],
    data: Annotated[
        str | None,
        typer.Option(
            "--data", metavar="TEXT|@FILE|-", help="Request body; '-' reads standard input. Default: empty."
        ),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option("--header", metavar="'Name: value'", help="Request header; may be repeated."),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=0.1, max=3600.0, help="Seconds to wait for the response.")
    ] = 60.0,
    as_json: JsonOption = False,
    nats: NatsOption = None,
    creds: CredsOption = None,
    user: UserOption = None,
    password_file: PasswordFileOption = None,
) -> None:
    """Call a deployment and print its response, byte for byte into a pipe.

    Example:
      muster call digits --data @examples/digits/sample.png

    The call goes over NATS, as from any NATS client, and so also reaches a
    deployment without a route.
    """
    session = get_session(context)
    with session.reporting(as_json=as_json):
        tag = deployment_tag(name)
        body = parsing.read_body(data, session.directory, sys.stdin.buffer.read() if data == "-" else None)
        headers = parsing.read_headers(header or ())
        stack = StackChoice(nats=nats, creds=creds, user=user, password_file=password_file)
        answer = asyncio.run(_call(session, stack, tag, body=body, headers=headers, timeout_s=timeout_s))
        if as_json:
            print_json({"headers": dict(answer.headers), **_body(answer.body)})
        else:
            write_body(answer.body)


async def _call(
    session: Session,
    options: StackChoice,
    name: str,
    *,
    body: bytes,
    headers: dict[str, str],
    timeout_s: float,
) -> AdminReply:
    with Progress(short_name(name)) as progress:
        async with session.connect(session.find_stack(options), progress) as stack:
            return await stack.caller.call(name, body, headers=headers, timeout_s=timeout_s)


def _body(body: bytes) -> dict[str, Any]:
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}
