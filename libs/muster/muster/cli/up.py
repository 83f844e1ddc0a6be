"""`muster up`: runs the whole stack on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from muster.cli.changes import describe, perform
from muster.cli.deployments import build_deploy_request
from muster.cli.output import Progress, print_json_line, print_line, shorten
from muster.cli.queries import HttpHostOption, HttpPortOption, JsonOption
from muster.cli.session import EmbeddedPort, ExitCode, Session, get_session
from muster.client.admin import AdminClient
from muster.client.requests import StackAddress
from muster.embedded.leftovers import kill_marked
from muster.embedded.options import CHECKOUT, DEFAULT_STATE_DIR, StackOptions
from muster.embedded.process import Happened, ProcessEvent
from muster.embedded.run_record import RunRecord
from muster.secrets import ADMIN_PASSWORD_FILE, FIRST_PERSON, Secrets
from serve_common.api.commands import Deploy
from serve_common.api.queries import GetDeploymentInfo
from serve_common.api.views import DeploymentStatus, DeploymentView, GoalStatus
from serve_common.config.backend import BackendConfig, RayActorOptions, ReplicaConfig
from serve_common.errors import NotFound, PermanentError, ServeError
from serve_common.identities.roles import Role
from serve_common.names import deployment_tag


class UpReport:
    """Prints lines for people, or with ``as_json`` one JSON object per line, each with its ``event``."""

    def __init__(self, *, directory: Path, as_json: bool) -> None:
        """Paths are printed relative to ``directory``."""
        self._directory = directory
        self._as_json = as_json
        self._is_ready = False

    def report_event(self, event: ProcessEvent) -> None:
        """Report an event of a process."""
        if self._as_json:
            self._emit(event.happened.value, **{k: v for k, v in _plain(event).items() if k != "happened"})
            return
        match event.happened:
            case Happened.READY if event.restarts:
                self._print(f"{event.name} is back (pid {event.pid}, start {event.restarts + 1})")
            case Happened.READY:
                self._print(f"  {event.name:<14}is ready")
            case Happened.DIED:
                self._print(f"{event.name} died: {event.detail}")
            case Happened.STARTED | Happened.STOPPED:
                return  # expected: the user requested it

    def report_notice(self, text: str) -> None:
        """Report a sentence for the user."""
        if self._as_json:
            self._emit("notice", text=text)
        else:
            self._print(f"  {text}")

    def starting(self) -> None:
        """Report that the stack starts."""
        if not self._as_json:
            self._print("starting the stack: NATS, Postgres, controller, replica host, proxy, console")

    def ready(self, record: RunRecord, seconds: float) -> None:
        """Report that everything is ready, with addresses and paths."""
        if self._as_json:
            self._emit("stack_ready", seconds=round(seconds, 3), stack=_plain(record))
            return
        rows = {
            "HTTP": record.http_url,
            **self._get_console_rows(record),
            "NATS": f"{record.nats_url}  (nats --creds {self._relative(record.secrets)}/admin.creds)",
            "NATS monitor": record.nats_monitor_url,
            "Postgres": record.postgres_dsn,
            **{f"{name} metrics": f"{url}/metrics" for name, url in record.ops_urls.items()},
            "state": self._relative(record.state_dir),
            "logs": f"{self._relative(record.state_dir)}/logs",
        }
        if Path(record.state_dir) != self._directory.resolve() / DEFAULT_STATE_DIR:
            rows["commands"] = f"find it with MUSTER_STATE_DIR={record.state_dir}"
        width = max(map(len, rows)) + 2
        lines = [f"ready after {seconds:.1f} s", "", *(f"  {k:<{width}}{v}" for k, v in rows.items()), ""]
        self._print("\n".join(lines))

    def _get_console_rows(self, record: RunRecord) -> dict[str, str]:
        if not record.console_url:
            return {}
        password = Path(record.secrets) / ADMIN_PASSWORD_FILE
        how = "with what 'muster console user set-password' set"
        if password.is_file():
            how = f"with the password in {self._relative(str(password))}"
        return {"console": f"{record.console_url}  (sign in as {FIRST_PERSON} {how})"}

    def example(self, lines: list[str], *, is_serving: bool) -> None:
        """Report the outcome of deploying the example."""
        if self._as_json:
            self._emit("example", is_serving=is_serving, text="\n".join(lines))
        else:
            self._print("\n".join(lines))

    def staying(self) -> None:
        """Report that startup is complete and how to stop the stack."""
        if not self._as_json:
            self._print("Ctrl-C stops it.")

    def stopping(self) -> None:
        """Report that a stop was requested."""
        if self._as_json:
            self._emit("stopping")
        else:
            self._print("\nstopping; once more kills at once")

    def stopped(self, seconds: float) -> None:
        """Report that everything is stopped."""
        if self._as_json:
            self._emit("stopped", seconds=round(seconds, 3))
        else:
            self._print(f"stopped after {seconds:.1f} s; the state is kept")

    def _print(self, text: str) -> None:
        """Print a text on standard output."""
        # A closed terminal or pipe must not end a stack that serves.
        with contextlib.suppress(OSError):
            print_line(text)

    def _emit(self, event: str, **facts: Any) -> None:
        with contextlib.suppress(OSError):
            print_json_line(json.dumps({"event": event, **facts}, ensure_ascii=False))

    def _relative(self, path: str) -> str:
        return relative_to_directory(self._directory, path)


def relative_to_directory(directory: Path, path: str | Path) -> str:
    """The path relative to ``directory`` if it lies below it; otherwise the absolute path."""
    relative = os.path.relpath(path, directory)
    return str(path) if relative.startswith("..") else relative


def _plain(value: Any) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(value)
    return plain


_ROUTE: Final = "/digits"
_DEPLOY_TIMEOUT_S: Final = 180.0
_HEALTHY_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.25


class ExampleDeployment:
    """Deploys examples/digits of this checkout unless it is already deployed.

    With it, the first minute with Muster ends with the response of a real model.
    """

    name: Final = "digits"

    def __init__(self, directory: Path, http_url: str, examples: Path = CHECKOUT / "examples") -> None:
        """Paths in printed commands are relative to ``directory``."""
        self._directory = directory
        self._http_url = http_url
        self._folder = examples / "digits"
        self.is_serving = False

    async def ensure(self, admin: AdminClient, progress: Progress) -> list[str]:
        """Deploy the example unless it exists, wait until it serves, and return lines for people.

        An existing deployment is left as it is: its user may have changed it. Raises `PermanentError` when the
        examples are missing, and what the controller raises.
        """
        there = await self._find(admin)
        if there is not None:
            trouble = await self._wait_until_healthy(admin, progress)
            self.is_serving = trouble is None
            return (
                [f"error: {self.name}: {trouble}"]
                if trouble is not None
                else self._example_commands(there.route_prefix)
            )
        if not self._folder.is_dir():
            raise PermanentError(f"there is no {self._folder}; examples come with the source")
        change = build_deploy_request(self._request())
        outcome = await perform(
            admin, change, timeout_s=_DEPLOY_TIMEOUT_S, is_waiting=True, host="127.0.0.1", progress=progress
        )
        self.is_serving = outcome.exit_code is ExitCode.OK
        if not self.is_serving:
            return describe(outcome, change)
        return [describe(outcome, change)[0], *self._example_commands(_ROUTE)]

    def _request(self) -> Deploy:
        return Deploy(
            name=deployment_tag(self.name),
            replica_config=ReplicaConfig(
                import_path="digits:Digits",
                app_dir=str(self._folder),
                ray_actor_options=RayActorOptions(num_cpus=0.5),
            ),
            backend_config=BackendConfig(num_replicas=2),
            route_prefix=_ROUTE,
            version="example",
        )

    async def _find(self, admin: AdminClient) -> DeploymentView | None:
        """The existing deployment; None also for one that is being deleted or has failed, which is replaced."""
        try:
            found = await admin.call(GetDeploymentInfo(name=self.name))
        except NotFound:
            return None
        has_failed = found.status is DeploymentStatus.UNHEALTHY and found.goal_status is GoalStatus.FAILED
        return None if has_failed or found.status is DeploymentStatus.DELETING else found

    async def _wait_until_healthy(self, admin: AdminClient, progress: Progress) -> str | None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _HEALTHY_TIMEOUT_S
        while True:
            deployment = await admin.call(GetDeploymentInfo(name=self.name))
            if deployment.status is DeploymentStatus.HEALTHY:
                return None
            if loop.time() >= deadline:
                return f"is {deployment.status.value}: {shorten(deployment.message)}"
            progress.show(deployment.message or deployment.status.value)
            await asyncio.sleep(_POLL_S)

    def _example_commands(self, route: str | None) -> list[str]:
        if route is None:
            return [f"{self.name} serves, without a route"]
        url = f"{self._http_url}{route}"
        sample = relative_to_directory(self._directory, self._folder / "sample.png")
        evaluate = relative_to_directory(self._directory, self._folder / "evaluate.py")
        python = relative_to_directory(self._directory, sys.executable)
        return [
            f"{self.name} serves; try it:",
            "",
            f"  curl --data-binary @{sample} {url}",
            f"  {python} {evaluate} {url}",
            "",
        ]


_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_EXAMPLE_RETRY_S: Final = 60.0
_SAME_SIGNAL_S: Final = 0.5
"""Seconds within which a second signal is the same request: shells, `timeout` and `make` also signal the group."""


class UpRun:
    """Runs a stack until a signal. Used once, from the main thread's event loop.

    The first signal cancels `run` wherever it is, also during the start, and the stack is stopped in order; a second
    one kills it.
    """

    def __init__(self, session: Session, stack: EmbeddedPort, report: UpReport) -> None:
        """``stack`` is not started yet."""
        self._session = session
        self._stack = stack
        self._report = report
        self._stop_requested_at: float | None = None
        self._task: asyncio.Task[None] | None = None

    async def run(self, *, deploy_example: bool) -> None:
        """Return when a signal requested it and everything is stopped. Raises what prevented the start."""
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        started_at = loop.time()
        self._report.starting()
        try:
            async with self._stack:
                self._report.ready(self._stack.record, loop.time() - started_at)
                if deploy_example:
                    await self._deploy_example()
                self._report.staying()
                await loop.create_future()  # until it is cancelled
        except asyncio.CancelledError:
            if self._stop_requested_at is None or self._task is None:
                raise
            self._task.uncancel()
            self._report.stopped(loop.time() - self._stop_requested_at)
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._stop_requested_at is None and self._task is not None:
            self._stop_requested_at = self._now()
            self._report.stopping()
            self._task.cancel()
        elif self._stop_requested_at is not None and self._now() - self._stop_requested_at >= _SAME_SIGNAL_S:
            self._kill()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _kill(self) -> None:
        try:
            kill_marked(self._stack.record.stack_id)
        finally:
            # Exit at once, without waiting for the orderly stop that is under way.
            os._exit(ExitCode.INTERRUPTED)

    async def _deploy_example(self) -> None:
        record = self._stack.record
        example = ExampleDeployment(self._session.directory, record.http_url)
        try:
            address = StackAddress(
                urls=(record.nats_url,),
                credentials_file=str(Secrets(Path(record.secrets)).credentials_file(Role.ADMIN)),
            )
            lines = await self._session.with_stack(
                address,
                example.name,
                lambda stack, progress: example.ensure(stack.admin, progress),
                retry_for_s=_EXAMPLE_RETRY_S,
            )
        except ServeError as error:
            # The stack serves without its example; the report shows why it is missing.
            self._report.example([f"error: the example was not deployed: {error}"], is_serving=False)
            return
        self._report.example(lines, is_serving=example.is_serving)


def up(
    context: typer.Context,
    *,
    state_dir: Annotated[
        Path,
        typer.Option(
            "--state-dir",
            metavar="DIR",
            help="Directory of all state; created if missing. Commands find another one than .muster by "
            "MUSTER_STATE_DIR.",
        ),
    ] = DEFAULT_STATE_DIR,
    http_host: HttpHostOption = "127.0.0.1",
    http_port: HttpPortOption = 8000,
    nats_port: Annotated[
        int,
        typer.Option(
            "--nats-port",
            metavar="PORT",
            min=0,
            max=65_535,
            help="Port of NATS; a free one is used when it is taken.",
        ),
    ] = 4222,
    num_cpus: Annotated[
        int | None,
        typer.Option(
            "--num-cpus",
            metavar="N",
            min=1,
            help="CPUs that all replicas together may reserve. Default: those of the machine, at least 8.",
        ),
    ] = None,
    proxy_processes: Annotated[
        int,
        typer.Option(
            "--proxy-processes",
            metavar="N",
            min=1,
            max=64,
            help="Number of proxy processes that share the HTTP port, 1 to 64.",
        ),
    ] = 1,
    http: Annotated[
        bool,
        typer.Option(
            "--http/--no-http", help="Whether there is a proxy; without, only handles and NATS call."
        ),
    ] = True,
    console: Annotated[
        bool, typer.Option("--console/--no-console", help="Whether there is a console: pages for a browser.")
    ] = True,
    console_port: Annotated[
        int,
        typer.Option(
            "--console-port",
            metavar="PORT",
            min=0,
            max=65_535,
            help="Port of the console on 127.0.0.1; a free one is used when it is taken.",
        ),
    ] = 8080,
    deploy_example: Annotated[
        bool, typer.Option("--deploy-example", help="Deploy examples/digits unless it is already deployed.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a whole stack on this machine until Ctrl-C.

    Example:
      muster up --deploy-example

    Runs NATS, Postgres, a controller, a replica host with Ray, a proxy and a console, and restarts each when it dies.
    State is kept: what is deployed is back at the next start. Ctrl-C stops everything in order, and the exit code is
    then 0; a second Ctrl-C kills at once. With --json, prints a line of JSON for each event; 'stack_ready' has the
    addresses.
    """
    session = get_session(context)
    with session.reporting(as_json=as_json):
        options = StackOptions(
            http_host=http_host,
            http_port=http_port,
            nats_port=nats_port,
            num_cpus=num_cpus,
            proxy_processes=proxy_processes,
            has_proxy=http,
            has_console=console,
            console_port=console_port,
        )
        report = UpReport(directory=session.directory, as_json=as_json)
        stack = session.make_embedded(
            session.directory / state_dir,
            options,
            on_event=report.report_event,
            on_notice=report.report_notice,
        )
        asyncio.run(UpRun(session, stack, report).run(deploy_example=deploy_example))
