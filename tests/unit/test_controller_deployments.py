"""What is told of deployments, also of those that are gone, and what else may be changed of one."""

from __future__ import annotations

import pytest

from serve_common.api.commands import DeleteDeployment, SetTraffic, ShadowTraffic, UpdateBackendConfig
from serve_common.api.views import DeploymentStatus
from serve_common.errors import NotFound
from serve_controller.core import reconcile as tidy
from serve_controller.core.views import view_deployment, view_deployments, view_snapshot
from tests.simulation.closed_loop import Loop
from tests.simulation.orders import create_backend, deploy


def test_an_unknown_deployment_is_not_found_and_so_is_one_that_is_gone() -> None:
    loop = Loop()
    with pytest.raises(NotFound, match="there is no deployment 'default/a'"):
        view_deployment(loop.checkpoint, "a")
    loop.done(deploy())
    assert view_deployment(loop.checkpoint, "a").status is DeploymentStatus.HEALTHY
    loop.done(DeleteDeployment(name="a"))
    with pytest.raises(NotFound):
        view_deployment(loop.checkpoint, "a")


def test_deleted_deployments_are_listed_on_request() -> None:
    loop = Loop()
    loop.done(deploy("a", version="v7", route="/a"))
    loop.done(deploy("b"))
    loop.done(DeleteDeployment(name="a"))
    assert [d.name for d in view_deployments(loop.checkpoint)] == ["default/b"]
    gone, there = view_deployments(loop.checkpoint, include_deleted=True)
    assert (gone.name, gone.status, gone.version) == ("default/a", DeploymentStatus.DELETED, "v7")
    assert gone.started_at < (gone.ended_at or 0.0) <= loop.now
    assert (there.name, there.ended_at) == ("default/b", None)


def test_a_snapshot_of_all_deployments_tells_real_start_and_end_times() -> None:
    loop = Loop()
    begun = loop.now
    loop.done(deploy("a", version="v7", route="/a", code="m:Model"))
    loop.step(100.0)
    loop.done(deploy("a", version="v8", route="/a", code="m:Model"))
    loop.done(deploy("b", version=None))
    loop.done(DeleteDeployment(name="a"))
    ended, running = view_snapshot(loop.checkpoint)
    assert (ended.name, ended.class_name, ended.version) == ("default/a", "Model", "v8")
    assert (ended.route, ended.status) == ("/a", DeploymentStatus.DELETED)
    assert ended.start_time == begun
    assert begun + 100 < (ended.end_time or 0.0) <= loop.now
    assert (running.name, running.version, running.route) == ("default/b", "Unversioned", None)
    assert running.end_time is None


def test_deployments_that_are_gone_are_remembered_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tidy, "ENDED_RETAINED_MAX", 2)
    loop = Loop()
    for name in "abc":
        loop.done(deploy(name, num=0))
        loop.done(DeleteDeployment(name=name))
    assert [d.name for d in view_deployments(loop.checkpoint, include_deleted=True)] == [
        "default/b",
        "default/c",
    ]


def test_a_deployments_endpoint_may_split_its_traffic_until_the_next_deploy() -> None:
    loop = Loop()
    loop.done(deploy("a"))
    loop.done(create_backend("b"))
    loop.done(SetTraffic(endpoint="a", weights={"a": 0.9, "b": 0.1}))
    loop.done(ShadowTraffic(endpoint="a", backend_tag="b", proportion=0.5))
    loop.done(deploy("a", version="v2"))
    endpoint = next(iter(loop.checkpoint.endpoints.values()))
    assert endpoint.target.traffic == {"default/a": 1.0}, "a deploy makes it be as given"
    assert endpoint.target.shadows == {"default/b": 0.5}, "of shadows it says nothing"


def test_a_deployments_backend_config_may_be_changed_by_itself() -> None:
    loop = Loop()
    loop.done(deploy("a", route="/a"))
    before = loop.running()
    loop.done(UpdateBackendConfig(backend_tag="a", config={"num_replicas": 2}))
    view = view_deployment(loop.checkpoint, "a")
    assert (view.backend_config.num_replicas, view.route_prefix) == (2, "/a")
    assert before < loop.running()
