"""`muster run`: applications for as long as the command runs, on the stack that is found or on one of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, final

import msgspec
import typer

from muster.cli import parsing
from muster.cli.change_sets import ChangeSet, print_end
from muster.cli.changes import ChangeOutcome, ChangeRequest
from muster.cli.logs import LogTail
from muster.cli.output import Progress, print_error, print_json_line, print_line
from muster.cli.queries import (
    STACK_OPTIONS,
    OwnHttpHostOption,
    OwnHttpPortOption,
    build_command,
    pop_stack_choice,
)
from muster.cli.serve_options import (
    FILE_SUFFIXES,
    AddressOption,
    AppDirOption,
    RuntimeEnvJsonOption,
    RuntimeEnvOption,
    ServeOptions,
    WorkingDirOption,
    note_address,
    read_arguments,
)
from muster.cli.session import EmbeddedPort, ExitCode, Session, StackChoice, get_session
from muster.client.admin import Stack
from muster.client.requests import Feed, StackAddress
from muster.embedded.leftovers import kill_marked
from muster.embedded.options import RUN_STATE_DIR, StackOptions, StatePaths, share_ray
from muster.embedded.process import Happened, ProcessEvent
from muster.embedded.run_record import read_record
from muster.secrets import Secrets
from serve_common.api.commands import DeleteApplication, DeployApplication
from serve_common.api.queries import GetAllApplications
from serve_common.errors import BadField, BusUnavailable, NotFound, ServeError
from serve_common.identities.roles import Role
from serve_common.protocol.reports import LogFilter
from serve_common.protocol.subjects import Subjects

if TYPE_CHECKING:
    from muster.cli.serve_deploy import ServeRequest

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAME_SIGNAL_S: Final = 0.5
"""Seconds within which a second signal is the same request: shells and `timeout` also signal the group."""
_DEPLOY_TIMEOUT_S: Final = 24 * 3600.0
"""Seconds to wait for an application; its own limits (failed starts, time to start) end it long before."""
_DELETE_TIMEOUT_S: Final = 60.0
_LISTEN: Final[dict[str, Any]] = {"http_host": "127.0.0.1", "http_port": 8000}
"""Where a stack within the process listens, unless the command or the file says so."""


@final
class ServeRun:
    """One run: deploys, shows the log lines of its replicas, and deletes at the end what it deployed."""

    def __init__(
        self,
        session: Session,
        choice: StackChoice,
        load: Callable[[], ServeRequest],
        *,
        own_stack: dict[str, Any] | None,
        watched: Sequence[Path] = (),
        is_blocking: bool = True,
        as_json: bool = False,
    ) -> None:
        """``load`` imports the applications; it is called again when something below ``watched`` has changed.

        ``own_stack`` are options of a stack within the process where none is found, before those of a file; None: it is
        an error then. With
        ``as_json`` standard output has nothing but lines of JSON: an outcome for each application, and log lines.
        """
        self._as_json = as_json
        self._print = print_error if as_json else print_line
        self._session = session
        self._choice = choice
        self._load = load
        self._own_stack = own_stack
        self._watched = watched
        self._is_blocking = is_blocking
        self._task: asyncio.Task[None] | None = None
        self._interrupted_at: float | None = None
        self._embedded: EmbeddedPort | None = None
        self._new: set[str] = set()
        """Applications that this run has made."""
        self._all: set[str] = set()
        """Applications that this run has deployed."""

    async def run(self) -> ExitCode:
        """Return at the end of the run. Raises what cannot be deployed, and errors of the stack."""
        request = self._load()
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        try:
            return await self._run(request)
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    async def _run(self, request: ServeRequest) -> ExitCode:
        async with AsyncExitStack() as exits:
            address = await self._find_stack(exits, request)
            with Progress(request.named) as progress:
                stack = await exits.enter_async_context(self._session.connect(address, progress))
                try:
                    code = await self._serve(stack, address, request, progress)
                except asyncio.CancelledError:
                    if self._interrupted_at is None or self._task is None:
                        raise
                    self._task.uncancel()
                    print_error("Got KeyboardInterrupt, shutting down... Once more ends at once.")
                    ended, code = self._all, ExitCode.OK
                else:
                    ended = self._new if code is not ExitCode.OK else set()
                if self._embedded is None:
                    await self._delete(stack, ended)
                return code

    async def _serve(
        self, stack: Stack, address: StackAddress, request: ServeRequest, progress: Progress
    ) -> ExitCode:
        """Deploy; stay until the run is cancelled, or return once it serves or has failed."""
        subjects = Subjects(address.subject_prefix)
        wanted = [
            subjects.logs("replica", f"{app.built.name}/{each.name}")
            for app in request.applications
            for each in app.built.deployments
        ]
        tail = LogTail(LogFilter(kinds=("replica",)), subjects, as_json=self._as_json)
        try:
            async with self._session.listen(address, wanted) as feed, asyncio.TaskGroup() as group:
                lines = group.create_task(_show_logs(feed, tail))
                code = await self._deploy(stack, address, request, progress)
                progress.stop()
                if code is ExitCode.OK and self._is_blocking:
                    self._print("Ctrl-C ends it.")
                    if self._watched:
                        await self._reload(stack, address)
                    await lines
                lines.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return code

    async def _find_stack(self, exits: AsyncExitStack, request: ServeRequest) -> StackAddress:
        try:
            return self._session.find_stack(self._choice)
        except BusUnavailable as error:
            if self._own_stack is None:
                raise BadField("--non-blocking", f"needs a stack that goes on: {error}") from error
            options = StackOptions(**_LISTEN | request.listen | self._own_stack)
            options = await asyncio.to_thread(share_ray, options)  # the application is imported by now
            return await exits.enter_async_context(self._start_stack(options))

    @asynccontextmanager
    async def _start_stack(self, options: StackOptions) -> AsyncIterator[StackAddress]:
        base = self._session.environment.get("MUSTER_STATE_DIR")
        directory = self._session.directory / (RUN_STATE_DIR if not base else Path(base) / RUN_STATE_DIR.name)
        await asyncio.to_thread(_remove_leftovers, directory)
        self._print("no stack was found; one starts within this process")
        self._embedded = self._session.make_embedded(
            directory, options, on_event=_report_event, on_notice=print_error
        )
        try:
            async with self._embedded:
                record = self._embedded.record
                self._print(f"Muster runs within this process, at {record.http_url}; it ends with it")
                secrets = Secrets(Path(record.secrets))
                yield StackAddress(
                    urls=(record.nats_url,), credentials_file=str(secrets.credentials_file(Role.ADMIN))
                )
        finally:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
            with contextlib.suppress(OSError):
                directory.parent.rmdir()  # unless it has the state of a stack of 'muster up'

    async def _deploy(
        self, stack: Stack, address: StackAddress, request: ServeRequest, progress: Progress
    ) -> ExitCode:
        # Only here: it imports what pickles code.
        from muster.cli.serve_deploy import deploy  # noqa: PLC0415 - as above

        known = {view.name for view in await stack.admin.call(GetAllApplications())}
        names = {each.built.name for each in request.applications}
        self._new |= names - known - self._all
        self._all |= names

        def report(change: ChangeRequest, outcome: ChangeOutcome) -> None:
            if self._as_json:
                ended_as = {"what": change.what, "outcome": msgspec.to_builtins(outcome)}
                print_json_line(msgspec.json.encode(ended_as).decode())
                return
            print_end(change, outcome)
            if outcome.exit_code is ExitCode.OK and isinstance(change.command, DeployApplication):
                # Ray Serve's words, which scripts wait for.
                where = f" at {outcome.urls[0]}" if outcome.urls else ""
                print_line(f"Application '{change.command.name}' is ready{where}.")

        changes = ChangeSet(
            stack, progress, host=address.host, timeout_s=_DEPLOY_TIMEOUT_S, is_waiting=True, report=report
        )
        await deploy(changes, request)
        if request.is_whole and changes.exit_code is ExitCode.OK:
            self._print("Submitted deploy config successfully.")  # Ray Serve's words, as above
        return changes.exit_code

    async def _reload(self, stack: Stack, address: StackAddress) -> None:
        # Only here: few runs watch files.
        from watchfiles import DefaultFilter, awatch  # noqa: PLC0415 - as above

        from muster.sdk.applications import forget_modules  # noqa: PLC0415 - it imports what pickles code

        ignored = (*DefaultFilter.ignore_dirs, RUN_STATE_DIR.parent.name)
        async for _changes in awatch(*self._watched, watch_filter=DefaultFilter(ignore_dirs=ignored)):
            self._print("files have changed; reloading: deploying again")
            forget_modules(self._watched)
            try:
                request = await asyncio.to_thread(self._load)
                with Progress(request.named) as progress:
                    await self._deploy(stack, address, request, progress)
            except ServeError as error:
                print_error(
                    f"error: {error}\nDeploying the latest version of the application failed. What served before still "
                    "serves."
                )

    async def _delete(self, stack: Stack, names: set[str]) -> None:
        goals = [(await stack.admin.call(DeleteApplication(name=name))).goal_id for name in sorted(names)]
        for goal_id in goals:
            if goal_id is not None:
                with contextlib.suppress(NotFound):  # it ended so long ago that it was forgotten
                    await stack.admin.wait_for_goal(goal_id, deadline_s=_DELETE_TIMEOUT_S)

    def _on_signal(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._task is None or (
            self._interrupted_at is not None and now - self._interrupted_at < _SAME_SIGNAL_S
        ):
            return
        if self._interrupted_at is not None and self._embedded is not None:
            try:
                kill_marked(self._embedded.record.stack_id)
            finally:
                os._exit(ExitCode.INTERRUPTED)  # without waiting for the orderly stop that is under way
        self._interrupted_at = now
        self._task.cancel()


async def _show_logs(feed: Feed, tail: LogTail) -> None:
    while True:
        message = await feed.receive()
        if message is not None:
            tail.show(message)


def _remove_leftovers(directory: Path) -> None:
    """Remove what a run that was killed left behind: its processes and its state."""
    record = read_record(StatePaths(directory.resolve()))
    if record is not None:
        kill_marked(record.stack_id)
    shutil.rmtree(directory, ignore_errors=True)


def _report_event(event: ProcessEvent) -> None:
    if event.happened is Happened.DIED:
        print_error(f"{event.name} died: {event.detail}")
    elif event.happened is Happened.READY and event.restarts:
        print_error(f"{event.name} is back")


def _run(
    *,
    target: Annotated[
        str,
        typer.Argument(
            metavar="IMPORT_PATH|FILE",
            help="Application, or function that builds one, as module:attribute; or a file of applications.",
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE...", help="Arguments of a function that builds an application."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="APP", help="Name of the application. Default: default.")
    ] = None,
    route_prefix: Annotated[
        str | None,
        typer.Option(
            "--route-prefix", metavar="PATH", help="HTTP path prefix of the application. Default: /."
        ),
    ] = None,
    app_dir: AppDirOption = ".",
    working_dir: WorkingDirOption = None,
    runtime_env: RuntimeEnvOption = None,
    runtime_env_json: RuntimeEnvJsonOption = None,
    reload: Annotated[
        bool,
        typer.Option("--reload", "-r", help="Deploy again when a file in the directory of the code changes."),
    ] = False,
    blocking: Annotated[
        bool,
        typer.Option(
            "--blocking/--non-blocking",
            help="Stay until Ctrl-C, which is the default, or return once it serves, which needs a running stack.",
        ),
    ] = True,
    http_host: OwnHttpHostOption = None,
    http_port: OwnHttpPortOption = None,
    address: AddressOption = None,
) -> None:
    """Run applications until Ctrl-C, which deletes them again.

    Examples:
      muster run app:app

      muster run app:build model=small --name demo --route-prefix /demo

      muster run shop.yaml

    Deploys what bind() returned, what a function builds, or the applications of a file as 'muster build' writes it,
    and shows what their replicas print, and a line for each request unless a logging_config says otherwise. Where no
    stack is found, one runs within this process, and ends with it. The code is imported here and sent to the hosts.
    'muster deploy' deploys applications that stay. With --json, prints the outcome of each application and each log
    line as a line of JSON.
    """


def _command(context: typer.Context, values: dict[str, Any]) -> None:
    session = get_session(context)
    choice = pop_stack_choice(values)
    with session.reporting(as_json=values["as_json"], is_rays=True):
        run_of_command = _build_run(session, choice, **values)
        code = asyncio.run(run_of_command.run())
    if code is not ExitCode.OK:
        raise typer.Exit(code)


def _finds_stack(session: Session, choice: StackChoice) -> bool:
    try:
        session.find_stack(choice)
    except BusUnavailable:
        return False
    return True


def _build_run(
    session: Session,
    choice: StackChoice,
    *,
    target: str,
    arguments: list[str] | None,
    name: str | None,
    app_dir: str,
    reload: bool,
    blocking: bool,
    http_host: str | None,
    http_port: int | None,
    address: str | None,
    as_json: bool,
    **options: str | None,
) -> ServeRun:
    # Only here: these import Pydantic and what pickles code.
    from muster.cli.serve_deploy import (  # noqa: PLC0415 - as above
        import_places,
        prepare_file,
        prepare_import_path,
        read_default_env,
        show_warnings,
    )

    if reload and not blocking:
        raise BadField("--non-blocking", "conflicts with --reload")
    note_address(address)
    show_warnings()
    of_application = ServeOptions(**options)
    places = import_places(session, app_dir)
    listen = {"http_host": http_host, "http_port": http_port}
    starts_stack = blocking and not _finds_stack(session, choice)
    path = session.directory / target
    if path.is_file() or path.suffix in FILE_SUFFIXES:
        (print_error if as_json else print_line)(f"Running config file: '{target}'.")
        note = of_application.ignored_with_file(name, arguments or (), has_environment=True)
        if note is not None:
            print_error(note)

        def load() -> ServeRequest:
            text = parsing.read_text(path, "FILE")
            runtime_env = read_default_env(of_application, session.directory)
            request, config = prepare_file(text, target, path.parent, places, runtime_env=runtime_env)
            if (note := config.note(has_listen=starts_stack)) is not None:
                print_error(note)
            request.check_built()
            return msgspec.structs.replace(request, logs_requests=True)
    else:
        (print_error if as_json else print_line)(f"Running import path: '{target}'.")

        def load() -> ServeRequest:
            request = prepare_import_path(
                target,
                read_arguments(arguments or ()),
                of_application.read_runtime_env(session.directory),
                session.directory,
                places,
                name=name,
                route_prefix=of_application.route_prefix or "/",
                is_recorded=False,
            )
            return msgspec.structs.replace(request, logs_requests=True)

    working_dir = of_application.working_dir
    local = [] if working_dir is None or "://" in working_dir else [session.directory / working_dir]
    return ServeRun(
        session,
        choice,
        load,
        own_stack={name: value for name, value in listen.items() if value is not None} if blocking else None,
        watched=[*local, *places] if reload else (),
        is_blocking=blocking,
        as_json=as_json,
    )


run = build_command(_run, _command, STACK_OPTIONS)
run.__name__ = run.__qualname__ = "run"
