"""Commands as a person or a script meets them: exit codes, lines and JSON, with a stack that a test plays."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from muster.cli.main import app
from muster.cli.session import Session
from muster.client.address import StackAddress
from muster.client.requests import AdminReply, UnknownError
from serve_common.api.commands import ChangeReply, DeleteDeployment, Deploy
from serve_common.api.queries import GetDeploymentInfo, GetStatus, ListDeployments
from serve_common.api.views import (
    DeploymentStatus,
    DeploymentView,
    GoalStatus,
    GoalView,
    HostView,
    ProxyView,
    ReplicaView,
    StatusView,
)
from serve_common.config.backend import BackendConfig
from serve_common.config.replica import ReplicaConfig
from serve_common.errors import (
    BadField,
    BusAuthorizationFailed,
    BusUnavailable,
    Conflict,
    DeadlineExceeded,
    LimitReached,
    NotFound,
    PermanentError,
    ServeError,
    StoreUnavailable,
    TransientError,
    UserCodeRaised,
)
from serve_common.identities.credentials import parse_credentials_file
from serve_common.names import GoalId

TRACEBACK = 'Traceback (most recent call last):\n  File "digits.py", line 3\nRuntimeError: [no] model file'


def deployment(**changes: Any) -> DeploymentView:
    """`digits` as it is when all is well."""
    view = DeploymentView(
        name="default/digits",
        status=DeploymentStatus.HEALTHY,
        message="",
        route_prefix="/digits",
        methods=["GET", "POST"],
        version="1",
        code_version=1,
        backend_config=BackendConfig(num_replicas=2),
        replica_config=ReplicaConfig(import_path="digits:Digits"),
        goal_id=GoalId("goal-1"),
        goal_status=GoalStatus.SUCCEEDED,
        replicas=[
            ReplicaView(replica_tag=f"default/digits#{n}", state="running", host_id="host-1", version="1")
            for n in (1, 2)
        ],
    )
    return msgspec.structs.replace(view, **changes)


class PlayedStack:
    """Implements `muster.cli.ports.StackPort`; what it answers is set by each test."""

    def __init__(self) -> None:
        self.reached: StackAddress | None = None
        self.deployed: list[Deploy] = []
        self.called: list[tuple[str, bytes, Mapping[str, str]]] = []
        self.is_updating = True
        self.goal = GoalView(goal_id=GoalId("goal-1"), status=GoalStatus.SUCCEEDED)
        self.progress: list[str] = []
        self.delete_goal: GoalId | None = GoalId("goal-2")
        self.deployment: DeploymentView | None = deployment()
        self.proxy_address = "0.0.0.0:8000"
        self.answer = AdminReply(b"7")
        self.is_too_large = False
        self.raises: BaseException | None = None

    @property
    def admin(self) -> PlayedStack:
        return self

    @property
    def caller(self) -> PlayedStack:
        return self

    @asynccontextmanager
    async def connect(
        self, address: StackAddress, *, retry_for_s: float, on_retry: Callable[[str], None]
    ) -> AsyncIterator[PlayedStack]:
        self.reached = address
        if isinstance(self.raises, BusAuthorizationFailed | BusUnavailable):
            raise self.raises
        yield self

    def _raise(self) -> None:
        if self.raises is not None:
            raise self.raises

    async def change(self, request: Deploy | DeleteDeployment) -> ChangeReply:
        self._raise()
        if isinstance(request, DeleteDeployment):
            return ChangeReply(goal_id=self.delete_goal, updating=self.delete_goal is not None)
        self.deployed.append(request)
        return ChangeReply(goal_id=self.goal.goal_id, updating=self.is_updating)

    async def get_deployment_info(self, request: GetDeploymentInfo) -> DeploymentView:
        self._raise()
        if self.deployment is None:
            raise NotFound(f"name: there is no deployment {request.name!r}")
        return self.deployment

    async def list_deployments(self, request: ListDeployments) -> list[DeploymentView]:
        return [] if self.deployment is None else [self.deployment]

    async def get_http_proxies(self) -> list[ProxyView]:
        return (await self.get_status(GetStatus())).proxies

    async def get_status(self, request: GetStatus) -> StatusView:
        self._raise()
        if self.is_too_large and request.deployments:
            raise LimitReached("the answer has 2000000 bytes and NATS carries 1048576 in one message")
        return StatusView(
            controller_id="controller-1",
            epoch=3,
            store_available=True,
            snapshot_id=9,
            deployments=[] if self.deployment is None or not request.deployments else [self.deployment],
            hosts=[
                HostView(
                    host_id="host-1",
                    status="live",
                    report_age_s=0.25,
                    resources={"CPU": 2.0, "memory": 2.5 * 2**30},
                    num_replicas=2,
                )
            ],
            proxies=[
                ProxyView(
                    proxy_id="proxy-1",
                    status="live",
                    report_age_s=0.5,
                    address=self.proxy_address,
                    applied_snapshot_id=9,
                )
            ],
        )

    async def wait_for_goal(
        self, goal_id: GoalId, *, deadline_s: float, on_progress: Callable[[GoalView], None]
    ) -> GoalView:
        for message in self.progress:
            if deadline_s == 0:
                return GoalView(goal_id=goal_id, status=GoalStatus.PENDING, message=message)
            on_progress(GoalView(goal_id=goal_id, status=GoalStatus.PENDING, message=message))
        return self.goal

    async def call(
        self, name: str, body: bytes, *, headers: Mapping[str, str], timeout_s: float
    ) -> AdminReply:
        self._raise()
        self.called.append((name, body, headers))
        return self.answer


Muster = Callable[..., Result]
DEPLOY = ("deploy", "digits:Digits", "--name", "digits")


@pytest.fixture
def stack() -> PlayedStack:
    return PlayedStack()


@pytest.fixture
def muster(stack: PlayedStack, tmp_path: Path) -> Muster:
    """Runs `muster` with arguments, in an empty directory with a stack at stack.example."""

    def run(
        *arguments: str, given: bytes | None = None, environment: Mapping[str, str] | None = None
    ) -> Result:
        variables = {"MUSTER_NATS_URL": "nats://stack.example"} if environment is None else environment
        session = Session(connect=stack.connect, environment=variables, directory=tmp_path)
        return CliRunner().invoke(app, arguments, obj=session, input=given, catch_exceptions=False)

    return run


def test_a_deploy_sends_what_was_given_and_says_where_it_serves(
    muster: Muster, stack: PlayedStack, tmp_path: Path
) -> None:
    (tmp_path / "apps").mkdir()
    stack.progress = ["0 of 2 replicas run", "0 of 2 replicas run", "1 of 2 replicas run"]
    result = muster(
        *DEPLOY,
        *("--app", "shop", "--route-prefix", "/digits/", "--num-replicas", "2", "--version", "7"),
        *("--user-config", '{"threshold": 0.5}', "--app-dir", "apps", "--methods", "get,POST"),
        *("--ray-actor-options", '{"num_cpus": 4, "resources": {"disk": 1}}', "--num-cpus", "0.5"),
        *("--init-args", "[1]", "--init-kwargs", '{"a": 2}', "--max-constructor-retry-count", "1"),
    )
    assert result.exit_code == 0, result.output
    [request] = stack.deployed
    assert request.name == "shop/digits"
    assert request.route_prefix == "/digits"
    assert request.version == "7"
    assert request.methods == ["GET", "POST"]
    assert request.backend_config == BackendConfig(
        num_replicas=2, user_config={"threshold": 0.5}, max_constructor_retry_count=1
    )
    config = request.replica_config
    assert config.app_dir == str(tmp_path / "apps")
    assert (config.init_args, config.init_kwargs) == ([1], {"a": 2})
    assert (config.ray_actor_options.num_cpus, config.ray_actor_options.resources) == (0.5, {"disk": 1.0})
    assert "shop/digits is deployed: 2 replicas, version 1" in result.stdout
    assert "curl http://stack.example:8000/digits" in result.stdout
    assert result.stderr.splitlines() == [
        "shop/digits: 0 of 2 replicas run",
        "shop/digits: 1 of 2 replicas run",
    ]


def test_a_failed_deploy_shows_the_whole_traceback_and_what_still_serves(
    muster: Muster, stack: PlayedStack
) -> None:
    stack.goal = GoalView(goal_id=GoalId("goal-1"), status=GoalStatus.FAILED, error=TRACEBACK)
    result = muster(*DEPLOY)
    assert result.exit_code == 1
    assert TRACEBACK in result.stderr
    assert "What served before still serves: 2 replicas (version 1)." in result.stderr
    assert result.stdout == ""

    assert stack.deployment is not None
    none = msgspec.structs.replace(stack.deployment.backend_config, num_replicas=0)
    stack.deployment = msgspec.structs.replace(stack.deployment, replicas=[], backend_config=none)
    assert "What was there before is back, scaled to zero as it was." in muster(*DEPLOY).stderr

    stack.deployment = None
    assert "Nothing serves digits." in muster(*DEPLOY).stderr


def test_a_failed_deploy_as_json_bears_the_traceback(muster: Muster, stack: PlayedStack) -> None:
    stack.goal = GoalView(goal_id=GoalId("goal-1"), status=GoalStatus.FAILED, error=TRACEBACK)
    result = muster(*DEPLOY, "--json")
    assert result.exit_code == 1
    outcome = json.loads(result.stdout)
    assert outcome["result"] == "failed"
    assert outcome["error"] == TRACEBACK
    assert outcome["deployment"]["name"] == "default/digits"


def test_a_missing_module_without_app_dir_earns_a_hint(muster: Muster, stack: PlayedStack) -> None:
    stack.goal = GoalView(
        goal_id=GoalId("goal-1"),
        status=GoalStatus.FAILED,
        error="ModuleNotFoundError: No module named 'digits'",
    )
    assert "hint: --app-dir" in muster(*DEPLOY).stderr


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [
        (GoalStatus.SUPERSEDED, 1, "another change of digits came after this one: replaced by goal-2"),
        (GoalStatus.PENDING, 5, "digits: not done after"),
    ],
)
def test_a_deploy_that_did_not_end_well_says_so(
    muster: Muster, stack: PlayedStack, status: GoalStatus, code: int, text: str
) -> None:
    stack.goal = GoalView(goal_id=GoalId("goal-1"), status=status, error="replaced by goal-2", message="why")
    result = muster(*DEPLOY, "--timeout-s", "0")
    assert result.exit_code == code
    assert text in result.stderr


def test_nothing_to_do_is_judged_by_what_runs_not_by_an_older_goal(
    muster: Muster, stack: PlayedStack
) -> None:
    stack.is_updating = False
    stack.goal = GoalView(
        goal_id=GoalId("goal-1"), status=GoalStatus.FAILED, error="of a change undone since"
    )
    stack.deployment = deployment(goal_status=GoalStatus.FAILED)
    result = muster(*DEPLOY)
    assert result.exit_code == 0
    assert "nothing to do: digits is already as given; it is healthy" in result.stdout


def test_the_same_deploy_again_waits_for_the_first_one_that_is_under_way(
    muster: Muster, stack: PlayedStack
) -> None:
    stack.is_updating = False
    stack.deployment = deployment(goal_status=GoalStatus.PENDING)
    stack.progress = ["1 of 2"]
    result = muster(*DEPLOY)
    assert "digits is deployed" in result.stdout
    assert "digits: 1 of 2" in result.stderr


def test_no_wait_returns_with_the_goal(muster: Muster, stack: PlayedStack) -> None:
    result = muster(*DEPLOY, "--no-wait", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["result"] == "accepted"
    assert json.loads(result.stdout)["goal_id"] == "goal-1"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--num-replicas", "-1"), "--num-replicas: is -1"),
        (("--route-prefix", "digits"), "--route-prefix"),
        (("--user-config", "{"), "--user-config"),
        (("--user-config", "@absent.yaml"), "absent.yaml"),
        (("--init-args", "{}"), "--init-args"),
        (("--init-kwargs", "[]"), "--init-kwargs"),
        (("--ray-actor-options", '{"cpus": 1}'), "--ray-actor-options"),
        (("--app", "a/b"), "--name"),
        (("--app-dir", "absent"), "--app-dir"),
        (("--num-replicas", "many"), "--num-replicas"),
    ],
)
def test_bad_input_is_refused_with_its_field_before_anything_is_sent(
    muster: Muster, stack: PlayedStack, arguments: tuple[str, ...], field: str
) -> None:
    result = muster(*DEPLOY, *arguments)
    assert result.exit_code == 2
    assert field in result.stderr
    assert stack.reached is None


def test_an_app_dir_that_only_the_hosts_have_is_passed_on_with_a_note(
    muster: Muster, stack: PlayedStack
) -> None:
    result = muster(*DEPLOY, "--app-dir", "/examples-in-the-container/digits")
    assert result.exit_code == 0
    assert stack.deployed[0].replica_config.app_dir == "/examples-in-the-container/digits"
    assert "does not exist here" in result.stderr


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("c.yaml", "threshold: 0.5\nnames: [a, b]\n", {"threshold": 0.5, "names": ["a", "b"]}),
        ("c.json", '{"threshold": 0.5}', {"threshold": 0.5}),
    ],
)
def test_a_user_config_may_come_from_a_file(
    muster: Muster, stack: PlayedStack, tmp_path: Path, name: str, content: str, expected: object
) -> None:
    (tmp_path / name).write_text(content)
    assert muster(*DEPLOY, "--user-config", f"@{name}").exit_code == 0
    assert stack.deployed[0].backend_config.user_config == expected


@pytest.mark.parametrize("content", ["a: 2024-01-01", "a: .nan", "{", "&a [*a]"])
def test_yaml_that_json_cannot_say_is_refused(muster: Muster, tmp_path: Path, content: str) -> None:
    (tmp_path / "c.yaml").write_text(content)
    result = muster(*DEPLOY, "--user-config", "@c.yaml")
    assert result.exit_code == 2
    assert "@c.yaml" in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadField("version", "must have 1 to 200 characters"), 2),
        (Conflict("route_prefix: taken"), 2),
        (NotFound("name: there is no deployment 'x'"), 4),
        (TransientError("no controller answers at nats://stack.example:4222"), 3),
        (StoreUnavailable("Postgres does not answer"), 3),
        (BusUnavailable("NATS at nats://stack.example:4222 does not answer"), 3),
        (BusAuthorizationFailed("NATS refused the user 'admin'"), 3),
        (DeadlineExceeded("no answer"), 5),
        (PermanentError("a person must look"), 1),
        (UserCodeRaised("ValueError"), 1),
        (ServeError("something of a later version"), 1),
        (RuntimeError("a bug of ours"), 1),
    ],
)
@pytest.mark.parametrize("command", [DEPLOY, ("status",), ("call", "digits"), ("delete", "digits")])
def test_every_error_is_a_plain_line_with_its_exit_code(
    muster: Muster, stack: PlayedStack, error: Exception, code: int, command: tuple[str, ...]
) -> None:
    stack.raises = error
    result = muster(*command)
    assert result.exit_code == code
    assert str(error) in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""

    as_json = muster(*command, "--json")
    assert as_json.exit_code == code
    assert str(error) in json.loads(as_json.stdout)["error"]["message"]


def test_an_error_of_the_users_code_keeps_its_code(muster: Muster, stack: PlayedStack) -> None:
    stack.raises = UnknownError("bad_image", "body: is not an image")
    result = muster("call", "digits", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"] == {"code": "bad_image", "message": "body: is not an image"}


def test_ctrl_c_while_waiting_says_that_the_change_goes_on(muster: Muster, stack: PlayedStack) -> None:
    stack.raises = KeyboardInterrupt()
    result = muster(*DEPLOY)
    assert result.exit_code == 130
    assert "the change goes on: 'muster status digits'" in result.stderr


def test_status_shows_deployments_hosts_and_proxies(muster: Muster, stack: PlayedStack) -> None:
    stack.deployment = deployment(
        status=DeploymentStatus.UNHEALTHY, message=f"1 of 2 replicas serve: {TRACEBACK}"
    )
    result = muster("status")
    assert result.exit_code == 0
    row = next(line for line in result.stdout.splitlines() if line.startswith("digits"))
    assert row.split()[:5] == ["digits", "unhealthy", "1", "/digits", "2/2"]
    assert row.rstrip().endswith("RuntimeError: [no] model file")
    assert "2 CPU, 2.5 GiB memory" in result.stdout
    assert "proxy-1" in result.stdout
    assert "controller-1 leads in term 3" in result.stdout


def test_a_status_too_large_for_one_message_takes_its_deployments_in_pages(
    muster: Muster, stack: PlayedStack
) -> None:
    stack.is_too_large = True
    result = muster("status")
    assert result.exit_code == 0
    row = next(line for line in result.stdout.splitlines() if line.startswith("digits"))
    assert row.split() == ["digits", "healthy", "1", "/digits", "2/2"]
    assert "proxy-1" in result.stdout


def test_status_as_json_is_the_whole_view(muster: Muster) -> None:
    result = muster("status", "--json")
    view = msgspec.json.decode(result.stdout, type=StatusView)
    assert view.deployments == [deployment()]
    assert view.hosts[0].report_age_s == 0.25


def test_status_of_one_deployment_shows_its_replicas_and_its_whole_message(
    muster: Muster, stack: PlayedStack
) -> None:
    stack.deployment = deployment(message=TRACEBACK)
    result = muster("status", "digits")
    assert result.exit_code == 0
    assert "digits#2" in result.stdout
    assert TRACEBACK in result.stdout
    as_json = muster("status", "digits", "--json")
    assert msgspec.json.decode(as_json.stdout, type=DeploymentView) == stack.deployment

    stack.deployment = None
    assert muster("status", "digits").exit_code == 4


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [
        (GoalStatus.SUCCEEDED, 0, "digits is deleted"),
        (GoalStatus.FAILED, 1, "digits: the change failed:\nwhy"),
        (GoalStatus.SUPERSEDED, 1, "another change of digits"),
        (GoalStatus.PENDING, 5, "digits: not done after 0 s: 1 replica still stops"),
    ],
)
def test_a_delete_waits_and_tells_how_it_ended(
    muster: Muster, stack: PlayedStack, status: GoalStatus, code: int, text: str
) -> None:
    stack.goal = GoalView(
        goal_id=GoalId("goal-2"), status=status, error="why", message="1 replica still stops"
    )
    result = muster("delete", "digits")
    assert result.exit_code == code
    assert text in result.output
    assert json.loads(muster("delete", "digits", "--json").stdout)["result"] == status.value


def test_deleting_what_is_not_there_is_a_success(muster: Muster, stack: PlayedStack) -> None:
    stack.delete_goal = None
    result = muster("delete", "digits")
    assert result.exit_code == 0
    assert "nothing to do: digits does not exist" in result.stdout


def test_a_call_prints_the_answer_as_it_came(muster: Muster, stack: PlayedStack, tmp_path: Path) -> None:
    stack.answer = AdminReply(b"\x00\xff7", {"Content-Type": "image/x"})
    (tmp_path / "in.png").write_bytes(b"\x89PNG")
    result = muster("call", "shop/digits", "--data", "@in.png", "--header", "Accept: a:b")
    assert result.exit_code == 0
    assert result.stdout_bytes == b"\x00\xff7"
    assert stack.called == [("shop/digits", b"\x89PNG", {"Accept": "a:b"})]

    muster("call", "digits", "--data", "-", given=b"from a pipe")
    muster("call", "digits", "--data", "text")
    assert [body for _name, body, _headers in stack.called[1:]] == [b"from a pipe", b"text"]

    answer = json.loads(muster("call", "digits", "--json").stdout)
    assert answer == {"headers": {"Content-Type": "image/x"}, "body_base64": "AP83"}


@pytest.mark.parametrize(
    "arguments", [("--data", "@absent"), ("--header", "no colon"), ("--header", "a: \u2603")]
)
def test_a_call_that_cannot_be_is_refused(muster: Muster, arguments: tuple[str, ...]) -> None:
    result = muster("call", "digits", *arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.stderr


def test_secrets_are_made_once_and_never_shown(muster: Muster, tmp_path: Path) -> None:
    first = muster("secrets", "--directory", "secrets")
    assert first.exit_code == 0
    assert "made secrets/admin.creds" in first.stdout
    before = {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
    second = muster("secrets", "--directory", "secrets", "--json")
    assert json.loads(second.stdout)["made"] == json.loads(second.stdout)["changed"] == []
    assert "admin.creds" in json.loads(second.stdout)["kept"]
    assert {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()} == before
    _, seed = parse_credentials_file(before["admin.creds"])
    for secret in (seed, before["postgres_password"].strip()):
        assert secret not in first.output + second.output


def test_the_status_says_that_nats_has_plain_users(muster: Muster, tmp_path: Path) -> None:
    assert "warning: NATS has plain users" in muster("status").stderr
    (tmp_path / "given.creds").touch()
    assert "plain users" not in muster("status", "--creds", "given.creds").output


def test_a_role_is_rotated(muster: Muster, tmp_path: Path) -> None:
    muster("secrets", "--directory", "secrets")
    rotated = json.loads(muster("secrets", "--directory", "secrets", "--rotate", "host", "--json").stdout)
    assert rotated["changed"] == ["host.keys", "nats_identities.conf", "nats_operator.json"]
    assert muster("secrets", "--rotate", "nobody").exit_code == 2
    refused = muster("secrets", "--rotate", "host", "--plain")
    assert refused.exit_code == 2
    assert "--rotate" in refused.stderr


def test_passwords_for_plain_users_are_made_instead_of_identities(muster: Muster, tmp_path: Path) -> None:
    assert "made plain/nats_admin" in muster("secrets", "--directory", "plain", "--plain").stdout
    assert not list((tmp_path / "plain").glob("*.creds"))


def test_the_stack_may_be_named_before_or_after_the_command(muster: Muster, stack: PlayedStack) -> None:
    muster("--nats", "nats://early.example", "--user", "me", "status")
    assert stack.reached is not None
    assert (stack.reached.urls, stack.reached.user) == (("nats://early.example:4222",), "me")
    muster("--nats", "nats://early.example", "status", "--nats", "nats://late.example")
    assert stack.reached.urls == ("nats://late.example:4222",)


def test_without_any_stack_the_error_says_how_to_get_one(muster: Muster) -> None:
    result = muster("status", environment={})
    assert result.exit_code == 3
    assert "muster up" in result.stderr


def test_help_and_version_need_no_stack(muster: Muster, stack: PlayedStack) -> None:
    helped = muster("--help")
    assert helped.exit_code == 0
    for command in ("up", "deploy", "status", "call", "delete", "secrets"):
        assert command in helped.stdout
        assert muster(command, "--help").exit_code == 0
    assert muster("--version").stdout.startswith("muster ")
    assert muster("--versoin").exit_code == 2
    assert stack.reached is None
