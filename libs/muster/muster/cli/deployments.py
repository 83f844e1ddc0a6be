"""`muster deploy`, `call`, `scale`, `rollback`, `delete`, `delete-all`, `plan`, `goal wait`."""

from __future__ import annotations

import base64
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from muster.cli import parsing
from muster.cli.changes import (
    DRY_RUN,
    EXIT_CODES,
    RESULT_BY_STATUS,
    ChangeRequest,
    ChangeRun,
    change_command,
    show_progress,
)
from muster.cli.config_options import (
    BACKEND_OPTIONS,
    CODE_OPTIONS,
    build_backend_config,
    build_replica_config,
)
from muster.cli.endpoint_options import ENDPOINT_OPTIONS, build_endpoint_options
from muster.cli.help import Commands, find_command
from muster.cli.output import print_error, print_json, print_line, write_body
from muster.cli.queries import (
    DeploymentName,
    TimeoutOption,
    get_option_name,
    stack_command,
)
from muster.cli.serve_options import (
    FILE_SUFFIXES,
    AddressOption,
    RuntimeEnvJsonOption,
    RuntimeEnvOption,
    ServeOptions,
    WorkingDirOption,
    names_application,
    note_address,
)
from muster.cli.session import ExitCode, Session, StackChoice, get_session
from serve_common.api.commands import DeleteDeployment, Deploy, Rollback, Scale, Shutdown
from serve_common.api.views import GoalStatus, GoalView
from serve_common.config.autoscaling import REPLICAS_MAX
from serve_common.errors import BadField
from serve_common.names import GoalId, check_route, deployment_tag, short_name
from serve_common.values import check_between


@change_command(timeout_s=600.0, options=(*CODE_OPTIONS, *BACKEND_OPTIONS, *ENDPOINT_OPTIONS))
def deploy(
    session: Session,
    *,
    target: Annotated[
        str,
        typer.Argument(
            metavar="IMPORT_PATH|FILE",
            help="Class or function to serve, as module:attribute, with --name; or an application of "
            "muster.deployment's, or a file of applications (.yaml, .yml, .json).",
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE...", help="Arguments of a function that builds an application."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="Name of the deployment, or APP/NAME instead of --app; or of the application.",
        ),
    ] = None,
    app: Annotated[
        str | None,
        typer.Option(
            "--app",
            metavar="APP",
            help="Application that the deployment belongs to. Default: 'default', whose deployments need no APP/.",
        ),
    ] = None,
    route_prefix: Annotated[
        str | None,
        typer.Option(
            "--route-prefix",
            metavar="PATH",
            help="HTTP path prefix, such as /digits. Default: none; it is called over NATS only. Of an application "
            "without --name: /.",
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option("--methods", metavar="METHOD,...", help="Accepted HTTP methods. Default: all."),
    ] = None,
    version: Annotated[
        str | None,
        typer.Option(
            "--version",
            metavar="VERSION",
            help="Label of the code, such as v2. With the label that is deployed now, running replicas stay and only "
            "their configuration changes: changed code is not loaded. With another label, or none, all replicas are "
            "replaced.",
        ),
    ] = None,
    prev_version: Annotated[
        str | None,
        typer.Option(
            "--prev-version", metavar="VERSION", help="Refuse the deploy unless this version is deployed now."
        ),
    ] = None,
    skips_rollout: Annotated[
        bool,
        typer.Option(
            "--no-rollout", help="Replace the old version at once although --rollout is set, as for a hotfix."
        ),
    ] = False,
    fails: Annotated[
        bool,
        typer.Option(
            "--fail",
            help="Exit code 1 when an application of one of Ray Serve's files fails. Default: 0, as in Ray Serve, and "
            "the failure on standard error and in 'muster status'.",
        ),
    ] = False,
    runtime_env: RuntimeEnvOption = None,
    runtime_env_json: RuntimeEnvJsonOption = None,
    working_dir: WorkingDirOption = None,
    address: AddressOption = None,
    overrides: Mapping[str, Any],
) -> ChangeRequest | ChangeRun:
    """Create or update a deployment, or the applications of a file, and wait until they serve.

    Examples:
      muster deploy digits:Digits --name digits --route-prefix /digits \\
        --app-dir examples/digits

      muster deploy digits:Digits --name digits --route-prefix /digits \\
        --app-dir examples/digits --num-replicas 3 --version v2 \\
        --user-config '{"threshold": 0.9}'

      muster deploy shop.yaml

      muster deploy shop:app

    A file is one of Ray Serve's (ServeDeploySchema, with 'applications'), which 'muster build' writes: all its
    applications are deployed, and those of earlier such files that it leaves out are deleted. Or it is one of
    'muster app deploy'. An import path without --name, or of what bind() returned, or with KEY=VALUE, is an
    application. Such code is imported here and sent to the hosts; code of a single deployment (--name) is imported by
    the hosts.

    A deploy is complete: options that are left out get their defaults again, and all requests go to this deployment
    again. To change one setting only, use 'muster update'. When no replica of the new version starts, the previous
    version keeps serving. With --rollout another version takes over step by step, and the command waits until it is
    promoted (exit code 0) or aborted (1).
    """
    of_application = ServeOptions(
        runtime_env=runtime_env,
        runtime_env_json=runtime_env_json,
        working_dir=working_dir,
        route_prefix=route_prefix,
    )
    note_address(address)
    app_dir = overrides.get("app_dir")
    of_single = {
        "app": app,
        "methods": methods,
        "version": version,
        "prev_version": prev_version,
        "no_rollout": skips_rollout or None,
        **overrides,
        "app_dir": None,
    }
    of_single = {option_name: value for option_name, value in of_single.items() if value is not None}
    is_file = (session.directory / target).is_file() or Path(target).suffix in FILE_SUFFIXES
    if (
        is_file
        or name is None
        or arguments
        or of_application.has_environment
        or (not of_single and names_application(target, session.directory / (app_dir or ".")))
    ):
        for option_name in of_single:
            raise BadField(
                get_option_name(option_name), "is for a single deployment, a class or function with --name"
            )
        # Only here: these import Pydantic and what pickles code.
        from muster.cli.serve_deploy import build_file_change, build_import_change  # noqa: PLC0415 - as above

        if is_file:
            if arguments:
                raise BadField("KEY=VALUE", "Application arguments cannot be specified for a config file.")
            ignored = of_application.ignored_with_file(name, (), has_environment=False)
            return build_file_change(session, target, app_dir=app_dir, ignored=ignored, fails=fails)
        return build_import_change(session, target, arguments or [], of_application, app_dir, name=name)
    tag = deployment_tag(f"{app}/{name}" if app is not None else name, "--name")
    request = Deploy(
        name=tag,
        replica_config=build_replica_config(target, overrides, session.directory),
        backend_config=build_backend_config(overrides, session.directory),
        route_prefix=None if route_prefix is None else check_route(route_prefix, "--route-prefix"),
        endpoint_options=build_endpoint_options(overrides),
        version=version,
        prev_version=prev_version,
        skips_rollout=skips_rollout,
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


@change_command()
def scale(
    *,
    name: DeploymentName,
    num_replicas: Annotated[
        int, typer.Argument(metavar="REPLICAS", help="Number of replicas, 0 to 10000; 0 stops them all.")
    ],
) -> ChangeRequest:
    """Change the number of replicas, and wait until they run.

    Example:
      muster scale digits 3

    Replicas that stay are not touched. Without autoscaling, the number holds until the next deploy sets its own. With
    autoscaling, the number must be within its limits; it then holds, across deploys too, until
    'muster autoscaling resume'.
    """
    tag = deployment_tag(name)
    check_between(num_replicas, 0, REPLICAS_MAX, "REPLICAS")
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
    *,
    name: DeploymentName,
    to_version: Annotated[
        str | None,
        typer.Option("--to-version", metavar="VERSION", help="Version to return to, as --version named it."),
    ] = None,
    to_revision: Annotated[
        int | None,
        typer.Option(
            "--to-revision",
            metavar="NUMBER",
            min=1,
            help="Revision to return to, by its number in 'muster revisions'.",
        ),
    ] = None,
) -> ChangeRequest:
    """Return a deployment to an earlier revision, and wait until it serves.

    Examples:
      muster rollback digits
      muster rollback digits --to-version v1
      muster rollback digits --to-revision 3

    Without an option it returns to the last revision that succeeded before the current one; 'muster revisions' lists
    them. Code, configuration, route and methods come back; the number of replicas stays as it is.
    """
    tag = deployment_tag(name)
    if to_version is not None and to_revision is not None:
        raise BadField("--to-revision", "and --to-version must not both be given")
    target = to_revision if to_version is None else to_version
    what = short_name(tag)
    text = "what it was before" if target is None else f"{'revision ' if to_version is None else ''}{target}"
    return ChangeRequest(
        command=Rollback(name=tag, to=target),
        what=what,
        done=f"is rolled back to {text}",
        already=f"is {text} already",
        progress_command=f"muster status {what}",
        deployment=tag,
    )


@change_command()
def delete(*, name: DeploymentName) -> ChangeRequest:
    """Delete a deployment, and wait until its replicas are gone.

    Example:
      muster delete digits

    Requests in flight have --graceful-shutdown-timeout-s (20 seconds by default) to finish. Deleting a deployment that
    does not exist succeeds.
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


app = Commands(help="Wait for a change under way (a goal): wait.")


@app.command()
@stack_command
def wait(
    session: Session,
    choice: StackChoice,
    *,
    goal_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the change, as --no-wait printed it.")],
    timeout_s: TimeoutOption = 600.0,
    as_json: bool = False,
) -> None:
    """Wait until a change is done, and print how it ended.

    Example:
      muster goal wait goal-7 --timeout-s 60

    The exit code is 5 while the change is under way. With --timeout-s 0 it only prints the current state.
    """
    with session.reporting(as_json=as_json, interrupted="stopped waiting; the change goes on"):
        view = session.run(
            session.find_stack(choice),
            goal_id,
            lambda stack, progress: stack.admin.wait_for_goal(
                GoalId(goal_id),
                deadline_s=timeout_s,
                on_progress=lambda goal: show_progress(goal, progress),
            ),
        )
        code = EXIT_CODES[RESULT_BY_STATUS[view.status]]
        if as_json:
            print_json(view)
        else:
            (print_line if code is ExitCode.OK else print_error)(_describe(view))
        if code is not ExitCode.OK:
            raise typer.Exit(code)


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


# Why there is a command beside --dry-run: users who want to know what a command would do search for a command before an
# option.
def plan(context: typer.Context) -> None:
    """Show what a command would change, without changing it.

    Examples:
      muster plan scale digits 3
      muster plan deploy digits:Digits --name digits --route-prefix /digits \\
        --app-dir examples/digits --num-replicas 3
      muster plan traffic set digits digits=0.9 digits-new=0.1

    Shows which replicas would start, stop or be reconfigured, and why. Works with every command that has --dry-run, and
    is the same as that.
    """
    session = get_session(context)
    root = context.find_root()
    found, rest = find_command(root, context.args)
    text = found.command_path.split()[1:]
    with session.reporting(as_json="--json" in rest):
        if not text:
            raise BadField("plan", "needs a command, such as: muster plan scale digits 3")
        if not isinstance(found.command, TyperGroup):
            if all(each.name != DRY_RUN for each in found.command.params):
                raise BadField("plan", f"'{' '.join(text)}' has no --dry-run and cannot be planned")
            rest = [get_option_name(DRY_RUN), *rest]
    planned = root.command
    assert isinstance(planned, TyperGroup)
    _word, first, _rest = planned.resolve_command(root, text)
    assert first is not None
    with first.make_context(text[0], [*text[1:], *rest], parent=root) as inner:
        first.invoke(inner)


@change_command(timeout_s=600.0)
def delete_all(
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> ChangeRequest:
    """Delete everything that is deployed; the stack stays up.

    Example:
      muster delete-all --dry-run

    Deletes every application, deployment, endpoint and backend. Asks for confirmation; without a terminal it needs
    --yes. Requests in flight have --graceful-shutdown-timeout-s (20 seconds by default) to finish.
    """
    return ChangeRequest(
        command=Shutdown(confirm="everything"),
        what="everything",
        done="is deleted",
        already="is deleted; there is nothing",
        question="" if yes else "Delete every application, deployment, endpoint and backend?",
    )


@stack_command
def call(
    session: Session,
    choice: StackChoice,
    *,
    name: DeploymentName,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="TEXT|@FILE|-",
            help="Body of the request; '-' reads standard input. Default: empty.",
        ),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option("--header", metavar="'NAME: VALUE'", help="Header of the request; may be repeated."),
    ] = None,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout-s",
            metavar="SECONDS",
            min=0.1,
            max=3600.0,
            help="Seconds to wait for the response, 0.1 to 3600.",
        ),
    ] = 60.0,
    as_json: bool = False,
) -> None:
    """Call a deployment and print the body of its response.

    Example:
      muster call digits --data @examples/digits/sample.png

    The deployment gets a POST to /. The call goes over NATS, as from any NATS client, and so also reaches a
    deployment without a route. The body is printed unchanged into a file or pipe; a terminal gets it without control
    characters. With --json it prints one object with headers and body (body_base64 if it is not text). A response
    with status 400 or above is an error, and the exit code is not 0.
    """
    with session.reporting(as_json=as_json):
        tag = deployment_tag(name)
        body = parsing.read_body(data, session.directory, sys.stdin.buffer.read() if data == "-" else None)
        headers = parsing.read_headers(header or ())
        response = session.run(
            session.find_stack(choice),
            short_name(tag),
            lambda stack, _progress: stack.caller.call(tag, body, headers=headers, timeout_s=timeout_s),
        )
        if as_json:
            print_json({"headers": dict(response.headers), **_body(response.body)})
        else:
            write_body(response.body)


def _body(body: bytes) -> dict[str, Any]:
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}
