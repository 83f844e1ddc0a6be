"""`muster apply`: what a file of backends, endpoints and HTTP options becomes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from serve_common.api.commands import (
    ChangeReply,
    CreateBackend,
    CreateEndpoint,
    SetEndpointOptions,
    SetHttpOptions,
    SetTraffic,
    ShadowTraffic,
)
from serve_common.api.views import BackendView, EndpointView, GoalStatus, GoalView
from serve_common.config.backend import BackendConfig, EndpointOptions, ReplicaConfig
from serve_common.errors import BadField
from serve_common.names import GoalId

Muster = Callable[..., Result]
FILE = """
backends:
  - name: new
    replica_config: {import_path: "hello:Hello", app_dir: code}
    backend_config: {num_replicas: 2}
endpoints:
  - name: hi
    route_prefix: /hi
    methods: [GET]
    traffic: {old: 0.9, new: 0.1}
    shadows: {new: 0.5}
    options: {shard_key_header: X-User}
http_options: {request_timeout_s: 30}
"""
OLD = BackendView(
    backend_tag="default/old",
    backend_config=BackendConfig(num_replicas=1),
    replica_config=ReplicaConfig(import_path="hello:Hello"),
    replicas=[],
)
CHANGES = {
    *("create_backend", "create_endpoint", "set_traffic", "set_endpoint_options", "shadow_traffic"),
    "set_http_options",
}


@pytest.fixture
def file(tmp_path: Path, controller: Any) -> Path:
    (tmp_path / "code").mkdir()
    controller.answers |= {"get_all_endpoints": [], "get_all_backends": [OLD]}
    place = tmp_path / "traffic.yaml"
    place.write_text(FILE)
    return place


def sent(controller: Any) -> list[Any]:
    return [request for verb, request in controller.asked if verb in CHANGES]


def test_a_file_becomes_one_change_for_each_entry(
    muster: Muster, controller: Any, file: Path, tmp_path: Path
) -> None:
    result = muster("apply", "traffic.yaml")
    assert result.exit_code == 0, result.output
    assert sent(controller) == [
        CreateBackend(
            backend_tag="default/new",
            replica_config=ReplicaConfig(import_path="hello:Hello", app_dir=str(tmp_path / "code")),
            backend_config=BackendConfig(num_replicas=2),
        ),
        CreateEndpoint(
            endpoint="default/hi",
            traffic={"default/old": 0.9, "default/new": 0.1},
            route="/hi",
            methods=["GET"],
            options=EndpointOptions(shard_key_header="X-User"),
        ),
        ShadowTraffic(endpoint="default/hi", backend_tag="default/new", proportion=0.5),
        SetHttpOptions(options={"request_timeout_s": 30}),
    ]
    assert "endpoint hi is created" in result.stdout


def test_an_endpoint_that_is_there_gets_what_differs(muster: Muster, controller: Any, file: Path) -> None:
    controller.answers["get_all_endpoints"] = [
        EndpointView(
            endpoint_tag="default/hi",
            route="/hi",
            methods=["GET"],
            traffic={"default/old": 1.0},
            shadows={"default/old": 0.2, "default/new": 0.5},
        )
    ]
    assert muster("apply", "traffic.yaml").exit_code == 0
    assert sent(controller)[1:-1] == [
        SetTraffic(endpoint="default/hi", weights={"default/old": 0.9, "default/new": 0.1}),
        SetEndpointOptions(
            endpoint="default/hi",
            options={
                "shard_key_header": "X-User",
                "backend_header": "",
                "relative_slo_ms": None,
                "error_format": "problem",
            },
        ),
        ShadowTraffic(endpoint="default/hi", backend_tag="default/old", proportion=0.0),
    ]


def test_the_first_change_that_fails_ends_the_command(muster: Muster, controller: Any, file: Path) -> None:
    controller.answers["create_backend"] = ChangeReply(goal_id=GoalId("goal-1"), updating=True)
    controller.goal = GoalView(goal_id=GoalId("goal-1"), status=GoalStatus.FAILED, error="no model file")
    result = muster("apply", "traffic.yaml")
    assert result.exit_code == 1
    assert "no model file" in result.stderr
    assert [type(each) for each in sent(controller)] == [CreateBackend]


def test_a_refusal_comes_before_the_first_change(muster: Muster, controller: Any, file: Path) -> None:
    controller.answers["plan"] = BadField("route", "is taken by other")
    result = muster("apply", "traffic.yaml")
    assert result.exit_code == 2
    assert "is taken by other" in result.stderr
    assert sent(controller) == []


def test_a_dry_run_changes_nothing(muster: Muster, controller: Any, file: Path) -> None:
    result = muster("apply", "traffic.yaml", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "happens once new is there" in result.stdout
    assert "backend new is already as given" in result.stdout
    assert sent(controller) == []


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("backends:", "backend:", "traffic.yaml:2: backend: is unknown; did you mean 'backends'?"),
        (
            "traffic: {old",
            "trafic: {old",
            "traffic.yaml:10: endpoints[0].trafic: is unknown; did you mean 'traffic'?",
        ),
        ("old: 0.9", "older: 0.9", "traffic.yaml:10: endpoints[0].traffic.older: there is no such backend"),
        ("new: 0.5", "new: 1.5", "traffic.yaml:11: endpoints[0].shadows.new: "),
        ("/hi", "hi", "traffic.yaml:8: endpoints[0].route_prefix: 'hi' must begin with '/'"),
        (
            "num_replicas: 2",
            "num_replicas: -2",
            "traffic.yaml:5: backends[0].backend_config.num_replicas: is -2",
        ),
        (
            "request_timeout_s: 30",
            "request_timeout_s: 0",
            "traffic.yaml:13: http_options.request_timeout_s: is 0",
        ),
        ("request_timeout_s: 30", "timeout_s: 30", "traffic.yaml:13: http_options.timeout_s: is unknown"),
        (FILE, "[]", "traffic.yaml:1: must have at least one of"),
        (
            "app_dir: code",
            "app_dir: cod",
            "traffic.yaml:4: backends[0].replica_config.app_dir: there is no directory",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_its_line(
    muster: Muster, controller: Any, file: Path, old: str, new: str, told: str
) -> None:
    assert old in FILE
    file.write_text(FILE.replace(old, new))
    result = muster("apply", "traffic.yaml")
    assert result.exit_code == 2, result.output
    assert f"error: {told}" in result.stderr
    assert sent(controller) == []


def test_a_route_that_is_there_cannot_be_changed(muster: Muster, controller: Any, file: Path) -> None:
    controller.answers["get_all_endpoints"] = [
        EndpointView(endpoint_tag="default/hi", route="/other", methods=["GET"], traffic={"default/old": 1.0})
    ]
    result = muster("apply", "traffic.yaml")
    assert result.exit_code == 2
    assert (
        "traffic.yaml:8: endpoints[0].route_prefix: hi has /other, and a route cannot be changed"
        in result.stderr
    )
