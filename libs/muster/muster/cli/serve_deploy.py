"""Deploys applications of Ray Serve's files and import paths: all that can be refused is, before anything changes.

An application of a file that cannot be imported or built fails by itself, as in Ray Serve: the others are deployed.

A file stands for all applications of a stack that were deployed by files: those that it leaves out are deleted. What
`serve.run`, `muster run`, `muster app deploy` and a deploy by name have deployed is not theirs to delete.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import typer

from muster.cli import parsing
from muster.cli.apps import FileText, build_app_change, read_file
from muster.cli.background import move_when_empty
from muster.cli.change_sets import ChangeSet, run_changes
from muster.cli.changes import ChangeOptions, ChangeOutcome, ChangeRequest, ChangeResult, ChangeRun
from muster.cli.output import print_error, print_line
from muster.cli.serve_config import ServeConfig, check_config, is_serve_config
from muster.cli.serve_options import ServeOptions, read_arguments
from muster.cli.session import ExitCode, Session, StackChoice, running_embedded
from muster.cli.yaml_file import YamlFile, parse_path
from muster.client.admin import Stack
from muster.schema import LoggingConfig, ServeApplicationSchema
from muster.sdk.applications import (
    BUILD_ERRORS,
    BuildFailed,
    PreparedApplication,
    build_app_config,
    forget_modules,
    merge_runtime_envs,
    prepare_application,
    resolve_paths,
)
from muster.sdk.deployments import check_runtime_env
from muster.sdk.files import unpack
from muster.sdk.run import upload_application
from muster.sdk.translate import deploy_command
from serve_common.api.commands import DeleteApplication, RecordBuildFailure, SetHttpOptions
from serve_common.api.queries import GetAllApplications, Plan
from serve_common.api.views import ApplicationView, DeploymentStatus, PlanView
from serve_common.errors import BadField, CommandRefused

_SHOWN_UPLOAD_BYTES: Final = 2**20
"""Code of this size takes long enough to say that it is uploaded."""


_SENT: Final = """\
Sent deploy request successfully.
 * Use `muster status` to check applications' statuses.
 * Use `muster config` to see the current application config(s).
"""

_LEFT_OUT: Final = "the file leaves it out"
"""Why an application is deleted."""


class FailedBuild(msgspec.Struct, frozen=True, kw_only=True):
    """An application of a file that cannot be imported or built."""

    name: str
    error: str
    place: str
    """The error with its place in the file."""
    app_config: dict[str, Any]


class ServeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Applications to deploy, imported and checked."""

    named: str
    """The file or import path, for people."""
    applications: list[PreparedApplication]
    failed: list[FailedBuild] = []
    http_options: dict[str, Any] = {}
    listen: dict[str, Any] = {}
    """``http_host`` and ``http_port`` of a file, for a stack that the command starts."""
    is_whole: bool = False
    """Whether applications of earlier files that are not among these are deleted."""
    logs_requests: bool = False
    """Whether replicas without a ``logging_config`` log a line for each request, as Ray Serve's do."""

    def check_built(self) -> None:
        """Raise `BuildFailed` unless all applications are built."""
        if self.failed:
            raise BuildFailed("\n".join(each.place for each in self.failed))


def prepare_file(
    text: str,
    name: str,
    directory: Path,
    import_from: Sequence[Path],
    *,
    runtime_env: Mapping[str, Any] | None = None,
    is_recorded: bool = True,
) -> tuple[ServeRequest, ServeConfig]:
    """Check a configuration file, and import what it names. Raises `BadField` with the file's line and path.

    Applications that cannot be imported or built are `ServeRequest.failed`.
    ``directory`` is the file's own, ``import_from`` are further ones that modules are looked for in. ``runtime_env`` is
    what the applications' own is merged over.
    """
    directory, import_from = directory.absolute(), [place.absolute() for place in import_from]
    config = check_config(YamlFile(text, name), directory)
    prepared, failed = [], []
    variables: Any = None
    for at, app in enumerate(config.schema.applications):
        merged = merge_runtime_envs(runtime_env or {}, app.runtime_env)
        if at and merged.get("env_vars") != variables:  # which modules may have read when they were imported
            forget_modules([*import_from, directory])
        variables = merged.get("env_vars")
        try:
            with _in_working_dir(merged, directory) as working_dir:
                prepared.append(
                    prepare_application(
                        app,
                        [*working_dir, *import_from, directory],
                        base=directory,
                        runtime_env=runtime_env,
                        logging_config=config.schema.logging_config,
                        is_recorded=is_recorded,
                    )
                )
        except BUILD_ERRORS as error:
            place = str(_located(config.file, at, error))
            app_config = build_app_config(app, config.schema.logging_config)
            failed.append(FailedBuild(name=app.name, error=str(error), place=place, app_config=app_config))
    request = ServeRequest(
        named=name,
        applications=prepared,
        failed=failed,
        http_options=config.http_options,
        listen=config.listen,
        is_whole=True,
    )
    return request, config


def _located(file: YamlFile, at: int, error: Exception) -> BadField:
    """The error with the place in the file; the field is a path within the application's part, or of the code."""
    if not isinstance(error, BadField):
        return file.build_error(("applications", at), str(error))
    path: list[str | int] = ["applications", at, *parse_path(error.field)]
    located = file.build_error(path, error.reason)
    return (
        located if path[2] in ServeApplicationSchema.model_fields else file.build_error(path[:2], str(error))
    )


@contextlib.contextmanager
def _in_working_dir(runtime_env: Mapping[str, Any], directory: Path) -> Iterator[list[Path]]:
    """Be in the application's working directory, with its ``env_vars``, as its replicas are: modules may read them.

    Gives what the application is imported from before all else, ``py_modules`` too. Raises `BadField`, `LimitReached`
    for what cannot be unpacked.
    """
    places = [place.absolute() for place in _working_dir(runtime_env, directory)]
    modules = [
        unpack(str(directory / each) if "://" not in each else each, "runtime_env.py_modules", is_module=True)
        for each in runtime_env.get("py_modules") or ()
        if isinstance(each, str)
    ]
    variables = {name: str(value) for name, value in (runtime_env.get("env_vars") or {}).items()}
    before = {name: os.environ.get(name) for name in variables}
    with contextlib.chdir(places[0]) if places and places[0].is_dir() else contextlib.nullcontext():
        try:
            os.environ.update(variables)
            yield [*places, *modules]
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _working_dir(runtime_env: Mapping[str, Any], directory: Path) -> list[Path]:
    named = runtime_env.get("working_dir")
    if not isinstance(named, str):
        return []
    path = str(directory / named) if "://" not in named else named
    if path.endswith(".zip"):
        return [unpack(path, "runtime_env.working_dir")]
    return [Path(path.removeprefix("local://"))] if "://" not in path or path.startswith("local://") else []


def read_default_env(options: ServeOptions, directory: Path) -> dict[str, Any]:
    """The ``runtime_env`` that the options give to applications of a file. Raises `BadField`.

    Its relative paths are resolved in ``directory``.
    """
    runtime_env = options.read_runtime_env(directory)
    try:
        check_runtime_env(runtime_env, "runtime_env")
    except (TypeError, ValueError) as error:
        raise BadField("--runtime-env", str(error)) from error
    return resolve_paths(runtime_env, directory)


def prepare_import_path(
    import_path: str,
    arguments: Mapping[str, str],
    runtime_env: dict[str, Any],
    directory: Path,
    import_from: Sequence[Path],
    *,
    name: str | None = None,
    route_prefix: str | None = "/",
    is_recorded: bool,
) -> ServeRequest:
    """Import one application. Raises `BadField`, and `BuildFailed` for the code.

    Paths of ``runtime_env`` and of the code are relative to ``directory``.
    """
    directory, import_from = directory.absolute(), [place.absolute() for place in import_from]
    fields: dict[str, Any] = {"import_path": import_path}
    chosen = {"name": name, "args": dict(arguments), "runtime_env": runtime_env}
    fields.update({field: value for field, value in chosen.items() if value})
    if route_prefix != "/":
        fields["route_prefix"] = route_prefix
    text = msgspec.json.encode({"applications": [fields]}).decode()
    try:
        config = check_config(YamlFile(text, import_path), directory)
    except BadField as error:
        raise BadField(error.field.rpartition("applications[0].")[2], error.reason) from error
    try:
        schema = config.schema.applications[0]
        with _in_working_dir(runtime_env, directory) as working_dir:
            places = [*working_dir, *import_from]
            prepared = prepare_application(schema, places, base=directory, is_recorded=is_recorded)
    except BUILD_ERRORS as error:
        raise BuildFailed(str(error)) from error
    return ServeRequest(named=import_path, applications=[prepared])


def build_file_change(
    session: Session,
    file: str,
    *,
    app_dir: str | None,
    ignored: str | None,
    fails: bool,
) -> ChangeRequest | ChangeRun:
    """What `muster deploy FILE` does; ``fails`` as in `run_deploy`. Raises `BadField`."""
    found = read_file(file, session.directory, "FILE")
    if ignored is not None:
        print_error(ignored)
    prepared = prepare_serve_file(session, found, app_dir)
    if prepared is None:
        return build_app_change(found)
    request, config = prepared
    return partial(run_deploy, request=request, note=config.note, fails=fails)


def prepare_serve_file(
    session: Session, found: FileText, app_dir: str | None
) -> tuple[ServeRequest, ServeConfig] | None:
    """The request of a file in Ray Serve's form, and what the file says; None for one in Muster's own.

    Raises `BadField`.
    """
    if not is_serve_config(parsing.yaml_value(found.text, found.named)):
        return None
    show_warnings()
    places = import_places(session, app_dir)
    return prepare_file(found.text, found.named, found.directory, places)


def build_import_change(
    session: Session,
    import_path: str,
    arguments: Sequence[str],
    options: ServeOptions,
    app_dir: str | None,
    *,
    name: str | None,
) -> ChangeRun:
    """What `muster deploy` of an application by its import path does. Raises `BadField`."""
    show_warnings()
    request = prepare_import_path(
        import_path,
        read_arguments(arguments),
        options.read_runtime_env(session.directory),
        session.directory,
        import_places(session, app_dir),
        name=name,
        route_prefix=options.route_prefix or "/",
        is_recorded=True,
    )
    return partial(run_deploy, request=request)


def import_places(session: Session, app_dir: str | None) -> list[Path]:
    """Where code is imported from: ``app_dir``, and by default the directory of the command. Raises `BadField`."""
    place = session.directory / (app_dir or ".")
    if not place.is_dir():
        raise BadField("--app-dir", f"there is no directory {app_dir} here")
    return [place]


class _Step(msgspec.Struct, frozen=True):
    """One command of a request, with the route that it frees and the one that it takes; None for none."""

    change: ChangeRequest
    frees: str | None = None
    takes: str | None = None


def _plan_steps(request: ServeRequest, current: Sequence[ApplicationView]) -> list[list[_Step]]:
    """The commands in an order in which each route is free when it is taken. Raises `BadField` where there is none."""
    known = {view.name: view for view in current if view.status is not DeploymentStatus.DELETING}
    names = {each.built.name for each in request.applications} | {each.name for each in request.failed}
    pending = []
    for each in request.applications:
        before = known[each.built.name].route_prefix if each.built.name in known else None
        after = each.built.route_prefix
        logging_config = LoggingConfig() if request.logs_requests else None
        change = _deploy_change(each, logging_config)
        pending.append(_Step(change, before if before != after else None, after))
    for name, view in known.items():
        if request.is_whole and view.app_config is not None and name not in names:
            pending.append(_Step(_delete_change(name), view.route_prefix))
    if request.http_options:
        pending.append(
            _Step(
                ChangeRequest(
                    command=SetHttpOptions(options=request.http_options), what="HTTP options", done="are set"
                )
            )
        )
    waves = []
    while pending:
        wave = [
            step
            for step in pending
            if step.takes is None or all(other is step or other.frees != step.takes for other in pending)
        ]
        if not wave:
            routes = ", ".join(sorted(str(step.takes) for step in pending))
            raise BadField(
                "route_prefix", f"applications exchange {routes}; deploy one of them elsewhere first"
            )
        waves.append(wave)
        pending = [step for step in pending if step not in wave]
    return waves


def _deploy_change(prepared: PreparedApplication, logging_config: LoggingConfig | None) -> ChangeRequest:
    """``logging_config`` is for an application that has none."""
    target, name = prepared.target, prepared.built.name
    command = deploy_command(
        prepared.built,
        target.logging_config or logging_config,
        external_scaler=target.external_scaler_enabled,
        app_config=prepared.app_config,
    )
    return ChangeRequest(
        command=command,
        what=f"application {name}",
        done="is deployed",
        progress_command=f"muster status --name {name}",
    )


def _delete_change(name: str) -> ChangeRequest:
    return ChangeRequest(
        command=DeleteApplication(name=name),
        what=f"application {name}",
        done=f"is deleted: {_LEFT_OUT}",
        already="does not exist",
        progress_command="muster app list",
    )


async def deploy(changes: ChangeSet, request: ServeRequest) -> None:
    """Deploy all applications, each by itself, and delete what the request leaves out.

    One that is not built fails; what an earlier deploy made of it goes on. Raises what the controller refuses, as long
    as nothing was changed.
    """
    admin = changes.stack.admin
    waves = _plan_steps(request, await admin.call(GetAllApplications()))
    for step in waves[0] if waves else ():
        await admin.call(Plan.for_command(step.change.command))
    for failure in request.failed:
        await _record_failure(changes, failure)
    for each in request.applications:
        size = sum(len(one.code) for one in each.built.deployments)
        if size >= _SHOWN_UPLOAD_BYTES:
            changes.progress.show(f"uploading {size / 2**20:.0f} MiB of code of {each.built.name}")
        await upload_application(changes.stack, each.built)
    for number, wave in enumerate(waves, start=1):
        try:
            async with asyncio.TaskGroup() as group:
                for step in wave:
                    group.create_task(changes.run(step.change, is_needed=number < len(waves)))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors


async def _record_failure(changes: ChangeSet, failure: FailedBuild) -> None:
    name = failure.name
    command = RecordBuildFailure(name=name, error=failure.error, app_config=failure.app_config)
    goal_id, error = None, failure.place
    try:
        goal_id = (await changes.stack.admin.call(command)).goal_id
    except CommandRefused as refusal:
        error = f"{error}\nIts status does not show that: {refusal}"
    change = ChangeRequest(command=command, what=f"application {name}", done="")
    outcome = ChangeOutcome(result=ChangeResult.FAILED, goal_id=goal_id, error=error, took_s=0.0)
    changes.add(change, outcome)


async def plan(stack: Stack, request: ServeRequest) -> list[tuple[ChangeRequest, PlanView]]:
    """What `deploy` would do, as far as the controller can tell before code is uploaded.

    Raises `BuildFailed` for an application that is not built.
    """
    request.check_built()
    first, *later = _plan_steps(request, await stack.admin.call(GetAllApplications())) or [[]]
    plans = [(step.change, await stack.admin.call(Plan.for_command(step.change.command))) for step in first]
    plans = [
        (change, msgspec.structs.replace(view, notes=[*view.notes, _LEFT_OUT]))
        if isinstance(change.command, DeleteApplication)
        else (change, view)
        for change, view in plans
    ]
    note = "happens once other applications have given up its route"
    later_plan = PlanView(updating=True, replicas=[], notes=[note])
    return [*plans, *((step.change, later_plan) for wave in later for step in wave)]


def run_deploy(
    session: Session,
    choice: StackChoice,
    options: ChangeOptions,
    *,
    request: ServeRequest,
    note: Callable[[bool], str | None] = lambda _has_listen: None,
    fails: bool = True,
) -> None:
    """`muster deploy` of a request, reported as other changes are, with Ray Serve's words, which scripts look for.

    ``note`` tells what of the file has no effect, by whether its HTTP port has one. Not ``fails``: an application that
    fails is no failure of the command. Ray Serve's scripts ask for its status, and then do what is to be done.
    """
    is_quiet = options.as_json or options.dry_run
    if not is_quiet:
        what = "config file" if request.is_whole else "import path"
        print_line(f"Deploying from {what}: '{request.named}'.")
    has_listen = not is_quiet and _listen_at(session, choice, request)
    if (ignored := note(has_listen)) is not None:
        print_error(ignored)
    try:
        run_changes(
            session,
            choice,
            options,
            request.named,
            plan=lambda stack: plan(stack, request),
            work=lambda changes: deploy(changes, request),
        )
    except typer.Exit as failure:
        if fails or is_quiet or failure.exit_code != ExitCode.FAILED:
            raise
    if not is_quiet:
        print_line(_SENT)


def _listen_at(session: Session, choice: StackChoice, request: ServeRequest) -> bool:
    """Let an empty stack in the background have the file's HTTP port; true where it has that."""
    port = request.listen.get("http_port")
    found = running_embedded(session.environment, session.directory)
    if port is None or found is None:
        return False
    with session.reporting(as_json=False):
        return found.ports["http"] == port or move_when_empty(session, choice, port) is not None


def show_warnings() -> None:
    """Let the warnings of `muster`'s SDK reach standard error, as they do in a program that configures logging."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
