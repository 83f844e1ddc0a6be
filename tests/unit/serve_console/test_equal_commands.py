"""The command line that a plan shows sends the very command of the console, through the real CLI."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from muster.cli.main import app
from muster.cli.session import Session
from serve_common.api import commands as c
from serve_common.config.autoscaling import AutoscalingConfig
from serve_common.config.backend import (
    BackendConfig,
    EndpointOptions,
    LoggingConfig,
    OnFailure,
    OutlierEjection,
    RayActorOptions,
    ReplicaConfig,
    ReplicaPolicyName,
)
from serve_common.config.rollout import RolloutConfig
from serve_console.core.change_kinds import CHANGES
from serve_console.core.equal_commands import command_line
from tests.unit.muster.cli.conftest import COMMANDS_BUILT, PlayedController

CODE = ReplicaConfig(
    import_path="shop:Front",
    app_dir="/apps/it's here",
    init_args=["-x", 1],
    init_kwargs={"size": 2},
    ray_actor_options=RayActorOptions(
        num_cpus=0.5, memory=2e9, runtime_env={"env_vars": {"MODE": "$(rm -rf /)"}}
    ),
)
CONFIG = BackendConfig(
    num_replicas=3,
    max_queued_requests=-1,
    user_config={"text": "a \"b\" 'c'"},
    autoscaling_config=AutoscalingConfig(min_replicas=1, max_replicas=8),
    logging_config=LoggingConfig(log_level="DEBUG"),
    may_call=("default", "shop/model"),
    on_failure=OnFailure.GO_BACK,
    replica_policy=ReplicaPolicyName.ROUND_ROBIN,
    outlier_ejection=OutlierEjection(consecutive_failures=0),
    rollout=RolloutConfig(steps=("5%", "100%")),
    max_surge_percent=12.5,
)
OPTIONS = EndpointOptions(shard_key_header="", backend_header="X-Backend", relative_slo_ms=250.0)

BY_MUSTER: list[c.Command[Any]] = [
    c.Scale(backend_tag="default/digits", num_replicas=4),
    c.Scale(backend_tag="shop/front", num_replicas=0),
    c.SetTraffic(endpoint="default/digits", weights={"default/digits": 0.9, "default/digits-new": 0.1}),
    c.SetTraffic(endpoint="shop/front", weights={"shop/front": 1.0}),
    c.SetTraffic(endpoint="shop/front", weights={"shop/front": 1.0, "shop/new": 0.0}),
    c.ShadowTraffic(endpoint="default/digits", backend_tag="shop/new", proportion=0.25),
    c.Rollback(name="default/digits"),
    c.Rollback(name="default/digits", to=3),
    c.Rollback(name="default/digits", to="-v 1"),
    *(c.ControlRollout(name="default/digits", action=action) for action in c.RolloutAction),
    c.ControlRollout(name="default/digits", action=c.RolloutAction.ABORT, reason="-; it's wrong"),
    c.StartRollout(name="default/digits", version="v2"),
    c.StartRollout(
        name="shop/front",
        replica_config={
            "import_path": "shop:New",
            "code": "",
            "app_dir": "/apps/new",
            "init_kwargs": {"a": [1]},
            "ray_actor_options": {"num_cpus": 2.0},
        },
        backend_config={"user_config": "text", "num_replicas": 2, "rollout": None},
        rollout_fields={"steps": ["shadow 100% 1m", "5%", "100%"], "max_latency_ratio": 2},
        again=True,
    ),
    c.UpdateBackendConfig(backend_tag="default/digits", config={"max_concurrent_queries": 20}),
    c.UpdateBackendConfig(
        backend_tag="shop/front",
        config={
            "max_queued_requests": -1,
            "user_config": {"a": None},
            "max_replicas_per_host": None,
            "on_failure": "go_back",
            "circuit_breaker": {"window_s": 5},
        },
        skips_rollout=True,
    ),
    c.SetEndpointOptions(endpoint="default/digits", options={"shard_key_header": "", "error_format": "text"}),
    c.SetEndpointOptions(endpoint="default/digits", options={"relative_slo_ms": None}),
    c.SetHttpOptions(options={"request_timeout_s": 30, "access_log": True, "middlewares": ["a:b", "c:d"]}),
    c.SetHttpOptions(options={"access_log": False, "middlewares": [], "root_path": ""}),
    c.CreateEndpoint(endpoint="default/trial", traffic={"default/digits": 1.0}, route="/trial"),
    c.CreateEndpoint(
        endpoint="shop/x", traffic={"shop/a": 0.5, "b/c": 0.5}, methods=["PUT"], options=OPTIONS
    ),
    c.CreateBackend(backend_tag="default/new", replica_config=CODE, backend_config=CONFIG),
    c.Deploy(name="default/digits", replica_config=ReplicaConfig(import_path="nowhere:Digits")),
    c.Deploy(
        name="shop/front",
        replica_config=CODE,
        backend_config=CONFIG,
        route_prefix="/",
        methods=["GET"],
        endpoint_options=OPTIONS,
        version="v 2",
        prev_version="v1",
        skips_rollout=True,
    ),
    c.PauseAutoscaling(backend_tag="default/digits"),
    c.ResumeAutoscaling(backend_tag="shop/front"),
    c.DrainHost(host_id="host-1"),
    c.UndrainHost(host_id="host-1"),
    c.DeleteDeployment(name="shop/front"),
    c.DeleteApplication(name="shop"),
    c.DeleteEndpoint(endpoint="default/trial"),
    c.DeleteBackend(backend_tag="default/new", force_kill=True),
]

BY_NATS: list[c.Command[Any]] = [
    c.Deploy(
        name="default/digits", replica_config=ReplicaConfig(import_path="digits:Digits", working_dir="0" * 64)
    ),
    c.Deploy(name="default/digits", replica_config=ReplicaConfig(import_path="a:b", app_dir="apps")),
    c.ControlRollout(name="default/digits", action=c.RolloutAction.STEP, step=2),
    c.StartRollout(name="default/digits", replica_config={"working_dir": "0" * 64}),
    c.DeployApplication(
        name="shop",
        ingress="front",
        deployments=[c.DeploymentSpec(name="front", replica_config=CODE)],
        request_id="once",
    ),
]


@pytest.mark.parametrize("command", BY_MUSTER, ids=lambda command: command.verb)
def test_the_shown_line_sends_the_same_command(
    command: c.Command[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.testing._get_command", lambda _app: COMMANDS_BUILT)
    controller = PlayedController()
    session = Session(
        connect=controller.connect,
        environment={"MUSTER_NATS_URL": "nats://stack.example"},
        directory=tmp_path,
    )
    program, *arguments = shlex.split(command_line(command))
    assert program == "muster"

    result = CliRunner().invoke(app, [*arguments, "--no-wait"], obj=session, catch_exceptions=False)

    assert result.exit_code == 0, result.output
    [sent] = controller.asked_of(command.verb)
    assert without_id(sent) == without_id(command)


@pytest.mark.parametrize("command", BY_NATS, ids=lambda command: command.verb)
def test_what_the_cli_cannot_say_is_shown_as_a_request_over_nats(command: c.Command[Any]) -> None:
    program, action, subject, body = shlex.split(command_line(command, "acme"))
    assert (program, action, subject) == ("nats", "request", f"acme.admin.{command.verb}")
    assert "once" not in body
    sent = msgspec.convert(json.loads(body), type(command))
    assert without_id(sent) == without_id(command)


def test_every_kind_of_change_has_a_line_that_is_tested() -> None:
    assert {command.verb for command in BY_MUSTER + BY_NATS} == set(CHANGES)


def without_id(command: Any) -> Any:
    """The command as JSON has it, whatever its request's id is."""
    plain = json.loads(msgspec.json.encode(command))
    plain.pop("request_id", None)
    return plain
