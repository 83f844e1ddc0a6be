"""The page Now: what its rows say, and in which order."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from muster.client.rates import LoadRates
from serve_common.api.rollout_views import RolloutView
from serve_common.api.views import (
    ApplicationView,
    DeploymentStatus,
    DeploymentView,
    EndpointView,
    GoalStatus,
    ReplicaView,
    StatusView,
)
from serve_common.config.backend import BackendConfig, ReplicaConfig
from serve_common.names import GoalId
from serve_console.core.now_page import (
    build_groups,
    build_row,
    compute_totals,
    describe_trouble,
    find_troubled,
)
from serve_console.core.system import NOTHING_READ, System

TRACEBACK = (
    'Traceback (most recent call last):\n  File "m.py", line 3, in __init__\nValueError: no model there\n'
)


def deployment(
    name: str, *, replicas: list[tuple[str, str | None]] | None = None, **more: Any
) -> DeploymentView:
    """A deployment with replicas of (state, version)."""
    fields: dict[str, Any] = {
        "status": DeploymentStatus.HEALTHY, "message": "", "route_prefix": f"/{name}", "methods": ["GET"],
        "version": "v2", "code_version": 1, "backend_config": BackendConfig(num_replicas=2),
        "replica_config": ReplicaConfig(import_path="m:M"), "goal_id": GoalId("g1"),
        "goal_status": GoalStatus.SUCCEEDED,
    }  # fmt: skip
    views = [
        ReplicaView(replica_tag=f"{name}#{number}", state=state, host_id="h", version=version)
        for number, (state, version) in enumerate(replicas or [("running", "v2"), ("running", "v2")], 1)
    ]
    return DeploymentView(name=name, replicas=views, **{**fields, **more})


def system(*views: DeploymentView, **more: Any) -> System:
    status = StatusView(
        controller_id="c",
        epoch=1,
        store_available=True,
        snapshot_id=1,
        deployments=list(views),
        hosts=[],
        proxies=[],
    )
    return msgspec.structs.replace(NOTHING_READ, status=status, **more)


def rates(name: str, requests: float, errors: float = 0.0) -> LoadRates:
    return LoadRates(name=name, requests_per_s=requests, errors_per_s=errors, p99_s=0.2, queued=1.0)


def test_a_row_shows_the_old_versions_that_still_run_and_how_many_replicas_serve() -> None:
    view = deployment("default/a", replicas=[("running", "v1"), ("starting", "v2"), ("running", None)])
    row = build_row(system(view), view)
    assert (row.version, row.old_versions) == ("v2", ["unversioned", "v1"])
    assert (row.running, row.wanted, row.title) == (2, 2, "a")


def test_a_split_is_shown_only_where_requests_go_elsewhere_too() -> None:
    view = deployment("default/a")
    alone = EndpointView(endpoint_tag="default/a", route="/a", methods=["GET"], traffic={"default/a": 1.0})
    both = msgspec.structs.replace(alone, traffic={"default/a": 0.1, "default/b": 0.9})
    assert build_row(system(view, endpoints={"default/a": alone}), view).split == []
    row = build_row(system(view, endpoints={"default/a": both}), view)
    assert row.split == [("default/b", 0.9), ("default/a", 0.1)]


@pytest.mark.parametrize(
    ("view", "words"),
    [
        (deployment("a"), ""),
        (deployment("a", message="waits for a host\nwith 4 CPUs"), "waits for a host"),
        (deployment("a", status=DeploymentStatus.UNHEALTHY, message=TRACEBACK), "ValueError: no model there"),
        (deployment("a", status=DeploymentStatus.UNHEALTHY, message="x" * 500), "x" * 199 + "…"),
    ],
)
def test_what_is_wrong_is_one_line_and_of_a_traceback_the_last(view: DeploymentView, words: str) -> None:
    assert describe_trouble(view) == words


def test_unhealthy_deployments_need_attention_before_those_whose_requests_fail() -> None:
    views = (
        deployment("a"),
        deployment("b"),
        deployment("c", status=DeploymentStatus.UNHEALTHY, message="bad"),
    )
    load = {"a": rates("a", 100.0, 0.9), "b": rates("b", 100.0, 2.0), "c": rates("c", 0.0)}
    groups = build_groups(system(*views, rates=load))
    assert [row.name for row in find_troubled(groups)] == ["c", "b"]


def test_applications_that_could_not_be_built_are_there_without_deployments() -> None:
    application = ApplicationView(
        name="shop", status=DeploymentStatus.HEALTHY, message="", route_prefix="/shop", ingress="shop/i",
        deployments=[], goal_id=GoalId("g1"), goal_status=GoalStatus.FAILED, build_error=TRACEBACK,
    )  # fmt: skip
    loose, member = deployment("default/a"), deployment("shop/i", application="shop", is_ingress=True)
    groups = build_groups(system(loose, applications={"shop": application}))
    assert [(group.name, group.status, group.message) for group in groups] == [
        ("", "", ""),
        ("shop", "unhealthy", "ValueError: no model there"),
    ]
    groups = build_groups(system(loose, member, applications={"shop": application}))
    assert [row.name for row in groups[1].rows] == ["shop/i"]


def test_totals_add_up_what_is_known() -> None:
    views = (deployment("a"), deployment("b", replicas=[("starting", "v2")]))
    totals = compute_totals(system(*views, rates={"a": rates("a", 30.0, 3.0), "b": LoadRates(name="b")}))
    assert (totals.running, totals.wanted, totals.requests_per_s) == (2, 4, 30.0)
    assert totals.error_share == pytest.approx(0.1)
    assert (totals.p99_s, totals.queued) == (0.2, 1.0)


def test_nothing_that_was_read_is_shown_as_unknown() -> None:
    assert compute_totals(NOTHING_READ).requests_per_s is None
    assert build_groups(NOTHING_READ) == []


def test_a_rollout_in_force_splits_what_its_deployment_gets() -> None:
    view = deployment("default/a")
    endpoint = EndpointView(
        endpoint_tag="default/a", route="/a", methods=["GET"], traffic={"default/a": 0.5, "default/b": 0.5}
    )
    rollout = RolloutView(
        backend_tag="default/a", goal_id=GoalId("g2"), version="v3", state="running", outcome="", reason="",
        steps=["10%", "100%"], step=0, is_in_force=True, in_force_at=1.0, gates=[], passed=[],
        replica_failures={}, started_at=0.0, decided_at=None, ended_at=None,
    )  # fmt: skip
    found = system(view, endpoints={"default/a": endpoint}, rollouts={"default/a": rollout})
    assert build_row(found, view).split == [
        ("default/b", 0.5), ("old version", 0.4), ("baseline", 0.05), ("new version", 0.05),
    ]  # fmt: skip
    decided = msgspec.structs.replace(rollout, outcome="aborted", state="closing")
    found = system(view, endpoints={"default/a": endpoint}, rollouts={"default/a": decided})
    assert build_row(found, view).split == [("default/a", 0.5), ("default/b", 0.5)]
