"""`muster up` around a stack that a test plays: what it tells, its example, and what Ctrl-C does."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest
from typer.testing import CliRunner, Result

from muster.cli.main import app
from muster.cli.session import Session
from muster.cli.up import UpReport
from muster.client.requests import StackAddress
from muster.embedded.options import PortTaken, StackOptions
from muster.embedded.process import Happened, ProcessEvent
from muster.embedded.run_record import RunRecord
from muster.secrets import generate
from serve_common.api.commands import ChangeReply, Deploy, Request
from serve_common.api.queries import GetDeploymentInfo, GetHttpProxies
from serve_common.api.views import DeploymentStatus, DeploymentView, GoalStatus, GoalView
from serve_common.config.backend import BackendConfig, ReplicaConfig
from serve_common.errors import NotFound, TransientError
from serve_common.names import GoalId


def digits(status: DeploymentStatus, goal_status: GoalStatus = GoalStatus.SUCCEEDED) -> DeploymentView:
    return DeploymentView(
        name="default/digits",
        status=status,
        message="0 of 2 replicas serve",
        route_prefix="/digits",
        methods=["GET", "POST"],
        version="mine",
        code_version=1,
        backend_config=BackendConfig(num_replicas=2),
        replica_config=ReplicaConfig(import_path="digits:Digits"),
        goal_id=GoalId("goal-1"),
        goal_status=goal_status,
        replicas=[],
    )


class PlayedStack:
    """Both the embedded stack and its controller."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.options: StackOptions | None = None
        self.fails: Exception | None = None
        self.admin_fails: Exception | None = None
        self.is_running = False
        self.was_stopped = False
        self.deployed: list[Deploy] = []
        self.found: list[DeploymentView | None] = [None]
        self.goal = GoalView(goal_id=GoalId("goal-1"), status=GoalStatus.SUCCEEDED)
        self.on_event: Callable[[ProcessEvent], None] = lambda _event: None
        self.on_notice: Callable[[str], None] = lambda _text: None

    def make(self, state_dir: Path, options: StackOptions, **heard: Any) -> Self:
        self.options = options
        self.on_event, self.on_notice = heard["on_event"], heard["on_notice"]
        generate(state_dir / "secrets")
        return self

    async def __aenter__(self) -> Self:
        if self.fails is not None:
            raise self.fails
        self.on_notice("port 4222 is in use; NATS listens on 4333")
        self.on_event(ProcessEvent(name="nats", happened=Happened.STARTED, pid=7))
        self.on_event(ProcessEvent(name="nats", happened=Happened.READY, pid=7))
        self.is_running = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.on_event(ProcessEvent(name="nats", happened=Happened.DIED, pid=7, detail="killed by SIGKILL"))
        self.on_event(ProcessEvent(name="nats", happened=Happened.READY, pid=8, restarts=1))
        self.is_running = False
        self.was_stopped = True

    @property
    def record(self) -> RunRecord:
        state_dir = self._directory / ".muster"
        return RunRecord(
            stack_id="0123456789abcdef",
            state_dir=str(state_dir),
            pid=1,
            nats_url="nats://127.0.0.1:4333",
            nats_monitor_url="http://127.0.0.1:8222",
            http_url="http://127.0.0.1:8000",
            postgres_dsn="postgresql://muster@127.0.0.1:5433/muster",
            secrets=str(state_dir / "secrets"),
            ports={},
            ops_urls={"controller": "http://127.0.0.1:9101"},
            console_url="http://127.0.0.1:8080",
        )

    @property
    def admin(self) -> PlayedStack:
        return self

    @property
    def caller(self) -> Any:
        raise AssertionError("not called")

    @asynccontextmanager
    async def connect(
        self, address: StackAddress, *, retry_for_s: float, on_retry: Callable[[str], None]
    ) -> AsyncIterator[PlayedStack]:
        assert self.is_running
        assert address.urls == ("nats://127.0.0.1:4333",)
        assert address.credentials_file
        yield self

    async def call(self, request: Request[Any]) -> Any:
        match request:
            case Deploy():
                if self.admin_fails is not None:
                    raise self.admin_fails
                self.deployed.append(request)
                return ChangeReply(goal_id=GoalId("goal-1"), updating=True)
            case GetDeploymentInfo():
                found = self.found.pop(0) if len(self.found) > 1 else self.found[0]
                if found is None:
                    raise NotFound("name: there is none")
                return found
            case GetHttpProxies():
                raise TransientError("only a convenience")
        raise AssertionError(f"{request.verb} is not played")

    async def wait_for_goal(self, goal_id: GoalId, **_: Any) -> GoalView:
        return self.goal


@pytest.fixture
def stack(tmp_path: Path) -> PlayedStack:
    return PlayedStack(tmp_path)


@pytest.fixture
def up(stack: PlayedStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    staying = UpReport.staying

    def stay(report: UpReport) -> None:
        """The signal comes when the command has nothing left to do but to wait."""
        staying(report)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(UpReport, "staying", stay)

    def run(*arguments: str) -> Result:
        session = Session(connect=stack.connect, make_embedded=stack.make, environment={}, directory=tmp_path)
        return CliRunner().invoke(app, ["up", *arguments], obj=session, catch_exceptions=False)

    return run


def test_it_tells_what_runs_where_and_ends_in_order(up: Callable[..., Result], stack: PlayedStack) -> None:
    result = up("--http-port", "0", "--num-cpus", "2", "--http-host", "0.0.0.0", "--proxy-processes", "3")
    assert result.exit_code == 0, result.output
    assert stack.options == StackOptions(
        http_host="0.0.0.0", http_port=0, num_cpus=2, proxy_processes=3, has_console=True
    )
    for text in (
        "port 4222 is in use",
        "nats          is ready",
        "ready after",
        "http://127.0.0.1:8000",
        "nats://127.0.0.1:4333",
        "http://127.0.0.1:9101/metrics",
        "http://127.0.0.1:8080  (sign in as admin with the password in .muster/secrets/console_admin_password)",
        ".muster/logs",
        "nats died: killed by SIGKILL",
        "nats is back (pid 8, start 2)",
        "stopped after",
    ):
        assert text in result.stdout
    assert stack.was_stopped
    assert stack.deployed == []


@pytest.mark.parametrize(
    ("arguments", "expected"), [(["--console-port", "81"], (True, 81)), (["--no-console"], (False, 8080))]
)
def test_the_console_has_the_port_that_is_wished_or_is_left_out(
    up: Callable[..., Result], stack: PlayedStack, arguments: list[str], expected: tuple[bool, int]
) -> None:
    up(*arguments)
    assert stack.options is not None
    assert (stack.options.has_console, stack.options.console_port) == expected


def test_without_the_first_password_the_banner_says_where_another_was_set(
    stack: PlayedStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = msgspec.structs.replace(stack.record, secrets=str(tmp_path / "none"))
    UpReport(directory=tmp_path, as_json=False).ready(record, 1.0)
    assert "(sign in as admin with what 'muster console user set-password' set)" in capsys.readouterr().out
    UpReport(directory=tmp_path, as_json=False).ready(msgspec.structs.replace(record, console_url=""), 1.0)
    assert "sign in" not in capsys.readouterr().out


def test_as_json_every_line_is_an_event(up: Callable[..., Result]) -> None:
    events = [json.loads(line) for line in up("--json").stdout.splitlines()]
    assert [event["event"] for event in events] == [
        *("notice", "started", "ready", "stack_ready", "stopping", "died", "ready", "stopped")
    ]
    assert events[3]["stack"]["nats_url"] == "nats://127.0.0.1:4333"


def test_the_example_is_deployed_and_what_to_try_is_printed(
    up: Callable[..., Result], stack: PlayedStack
) -> None:
    result = up("--deploy-example")
    assert result.exit_code == 0
    [request] = stack.deployed
    assert request.name == "default/digits"
    assert request.route_prefix == "/digits"
    assert Path(request.replica_config.app_dir, "digits.py").is_file()
    assert Path(request.replica_config.app_dir).is_absolute()
    assert request.replica_config.ray_actor_options.num_cpus == 0.5
    assert request.backend_config.num_replicas == 2
    assert request.version
    assert "sample.png http://127.0.0.1:8000/digits" in result.stdout
    assert "evaluate.py http://127.0.0.1:8000/digits" in result.stdout


def test_an_example_that_is_there_is_left_as_it_is_and_waited_for(
    up: Callable[..., Result], stack: PlayedStack
) -> None:
    changed = msgspec.structs.replace(digits(DeploymentStatus.HEALTHY), route_prefix="/moved")
    stack.found = [changed, digits(DeploymentStatus.UNHEALTHY), changed]
    result = up("--deploy-example")
    assert stack.deployed == []
    assert "sample.png http://127.0.0.1:8000/moved" in result.stdout


def test_an_example_that_never_served_is_deployed_again(
    up: Callable[..., Result], stack: PlayedStack
) -> None:
    stack.found = [digits(DeploymentStatus.UNHEALTHY, GoalStatus.FAILED), digits(DeploymentStatus.HEALTHY)]
    up("--deploy-example")
    assert len(stack.deployed) == 1


def test_the_stack_stays_up_when_its_example_fails(up: Callable[..., Result], stack: PlayedStack) -> None:
    stack.goal = GoalView(goal_id=GoalId("goal-1"), status=GoalStatus.FAILED, error="RuntimeError: why")
    result = up("--deploy-example")
    assert result.exit_code == 0
    assert "RuntimeError: why" in result.stdout
    assert "Ctrl-C stops it." in result.stdout

    stack.admin_fails = TransientError("no controller answers")
    result = up("--deploy-example")
    assert result.exit_code == 0
    assert "the example was not deployed: no controller answers" in result.stdout
    assert "Ctrl-C stops it." in result.stdout


def test_a_stack_that_cannot_start_says_why(up: Callable[..., Result], stack: PlayedStack) -> None:
    stack.fails = PortTaken("port 8000 is in use; choose another with --http-port")
    result = up()
    assert result.exit_code == 1
    assert "error: port 8000 is in use" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_a_shell_left_ignored_stops_the_stack_too(
    number: signal.Signals, up: Callable[..., Result], stack: PlayedStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell starts background jobs with SIGINT ignored, and `nohup` with SIGHUP; both are inherited."""
    monkeypatch.setattr(UpReport, "staying", lambda _report: os.kill(os.getpid(), number))
    before = signal.signal(number, signal.SIG_IGN)
    try:
        assert up().exit_code == 0
    finally:
        signal.signal(number, before)
    assert stack.was_stopped
