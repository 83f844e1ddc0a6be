"""A controller that a test plays, behind the real admin client: what commands send is what would go over the bus."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer.main
from typer.testing import CliRunner, Result

from muster.cli.main import app
from muster.cli.session import Session
from muster.client.admin import AdminClient, Caller, Stack
from muster.client.requests import AdminReply, StackAddress
from serve_common.api.commands import ChangeReply, Request, ShutdownReply
from serve_common.api.queries import COMMANDS, VERBS
from serve_common.api.views import (
    DeploymentStatus,
    DeploymentView,
    ErrorView,
    GoalStatus,
    GoalView,
    HostView,
    PlanView,
    ProxyView,
    ReplicaView,
    StatusView,
)
from serve_common.config.backend import BackendConfig, ReplicaConfig
from serve_common.errors import BadField, BusAuthorizationFailed, BusUnavailable, ServeError
from serve_common.names import GoalId
from serve_common.nats.protocol import Greeting
from serve_common.protocol.captures import CapturedPair
from serve_common.protocol.subjects import Subjects

COMMANDS_BUILT = typer.main.get_command(app)
GOAL = GoalId("goal-1")
DEPLOYMENT = DeploymentView(
    name="default/digits",
    status=DeploymentStatus.HEALTHY,
    message="",
    route_prefix="/digits",
    methods=["GET", "POST"],
    version="v1",
    code_version=1,
    backend_config=BackendConfig(num_replicas=1, user_config={"threshold": 0.5}),
    replica_config=ReplicaConfig(import_path="digits:Digits"),
    goal_id=GOAL,
    goal_status=GoalStatus.SUCCEEDED,
    replicas=[ReplicaView(replica_tag="default/digits#1", state="running", host_id="host-1", version="v1")],
    started_at=1_700_000_000.0,
)
PROXY = ProxyView(
    proxy_id="proxy-1", status="live", report_age_s=0.5, address="0.0.0.0:8000", applied_snapshot_id=9
)
HOST = HostView(
    host_id="host-1",
    status="live",
    report_age_s=0.25,
    resources={"CPU": 2.0, "memory": 2.5 * 2**30},
    num_replicas=2,
)
STATUS = StatusView(
    controller_id="controller-1",
    epoch=3,
    store_available=True,
    snapshot_id=9,
    deployments=[DEPLOYMENT],
    hosts=[HOST],
    proxies=[PROXY],
)


class PlayedController:
    """Implements `muster.client.requests.Requests`: answers each verb as a test says, and keeps what was asked."""

    where = "nats://stack.example:4222"

    def __init__(self) -> None:
        self.reached: StackAddress | None = None
        self.asked: list[tuple[str, Request]] = []
        self.called: list[tuple[str, bytes, Mapping[str, str]]] = []
        self.goal = GoalView(goal_id=GOAL, status=GoalStatus.SUCCEEDED)
        self.progress: list[str] = []
        self.raises: BaseException | None = None
        """Instead of any answer, of controllers and of endpoints."""
        self.nats: Greeting | None = None
        self.response = AdminReply(b"7")
        """Of every endpoint that is called."""
        self.responses: dict[str, AdminReply] = {}
        """Of some endpoints, by the end of the subject, instead."""
        self.captured: list[CapturedPair] = []
        """Requests of every endpoint."""
        self.answers: dict[str, Any] = {
            "get_all_applications": [],
            **dict.fromkeys(COMMANDS, ChangeReply(goal_id=GOAL, updating=True)),
            "shutdown": ShutdownReply(goal_ids=[GOAL, GoalId("goal-2")]),
            "get_deployment_info": DEPLOYMENT,
            "get_http_proxies": [PROXY],
            "get_status": STATUS,
            "plan": PlanView(updating=False, replicas=[], notes=[]),
            "wait_for_goal": self._wait,
            "version": metadata.version("muster"),
        }

    async def request(
        self, subject: str, body: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> AdminReply:
        if self.raises is not None:
            raise self.raises
        if subject.startswith("$SRV.PING."):
            return AdminReply(msgspec.json.encode({"version": self.answers["version"]}))
        verb = subject.removeprefix("serve.admin.")
        if verb == subject:
            self.called.append((subject.removeprefix("serve.call."), body, headers or {}))
            return self.responses.get(subject.removeprefix("serve.call."), self.response)
        request = msgspec.json.decode(body, type=VERBS[verb])
        self.asked.append((verb, request))
        answer = self.answers.get(verb)
        if callable(answer):
            answer = answer(request)
        if isinstance(answer, ServeError):
            field = answer.field if isinstance(answer, BadField) else ""
            view = ErrorView(code=answer.error_code, message=str(answer), field=field)
            return AdminReply(msgspec.json.encode(view), {"Nats-Service-Error-Code": str(answer.status_hint)})
        if isinstance(answer, BaseException):
            raise answer
        return AdminReply(msgspec.json.encode(answer))

    def _wait(self, query: Any) -> GoalView:
        """Each query but one without patience meets the next step of the progress, then the end."""
        if not self.progress:
            return self.goal
        message = self.progress.pop(0) if query.timeout_s else self.progress[0]
        return GoalView(goal_id=query.goal_id, status=GoalStatus.PENDING, message=message)

    @asynccontextmanager
    async def connect(
        self, address: StackAddress, *, retry_for_s: float, on_retry: Callable[[str], None]
    ) -> AsyncIterator[Stack]:
        self.reached = address
        if isinstance(self.raises, BusAuthorizationFailed | BusUnavailable):
            raise self.raises
        admin = AdminClient(self, Subjects(), retry_for_s=0.0)
        yield Stack(
            admin=admin,
            caller=Caller(self, Subjects()),
            captures=lambda _tag: self,  # type: ignore[arg-type,return-value] - reads as `CaptureReader`
            nats=self.nats,
        )

    async def read(self, limit: int) -> list[CapturedPair]:
        """The newest captured requests."""
        return self.captured[-limit:]

    def asked_of(self, verb: str) -> list[Any]:
        return [request for asked, request in self.asked if asked == verb]


@pytest.fixture
def controller() -> PlayedController:
    return PlayedController()


@pytest.fixture
def muster(
    controller: PlayedController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """Runs `muster` in an empty directory, with the stack of ``controller`` at stack.example."""

    # The runner would build all commands anew for every run.
    monkeypatch.setattr("typer.testing._get_command", lambda _app: COMMANDS_BUILT)

    def run(
        *arguments: str,
        given: str | bytes | None = None,
        environment: Mapping[str, str] | None = None,
        **more: Any,
    ) -> Result:
        variables = {"MUSTER_NATS_URL": "nats://stack.example"} if environment is None else environment
        session = Session(connect=controller.connect, environment=variables, directory=tmp_path, **more)
        return CliRunner().invoke(app, arguments, obj=session, input=given, catch_exceptions=False)

    return run
