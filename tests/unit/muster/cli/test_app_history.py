"""`muster app history` and `muster app rollback`: a whole application goes back to what it was."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest
from typer.testing import Result

from serve_common.api.commands import DeployApplication, DeploymentSpec
from serve_common.api.views import GoalStatus, GoalView, HistoryView
from serve_common.config.backend import BackendConfig, ReplicaConfig
from serve_common.errors import NotFound
from serve_common.names import GoalId
from tests.unit.muster.cli.conftest import DEPLOYMENT, PlayedController

Run = Callable[..., Result]


def request(version: str, *names: str) -> DeployApplication:
    specs = [
        DeploymentSpec(name=name, version=version, replica_config=ReplicaConfig(import_path=f"shop:{name}"))
        for name in names
    ]
    return DeployApplication(name="shop", ingress=names[0], deployments=specs, request_id=f"of-{version}")


def entry(number: int, command: DeployApplication | None, *, verb: str = "deploy_application") -> HistoryView:
    return HistoryView(
        id=number, at=1_700_000_000.0, principal="me@here", epoch=1, verb=verb, subject="shop",
        goal_id=GoalId(f"g{number}"), request=None if command is None else msgspec.to_builtins(command),
    )  # fmt: skip


@pytest.fixture
def shop(controller: PlayedController) -> PlayedController:
    """Four deploys: two that succeeded, the latter twice, and one that failed; then a scale of one deployment."""
    statuses = {"g7": GoalStatus.FAILED, "g6": GoalStatus.SUCCEEDED, "g5": GoalStatus.SUCCEEDED}

    def wait(query: object) -> GoalView | NotFound:
        goal_id = query.goal_id  # type: ignore[attr-defined]
        if goal_id == "goal-1":
            return controller.goal
        return (
            GoalView(goal_id=goal_id, status=statuses[goal_id]) if goal_id in statuses else NotFound("gone")
        )

    controller.answers |= {
        "get_history": [
            entry(8, None, verb="scale"),
            entry(7, request("v3", "front", "model")),
            entry(6, request("v2", "front", "added")),
            entry(5, request("v2", "front", "added")),
            entry(4, request("v1", "front", "model")),
            entry(3, None),
        ],
        "wait_for_goal": wait,
        "list_deployments": [
            msgspec.structs.replace(
                DEPLOYMENT,
                name="shop/front",
                application="shop",
                backend_config=BackendConfig(num_replicas=5),
            )
        ],
    }
    return controller


def test_an_application_goes_back_to_what_served_before(muster: Run, shop: PlayedController) -> None:
    result = muster("app", "rollback", "shop")
    assert result.exit_code == 0, result.output
    assert "application shop is rolled back to change 4" in result.stdout
    (sent,) = shop.asked_of("deploy_application")
    assert [(each.name, each.version, each.backend_config.num_replicas) for each in sent.deployments] == [
        ("front", "v1", 5),
        ("model", "v1", 1),
    ], "numbers of replicas stay as they are"
    assert sent.request_id not in {None, "of-v1"}, "it is a change of its own"


def test_its_history_names_each_deploy_and_the_current_one(muster: Run, shop: PlayedController) -> None:
    lines = [line.split() for line in muster("app", "history", "shop").stdout.splitlines()[3:7]]
    assert [line[0] for line in lines] == ["7", "6", "5", "4"]
    assert lines[1][1] == "(now)"
    assert lines[0][-4:] == ["front", "v3,", "model", "v3"]
    assert "failed" in lines[0]
    states = json.loads(muster("app", "history", "shop", "--json").stdout)
    assert [state["is_current"] for state in states] == [False, True, False, False]


def test_a_deploy_may_be_named_and_planned(muster: Run, shop: PlayedController) -> None:
    assert "is as of change 7 already" in muster("app", "rollback", "shop", "--to", "7", "--dry-run").stdout
    assert "is as of change 4 already" in muster("plan", "app", "rollback", "shop").stdout
    assert shop.asked_of("deploy_application") == []
    planned = [msgspec.json.decode(query.request, type=DeployApplication) for query in shop.asked_of("plan")]
    assert [each.deployments[0].version for each in planned] == ["v3", "v1"]
    unknown = muster("app", "rollback", "shop", "--to", "8")
    assert unknown.exit_code == 2
    assert "--to: 8 is no deploy of shop; there are: 7, 6, 5, 4" in unknown.stderr


def test_what_has_no_former_state_is_told(muster: Run, shop: PlayedController) -> None:
    shop.answers["get_history"] = [entry(5, request("v2", "front"))]
    result = muster("app", "rollback", "shop")
    assert result.exit_code == 4
    assert "no earlier state" in result.stderr
    shop.answers["get_history"] = []
    assert muster("app", "rollback", "shop").exit_code == 4


def test_a_rollback_that_fails_is_told_as_a_deploy_is(muster: Run, shop: PlayedController) -> None:
    shop.goal = GoalView(goal_id=GoalId("goal-1"), status=GoalStatus.FAILED, error="ImportError: shop")
    result = muster("app", "rollback", "shop")
    assert result.exit_code == 1
    assert "ImportError: shop" in result.stderr
