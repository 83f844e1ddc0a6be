"""`muster diff`: what a file would change, and by which exit code a script sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from typer.testing import Result

from muster.cli.output import MASKED
from serve_common.api.views import (
    ApplicationView,
    DeploymentStatus,
    DeploymentView,
    GoalStatus,
    PlannedAction,
    PlannedReplica,
    PlanView,
)
from serve_common.config.backend import BackendConfig, RayActorOptions, ReplicaConfig
from serve_common.errors import BadField, ServeError
from tests.unit.muster.cli.conftest import DEPLOYMENT, GOAL, PlayedController

Run = Callable[..., Result]

FILE = """
name: shop
route_prefix: /shop
ingress: front
deployments:
  - name: front
    version: v2
    replica_config:
      import_path: "shop:Front"
      ray_actor_options: {runtime_env: {env_vars: {API_KEY: new, MODE: fast}}}
    backend_config: {num_replicas: 3}
  - name: added
    replica_config: {import_path: "shop:Added"}
"""
OPTIONS = RayActorOptions(runtime_env={"env_vars": {"API_KEY": "old", "MODE": "fast"}})


def deployed(name: str, config: ReplicaConfig, *, is_ingress: bool) -> DeploymentView:
    return msgspec.structs.replace(
        DEPLOYMENT,
        name=f"shop/{name}",
        application="shop",
        is_ingress=is_ingress,
        methods=["DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"],
        version="v1",
        replica_config=config,
        backend_config=BackendConfig(num_replicas=1),
    )


@pytest.fixture
def shop(controller: PlayedController, tmp_path: Path) -> PlayedController:
    (tmp_path / "shop.yaml").write_text(FILE)
    front = deployed(
        "front", ReplicaConfig(import_path="shop:Front", ray_actor_options=OPTIONS), is_ingress=True
    )
    removed = deployed("removed", ReplicaConfig(import_path="shop:Removed"), is_ingress=False)
    controller.answers |= {
        "list_deployments": [DEPLOYMENT, front, removed],
        "get_all_applications": [
            ApplicationView(
                name="shop",
                status=DeploymentStatus.HEALTHY,
                message="",
                route_prefix="/former",
                ingress="shop/front",
                deployments=["shop/front", "shop/removed"],
                goal_id=GOAL,
                goal_status=GoalStatus.SUCCEEDED,
            )
        ],
        "plan": PlanView(
            updating=True,
            replicas=[
                PlannedReplica(
                    action=PlannedAction.START, backend_tag="shop/front", replica_tag=None, why="v1 → v2"
                )
            ],
            notes=[],
        ),
    }
    return controller


def test_a_file_that_changes_something_is_told_field_by_field(muster: Run, shop: PlayedController) -> None:
    result = muster("diff", "shop.yaml")
    assert result.exit_code == 1, result.output
    lines = result.stdout.splitlines()
    assert lines[: lines.index("application shop: 1 to start")] == [
        "+ added.replica_config.import_path: shop:Added",
        "~ front.backend_config.num_replicas: 1 -> 3",
        f"~ front.replica_config.ray_actor_options.runtime_env.env_vars.API_KEY: {MASKED} -> {MASKED}",
        "~ front.version: v1 -> v2",
        "- removed.replica_config.import_path: shop:Removed",
        "- removed.version: v1",
        "~ route_prefix: /former -> /shop",
    ]
    assert shop.asked_of("deploy_application") == [], "nothing is changed"
    [document] = json.loads(muster("diff", "shop.yaml", "--json").stdout)
    assert document["what"] == "application shop"
    assert document["plan"]["updating"] is True
    assert {"field": "front.version", "before": "v1", "after": "v2"} in document["changes"]


def test_a_file_that_changes_nothing_ends_with_0(muster: Run, shop: PlayedController) -> None:
    shop.answers["plan"] = PlanView(updating=False, replicas=[], notes=[])
    result = muster("diff", "shop.yaml")
    assert result.exit_code == 0
    assert "nothing to do: application shop is already as in the file" in result.stdout


@pytest.mark.parametrize(
    ("file", "error", "code"),
    [
        ("absent.yaml", None, 2),
        ("shop.yaml", BadField("deployments", "are bad"), 2),
        ("shop.yaml", ServeError("boom"), 2),
    ],
)
def test_errors_are_never_taken_for_a_difference(
    muster: Run, shop: PlayedController, file: str, error: ServeError | None, code: int
) -> None:
    if error is not None:
        shop.answers["plan"] = error
    result = muster("diff", file)
    assert result.exit_code == code
    assert result.stderr.startswith("error: ")
