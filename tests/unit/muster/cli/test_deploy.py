"""Commands as a person or a script meets them: deploys, restores, status, calls and secrets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import Result

from muster.cli.changes import proxy_urls
from muster.client.requests import AdminReply
from serve_common.api.commands import ChangeReply, RestoreReply
from serve_common.api.views import (
    DeploymentStatus,
    DeploymentView,
    GoalStatus,
    GoalView,
    PlannedAction,
    PlannedReplica,
    PlanView,
    StatusView,
)
from serve_common.config.backend import BackendConfig
from serve_common.errors import LimitReached, NotFound
from serve_common.identities.credentials import parse_credentials_file
from tests.unit.muster.cli.conftest import DEPLOYMENT, GOAL, PROXY, STATUS

Muster = Callable[..., Result]
DEPLOY = ("deploy", "digits:Digits", "--name", "digits")


TRACEBACK = 'Traceback (most recent call last):\n  File "digits.py", line 3\nRuntimeError: [no] model file'


def test_a_deploy_sends_what_was_given_and_says_where_it_serves(
    muster: Muster, controller: Any, tmp_path: Path
) -> None:
    (tmp_path / "apps").mkdir()
    controller.progress = ["0 of 2 replicas run", "0 of 2 replicas run", "1 of 2 replicas run"]
    result = muster(
        *DEPLOY,
        *("--app", "shop", "--route-prefix", "/digits/", "--num-replicas", "2", "--version", "7"),
        *("--user-config", '{"threshold": 0.5}', "--app-dir", "apps", "--methods", "get,POST"),
        *("--ray-actor-options", '{"num_cpus": 4, "resources": {"disk": 1}}', "--num-cpus", "0.5"),
        *("--init-args", "[1]", "--init-kwargs", '{"a": 2}', "--max-constructor-retry-count", "1"),
    )
    assert result.exit_code == 0, result.output
    [request] = controller.asked_of("deploy")
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
    assert "shop/digits is deployed: 1 replica, version v1" in result.stdout
    assert "curl http://stack.example:8000/digits" in result.stdout
    encrypted = msgspec.structs.replace(PROXY, address="https://0.0.0.0:8443")
    assert proxy_urls([encrypted], "stack.example") == ["https://stack.example:8443"]
    assert result.stderr.splitlines() == [
        "shop/digits: 0 of 2 replicas run",
        "shop/digits: 1 of 2 replicas run",
    ]


def test_a_failed_deploy_shows_the_whole_traceback_and_what_still_serves(
    muster: Muster, controller: Any
) -> None:
    controller.goal = GoalView(goal_id=GOAL, status=GoalStatus.FAILED, error=TRACEBACK)
    result = muster(*DEPLOY)
    assert result.exit_code == 1
    assert TRACEBACK in result.stderr
    assert "What served before still serves: 1 replica (version v1)." in result.stderr
    assert result.stdout == ""

    none = msgspec.structs.replace(DEPLOYMENT.backend_config, num_replicas=0)
    gone = msgspec.structs.replace(DEPLOYMENT, replicas=[], backend_config=none)
    controller.answers["get_deployment_info"] = gone
    assert "What was there before is back, scaled to zero as it was." in muster(*DEPLOY).stderr

    controller.answers["get_deployment_info"] = NotFound("name: there is no deployment")
    assert "Nothing serves digits." in muster(*DEPLOY).stderr


def test_a_failed_deploy_as_json_bears_the_traceback(muster: Muster, controller: Any) -> None:
    controller.goal = GoalView(goal_id=GOAL, status=GoalStatus.FAILED, error=TRACEBACK)
    result = muster(*DEPLOY, "--json")
    assert result.exit_code == 1
    outcome = json.loads(result.stdout)
    assert outcome["result"] == "failed"
    assert outcome["error"] == TRACEBACK
    assert outcome["deployment"]["name"] == "default/digits"


def test_a_missing_module_without_app_dir_earns_a_hint(muster: Muster, controller: Any) -> None:
    controller.goal = GoalView(
        goal_id=GOAL,
        status=GoalStatus.FAILED,
        error="ModuleNotFoundError: No module named 'digits'",
    )
    assert "hint: --app-dir" in muster(*DEPLOY).stderr


def test_nothing_to_do_is_judged_by_what_runs_not_by_an_older_goal(muster: Muster, controller: Any) -> None:
    controller.answers["deploy"] = ChangeReply(goal_id=GOAL, updating=False)
    controller.goal = GoalView(goal_id=GOAL, status=GoalStatus.FAILED, error="of a change undone since")
    controller.answers["get_deployment_info"] = msgspec.structs.replace(
        DEPLOYMENT, goal_status=GoalStatus.FAILED
    )
    result = muster(*DEPLOY)
    assert result.exit_code == 0
    assert "nothing to do: digits is already as given; it is healthy" in result.stdout


def test_the_same_deploy_again_waits_for_the_first_one_that_is_under_way(
    muster: Muster, controller: Any
) -> None:
    controller.answers["deploy"] = ChangeReply(goal_id=GOAL, updating=False)
    controller.answers["get_deployment_info"] = msgspec.structs.replace(
        DEPLOYMENT, goal_status=GoalStatus.PENDING
    )
    controller.progress = ["1 of 2"]
    result = muster(*DEPLOY)
    assert "digits is deployed" in result.stdout
    assert "digits: 1 of 2" in result.stderr


def test_an_app_dir_that_only_the_hosts_have_is_passed_on_with_a_note(
    muster: Muster, controller: Any
) -> None:
    result = muster(*DEPLOY, "--app-dir", "/examples-in-the-container/digits")
    assert result.exit_code == 0
    assert controller.asked_of("deploy")[0].replica_config.app_dir == "/examples-in-the-container/digits"
    assert "does not exist here" in result.stderr


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("c.yaml", "threshold: 0.5\nnames: [a, b]\n", {"threshold": 0.5, "names": ["a", "b"]}),
        ("c.json", '{"threshold": 0.5}', {"threshold": 0.5}),
    ],
)
def test_a_user_config_may_come_from_a_file(
    muster: Muster, controller: Any, tmp_path: Path, name: str, content: str, expected: object
) -> None:
    (tmp_path / name).write_text(content)
    assert muster(*DEPLOY, "--user-config", f"@{name}").exit_code == 0
    assert controller.asked_of("deploy")[0].backend_config.user_config == expected


@pytest.mark.parametrize("content", ["a: 2024-01-01", "a: .nan", "{", "&a [*a]"])
def test_yaml_that_json_cannot_say_is_refused(muster: Muster, tmp_path: Path, content: str) -> None:
    (tmp_path / "c.yaml").write_text(content)
    result = muster(*DEPLOY, "--user-config", "@c.yaml")
    assert result.exit_code == 2
    assert "@c.yaml" in result.stderr


def test_status_shows_deployments_hosts_and_proxies(muster: Muster, controller: Any) -> None:
    unhealthy = msgspec.structs.replace(
        DEPLOYMENT, status=DeploymentStatus.UNHEALTHY, message=f"1 of 2 replicas serve: {TRACEBACK}"
    )
    controller.answers["get_status"] = msgspec.structs.replace(STATUS, deployments=[unhealthy])
    result = muster("status", "--format", "table")
    assert result.exit_code == 0
    row = next(line for line in result.stdout.splitlines() if line.startswith("digits"))
    assert row.split()[:5] == ["digits", "unhealthy", "v1", "/digits", "1/1"]
    assert row.rstrip().endswith("RuntimeError: [no] model file")
    assert "2 CPU, 2.5 GiB memory" in result.stdout
    assert "proxy-1" in result.stdout
    assert "controller-1 leads in term 3" in result.stdout


def test_a_status_too_large_for_one_message_takes_its_deployments_in_pages(
    muster: Muster, controller: Any
) -> None:
    controller.answers["get_status"] = lambda request: (
        LimitReached("the answer has 2000000 bytes and NATS carries 1048576 in one message")
        if request.deployments
        else msgspec.structs.replace(STATUS, deployments=[])
    )
    controller.answers["list_deployments"] = [DEPLOYMENT]
    result = muster("status", "--format", "table")
    assert result.exit_code == 0
    row = next(line for line in result.stdout.splitlines() if line.startswith("digits"))
    assert row.split() == ["digits", "healthy", "v1", "/digits", "1/1"]
    assert "proxy-1" in result.stdout


def test_status_as_json_is_the_whole_view(muster: Muster) -> None:
    result = muster("status", "--json")
    view = msgspec.json.decode(result.stdout, type=StatusView)
    assert view == STATUS


def test_status_of_one_deployment_shows_its_replicas_and_its_whole_message(
    muster: Muster, controller: Any
) -> None:
    failed = msgspec.structs.replace(DEPLOYMENT, message=TRACEBACK)
    controller.answers["get_deployment_info"] = failed
    result = muster("status", "digits")
    assert result.exit_code == 0
    assert "digits#1" in result.stdout
    assert TRACEBACK in result.stdout
    as_json = muster("status", "digits", "--json")
    assert msgspec.json.decode(as_json.stdout, type=DeploymentView) == failed

    controller.answers["get_deployment_info"] = NotFound("name: there is no deployment")
    assert muster("status", "digits").exit_code == 4


def test_deleting_what_is_not_there_is_a_success(muster: Muster, controller: Any) -> None:
    controller.answers["delete_deployment"] = ChangeReply(goal_id=None, updating=False)
    result = muster("delete", "digits")
    assert result.exit_code == 0
    assert "nothing to do: digits does not exist" in result.stdout


def test_a_call_prints_the_answer_as_it_came(muster: Muster, controller: Any, tmp_path: Path) -> None:
    controller.response = AdminReply(b"\x00\xff7", {"Content-Type": "image/x"})
    (tmp_path / "in.png").write_bytes(b"\x89PNG")
    result = muster("call", "shop/digits", "--data", "@in.png", "--header", "Accept: a:b")
    assert result.exit_code == 0
    assert result.stdout_bytes == b"\x00\xff7"
    assert controller.called == [("shop.digits", b"\x89PNG", {"Accept": "a:b"})]

    muster("call", "digits", "--data", "-", given=b"from a pipe")
    muster("call", "digits", "--data", "text")
    assert [body for _name, body, _headers in controller.called[1:]] == [b"from a pipe", b"text"]

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
    for words in (("status",), ("status", "--format", "table")):
        assert "warning: NATS has plain users" in muster(*words).stderr
    (tmp_path / "given.creds").touch()
    assert "plain users" not in muster("status", "--format", "table", "--creds", "given.creds").output


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


def test_the_stack_may_be_named_before_or_after_the_command(muster: Muster, controller: Any) -> None:
    muster("--nats", "nats://early.example", "--user", "me", "status")
    assert controller.reached is not None
    assert (controller.reached.urls, controller.reached.user) == (("nats://early.example:4222",), "me")
    muster("--nats", "nats://early.example", "status", "--nats", "nats://late.example")
    assert controller.reached.urls == ("nats://late.example:4222",)


def test_without_any_stack_the_error_says_how_to_get_one(muster: Muster) -> None:
    result = muster("status", environment={})
    assert result.exit_code == 3
    assert "muster up" in result.stderr


def test_help_and_version_need_no_stack(muster: Muster, controller: Any) -> None:
    helped = muster("--help")
    assert helped.exit_code == 0
    assert muster("--version").stdout.startswith("muster ")
    assert muster("--versoin").exit_code == 2
    assert controller.reached is None


def test_arguments_of_the_constructor_may_be_in_files(
    muster: Muster, controller: Any, tmp_path: Path
) -> None:
    (tmp_path / "args.json").write_text("[1, 2]")
    (tmp_path / "kwargs.yaml").write_text("size: 3")
    (tmp_path / "ray.yaml").write_text("num_gpus: 1")
    line = "deploy a:B --name digits --init-args @args.json --init-kwargs @kwargs.yaml --ray-actor-options @ray.yaml"
    assert muster(*line.split()).exit_code == 0
    (sent,) = controller.asked_of("deploy")
    assert sent.replica_config.init_args == [1, 2]
    assert sent.replica_config.init_kwargs == {"size": 3}
    assert sent.replica_config.ray_actor_options.num_gpus == 1
    refused = muster(*["deploy", "a:B", "--name", "digits", "--init-args", "@kwargs.yaml"])
    assert refused.exit_code == 2
    assert "--init-args: must be an array" in refused.stderr


def test_a_restore_can_be_tried_first(muster: Muster, controller: Any, tmp_path: Path) -> None:
    (tmp_path / "monday.muster").write_bytes(b"packed")
    replica = PlannedReplica(
        action=PlannedAction.STOP,
        backend_tag="default/digits",
        replica_tag="default/digits#1",
        why="it goes away",
    )
    plan = PlanView(updating=True, replicas=[replica], notes=["a note"])
    controller.answers["restore"] = RestoreReply(summary="1 deployments", plan=plan)
    for line in ("restore monday.muster --dry-run", "plan restore monday.muster"):
        result = muster(*line.split())
        assert result.exit_code == 0, result.output
        assert "monday.muster: 1 deployments" in result.stdout
        assert "everything: 1 to stop" in result.stdout
        assert "note: a note" in result.stdout
        assert json.loads(muster(*line.split(), "--json").stdout)["notes"] == ["a note"]
    assert [request.confirm for request in controller.asked_of("restore")] == [False] * 4


def test_a_controller_without_plans_of_restores_says_so(
    muster: Muster, controller: Any, tmp_path: Path
) -> None:
    (tmp_path / "monday.muster").write_bytes(b"packed")
    controller.answers["restore"] = RestoreReply(summary="1 deployments")
    result = muster("restore", "monday.muster", "--dry-run")
    assert result.exit_code == 1
    assert "nothing was changed" in result.stderr
