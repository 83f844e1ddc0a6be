"""Named stacks, as a person keeps them: `muster context …`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from typer.testing import Result

from muster.cli.output import MASKED
from serve_common.config.backend import RayActorOptions, ReplicaConfig
from tests.unit.muster.cli.conftest import DEPLOYMENT, STATUS, PlayedController

Run = Callable[..., Result]


def test_a_context_is_added_used_shown_and_removed(
    muster: Run, controller: PlayedController, tmp_path: Path
) -> None:
    variables = {"HOME": str(tmp_path)}

    def run(*words: str) -> str:
        result = muster(*words, environment=variables)
        assert result.exit_code == 0, result.output
        return result.stdout

    (tmp_path / "prod.creds").touch()
    run(
        "context",
        "add",
        "prod",
        "--nats",
        "nats://prod.example",
        "--creds",
        "prod.creds",
        "--http",
        "https://m.example/",
    )
    run("context", "add", "test", "--nats", "tls://me@test.example:4333")
    assert "*" not in run("context", "list")
    run("context", "use", "prod")
    listed = run("context", "list").splitlines()
    assert [line.split()[:3] for line in listed[3:5]] == [
        ["*", "prod", "nats://prod.example:4222"],
        ["test", "tls://test.example:4333", "me"],
    ]
    shown = json.loads(run("context", "show", "--json"))
    assert shown == {
        "nats": "nats://prod.example:4222",
        "creds": str(tmp_path / "prod.creds"),
        "http": "https://m.example",
    }
    deployed = run("deploy", "digits:Digits", "--name", "digits", "--route-prefix", "/digits")
    assert "curl https://m.example/digits" in deployed
    assert controller.reached is not None
    assert controller.reached.credentials_file == str(tmp_path / "prod.creds")
    run("status", "--context", "test")
    assert controller.reached.user == "me"
    run("--context", "test", "status")
    assert controller.reached.user == "me"
    assert "none is in use" in run("context", "remove", "prod")
    assert muster("status", environment=variables).exit_code == 3
    assert json.loads(run("context", "list", "--json"))["contexts"].keys() == {"test"}


def test_what_is_no_context_is_refused_and_changes_nothing(muster: Run, tmp_path: Path) -> None:
    variables = {"HOME": str(tmp_path)}
    for words, said in {
        ("add", "prod"): "--nats: is required",
        ("add", "prod", "--nats", "nats://me:secret@far.example"): "--password-file",
        ("add", "prod", "--nats", "http://far.example"): "--nats: must begin",
        ("add", "prod", "--nats", "nats://x", "--creds", "absent"): "--creds: absent cannot be read",
        ("add", "local", "--nats", "nats://x"): "working directory",
        ("add", "a b", "--nats", "nats://x"): "NAME",
        ("add", "prod", "--nats", "nats://x", "--http", "far.example"): "--http",
        ("use", "prod"): "there is no context 'prod'; there are: none",
        ("remove", "prod"): "there is no context",
        ("show",): "no context is in use",
    }.items():
        result = muster("context", *words, environment=variables)
        assert result.exit_code == 2, words
        assert said in result.stderr, result.stderr
        assert "secret" not in result.stderr
    assert not (tmp_path / ".config").exists()
    assert "HOME: is not set" in muster("context", "add", "x", "--nats", "nats://x", environment={}).stderr


def test_variables_that_look_secret_are_shown_on_request_only(
    muster: Run, controller: PlayedController
) -> None:
    env_vars = {
        "API_TOKEN": "hunter2", "db_password": "hunter2", "BROKER": "amqp://me:hunter2@far.example", "MODE": "fast",
    }  # fmt: skip
    code = ReplicaConfig(
        import_path="digits:Digits", ray_actor_options=RayActorOptions(runtime_env={"env_vars": env_vars})
    )
    deployment: Any = msgspec.structs.replace(DEPLOYMENT, replica_config=code)
    controller.answers |= {
        "get_deployment_info": deployment,
        "get_status": msgspec.structs.replace(STATUS, deployments=[deployment]),
        "list_deployments": [deployment],
    }
    for words in (
        "status digits",
        "status digits --json",
        "info digits",
        "info digits --json",
        "status --json",
        "list --json",
    ):
        shown = muster(*words.split()).stdout
        assert "hunter2" not in shown, words
        assert shown.count(MASKED) == 3, words
        assert "fast" in shown
    for words in ("status digits", "info digits --json"):
        assert muster(*words.split(), "--show-env").stdout.count("hunter2") == 3
