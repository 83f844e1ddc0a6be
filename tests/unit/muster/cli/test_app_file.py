"""`muster app deploy`: what a file may say, and how it is told what is wrong in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import Result

from serve_common.api.commands import DeployApplication, DeploymentSpec
from serve_common.api.views import PlanView
from serve_common.config.backend import (
    BackendConfig,
    CircuitBreaker,
    EndpointOptions,
    OnFailure,
    ReplicaConfig,
)
from serve_common.config.rollout import RolloutConfig
from serve_common.errors import Conflict

Muster = Callable[..., Result]
SHOP = """
name: shop
route_prefix: /shop
methods: [POST]
ingress: front
deployments:
  - name: front
    replica_config: {import_path: "shop:Front", app_dir: code}
  - name: model
    version: v1
    replica_config: {import_path: "shop:Model", app_dir: /apps/elsewhere}
    backend_config:
      {num_replicas: 2, on_failure: go_back, user_config: {threshold: 0.5}, circuit_breaker: {window_s: 20}}
    endpoint_options: {shard_key_header: X-User, relative_slo_ms: 250}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """In another directory than the one where `muster` is run."""
    (tmp_path / "shop/code").mkdir(parents=True)
    place = tmp_path / "shop/shop.yaml"
    place.write_text(SHOP)
    return place


def wanted(tmp_path: Path) -> DeployApplication:
    front = ReplicaConfig(import_path="shop:Front", app_dir=str(tmp_path / "shop/code"))
    model = ReplicaConfig(import_path="shop:Model", app_dir="/apps/elsewhere")
    config = BackendConfig(
        num_replicas=2,
        on_failure=OnFailure.GO_BACK,
        user_config={"threshold": 0.5},
        circuit_breaker=CircuitBreaker(window_s=20.0),
    )
    options = EndpointOptions(shard_key_header="X-User", relative_slo_ms=250.0)
    return DeployApplication(
        name="shop",
        route_prefix="/shop",
        methods=["POST"],
        ingress="front",
        deployments=[
            DeploymentSpec(name="front", replica_config=front),
            DeploymentSpec(
                name="model",
                replica_config=model,
                backend_config=config,
                version="v1",
                endpoint_options=options,
            ),
        ],
    )


def sent(controller: Any) -> DeployApplication:
    [request] = controller.asked_of("deploy_application")
    assert request.request_id
    plain: DeployApplication = msgspec.structs.replace(request, request_id=None)
    return plain


def test_a_file_becomes_one_change(muster: Muster, controller: Any, file: Path, tmp_path: Path) -> None:
    result = muster("app", "deploy", "-f", "shop/shop.yaml")
    assert result.exit_code == 0, result.output
    assert sent(controller) == wanted(tmp_path)
    assert result.stdout.startswith("application shop is deployed")
    assert "  curl -X POST http://stack.example:8000/shop" in result.stdout
    assert "/apps/elsewhere does not exist here" in result.stderr


def test_rollouts_of_a_file_are_part_of_it_and_can_be_skipped(
    muster: Muster, controller: Any, file: Path, tmp_path: Path
) -> None:
    file.write_text(SHOP.replace("window_s: 20}", "window_s: 20}, rollout: {steps: [5% 1m, 100%]}"))
    assert muster("app", "deploy", "-f", "shop/shop.yaml", "--no-rollout").exit_code == 0
    request = sent(controller)
    assert request.skips_rollout
    assert request.deployments[1].backend_config.rollout == RolloutConfig(steps=("5% 1m", "100%"))


def test_what_is_read_from_a_pipe_is_relative_to_here(
    muster: Muster, controller: Any, file: Path, tmp_path: Path
) -> None:
    as_json = json.dumps(msgspec.to_builtins(wanted(tmp_path)) | {"request_id": None})
    text = json.loads(as_json)
    del text["request_id"]
    text["deployments"][0]["replica_config"]["app_dir"] = "shop/code"
    assert muster("app", "deploy", "-f", "-", given=json.dumps(text)).exit_code == 0
    assert sent(controller) == wanted(tmp_path)


def test_a_file_can_be_planned(muster: Muster, controller: Any, file: Path, tmp_path: Path) -> None:
    controller.answers["plan"] = PlanView(updating=True, replicas=[], notes=["the route /shop is new"])
    result = muster("plan", "app", "deploy", "--file", "shop/shop.yaml")
    assert result.exit_code == 0
    assert "note: the route /shop is new" in result.stdout
    [(_verb, plan)] = controller.asked
    assert msgspec.json.decode(plan.request, type=DeployApplication) == wanted(tmp_path)


def test_a_refusal_is_told(muster: Muster, controller: Any, file: Path) -> None:
    controller.answers["deploy_application"] = Conflict("route_prefix: '/shop' belongs to other")
    result = muster("app", "deploy", "-f", "shop/shop.yaml", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["code"] == "conflict"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (SHOP, "", "must have the fields"),
        (SHOP, "[", "is not YAML"),
        ("name: shop", "title: shop", "title: is unknown"),
        ("name: shop", "name: shop\nname: pub", "name: is there twice"),
        ("route_prefix", "route_prefx", "route_prefx: is unknown; did you mean 'route_prefix'?"),
        ("name: shop\n", "", "name: is missing"),
        ("name: shop", "name: sh/op", "name: 'sh/op'"),
        ("name: shop", "name: shop\nrequest_id: x", "request_id: belongs to one run"),
        ("name: shop", "name: shop\nskips_rollout: true", "skips_rollout: belongs to one run"),
        (
            "window_s: 20}",
            "window_s: 20}, rollout: {step: []}",
            "rollout.step: is unknown; did you mean 'steps'?",
        ),
        ("window_s: 20}", "window_s: 20}, rollout: {steps: [5%]}", "rollout.steps: must end with 100%"),
        ("route_prefix: /shop", "route_prefix: shop", "route_prefix: 'shop' must begin with '/'"),
        ("ingress: front", "ingress: back", "ingress: 'back' is none of the deployments; there are: front"),
        ("- name: model", "- name: front", "deployments[1].name: front is there twice"),
        ("- name: model", "- name: mo/del", "deployments[1].name: 'mo/del'"),
        (
            "version: v1",
            "version: 1",
            "deployments[1].version: must be text, not int; put it in quotes",
        ),
        (
            "num_replicas: 2",
            "num_replicas: two",
            "deployments[1].backend_config.num_replicas: must be a whole number",
        ),
        ("num_replicas: 2", "num_replicas: -2", "deployments[1].backend_config.num_replicas: is -2"),
        ("num_replicas: 2", "num_cats: 2", "deployments[1].backend_config.num_cats: is unknown"),
        (
            "num_replicas: 2",
            "num_replica: 2",
            "deployments[1].backend_config.num_replica: is unknown; did you mean 'num_replicas'?",
        ),
        ("X-User", "X User", "deployments[1].endpoint_options.shard_key_header: 'X User' cannot be"),
        ("relative_slo_ms", "slo_ms", "deployments[1].endpoint_options.slo_ms: is unknown"),
        ("window_s: 20", "window: 20", "circuit_breaker.window: is unknown; did you mean 'window_s'?"),
        ("go_back", "explode", "deployments[1].backend_config.on_failure: Invalid enum value 'explode'"),
        ("0.5", "2024-01-01", "has a value that JSON cannot say"),
        ("shop:Front", "shop", "deployments[0].replica_config.import_path: 'shop' must read"),
        ("app_dir: code", "app_dir: cod", "deployments[0].replica_config.app_dir: there is no directory cod"),
        (
            "app_dir: code",
            "app_dir: shop.yaml",
            "deployments[0].replica_config.app_dir: shop.yaml is not a directory",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_its_path(
    muster: Muster, controller: Any, file: Path, old: str, new: str, told: str
) -> None:
    assert old in SHOP
    file.write_text(SHOP.replace(old, new))
    result = muster("app", "deploy", "-f", "shop/shop.yaml")
    assert result.exit_code == 2, result.output
    [error] = [line for line in result.stderr.splitlines() if line.startswith("error: shop/shop.yaml:")]
    assert f" {told}" in error or f".{told}" in error
    assert controller.asked == []


def test_all_misspelt_fields_are_told_with_their_lines(muster: Muster, controller: Any, file: Path) -> None:
    file.write_text(SHOP.replace("methods", "method").replace("window_s", "window"))
    result = muster("app", "deploy", "-f", "shop/shop.yaml")
    assert result.exit_code == 2
    first, second = result.stderr.splitlines()
    assert first == "error: shop/shop.yaml:4: method: is unknown; did you mean 'methods'?"
    assert second.startswith(
        "  shop/shop.yaml:13: deployments[1].backend_config.circuit_breaker.window: is unknown;"
    )


@pytest.mark.parametrize("arguments", [(), ("-f", "absent.yaml"), ("-f", ".")])
def test_a_file_that_cannot_be_read_is_refused(
    muster: Muster, controller: Any, arguments: tuple[str, ...]
) -> None:
    result = muster("app", "deploy", *arguments)
    assert result.exit_code == 2
    assert "--file" in result.stderr
    assert controller.asked == []
