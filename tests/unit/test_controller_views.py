"""What callers see."""

from __future__ import annotations

import msgspec
import pytest

from serve_common.errors import BadField, NotFound
from serve_common.names import GoalId
from serve_common.wires.commands import DeleteDeployment
from serve_common.wires.views import DeploymentStatus, DeploymentView, GoalStatus
from serve_controller.core import views
from serve_controller.core.objects import ReplicaState
from serve_controller.core.observed import PROXY_LOST_AFTER_S
from tests.simulation.closed_loop import BAD_CODE, Loop, PureHost, deploy


def view(loop: Loop) -> DeploymentView:
    return views.view_deployment(loop.checkpoint, "a")


def test_a_deployment_is_updating_then_healthy_then_deleting() -> None:
    loop = Loop()
    loop.command(deploy(num=2, route="/a"))
    assert view(loop).status is DeploymentStatus.UPDATING
    loop.settle()
    seen = view(loop)
    assert (seen.status, seen.message, seen.goal_status) == (
        DeploymentStatus.HEALTHY,
        "",
        GoalStatus.SUCCEEDED,
    )
    assert [r.state for r in seen.replicas] == ["running", "running"]
    assert {r.version for r in seen.replicas} == {"v1"}
    loop.hosts[0].is_deaf = loop.hosts[1].is_deaf = True
    loop.command(DeleteDeployment(name="a"))
    loop.step()
    assert view(loop).status is DeploymentStatus.DELETING
    assert view(loop).route_prefix is None


def test_what_cannot_be_placed_says_why() -> None:
    loop = Loop(PureHost("host-1", cpus=2))
    loop.command(deploy(cpus=4))
    loop.steps(2)
    assert view(loop).message == "needs 4 CPU (the freest host has 2)"


def test_a_failed_change_is_told_while_the_former_serves_and_a_failed_first_is_unhealthy() -> None:
    loop = Loop()
    loop.command(deploy())
    loop.settle()
    loop.command(deploy(version="v2", code=BAD_CODE))
    loop.settle()
    assert view(loop).status is DeploymentStatus.HEALTHY
    assert "was undone: RuntimeError: no" in view(loop).message
    assert view(loop).version == "v1"
    loop = Loop()
    loop.command(deploy(code=BAD_CODE))
    loop.steps(40, 0.2)
    assert (view(loop).status, view(loop).message) == (DeploymentStatus.UNHEALTHY, "RuntimeError: no")


def test_a_lost_replica_makes_a_deployment_unhealthy() -> None:
    loop = Loop(PureHost("host-1", cpus=1))
    loop.command(deploy())
    loop.settle()
    loop.hosts[0].is_unhealthy = {str(tag) for tag in loop.running()}
    loop.step()
    assert view(loop).status is DeploymentStatus.UNHEALTHY
    assert view(loop).message == "0 of 1 replicas serve"


def test_an_unknown_goal_is_told_from_a_forgotten_one() -> None:
    loop = Loop()
    goal_id = loop.command(deploy()).goal_id
    assert goal_id is not None
    assert views.view_goal(loop.checkpoint, loop.observed, goal_id).message
    with pytest.raises(NotFound, match="never given"):
        views.view_goal(loop.checkpoint, loop.observed, GoalId("g99"))
    with pytest.raises(NotFound, match="never given"):
        views.view_goal(loop.checkpoint, loop.observed, GoalId("x" * 10_000))
    object.__getattribute__(loop.checkpoint, "goals").clear()
    with pytest.raises(NotFound, match="forgotten"):
        views.view_goal(loop.checkpoint, loop.observed, goal_id)


def test_names_that_are_none_are_refused_and_unknown_ones_not_found() -> None:
    loop = Loop()
    with pytest.raises(NotFound):
        view(loop)
    with pytest.raises(BadField):
        views.view_deployment(loop.checkpoint, "../..")


def test_hosts_and_proxies_are_listed_with_how_they_are_treated() -> None:
    loop = Loop(PureHost("host-1"), PureHost("host-2"))
    loop.command(deploy(num=3))
    loop.settle()
    hosts = views.view_hosts(loop.checkpoint, loop.observed, loop.now)
    assert [(h.host_id, h.status) for h in hosts] == [("host-1", "live"), ("host-2", "live")]
    assert sum(h.num_replicas for h in hosts) == 3
    (proxy,) = views.view_proxies(loop.observed, loop.now)
    assert (proxy.status, proxy.applied_snapshot_id) == ("live", loop.checkpoint.counters.snapshot)
    (proxy,) = views.view_proxies(loop.observed, loop.now + PROXY_LOST_AFTER_S)
    assert proxy.status == "lost"


def test_replicas_are_counted_in_every_state() -> None:
    loop = Loop()
    loop.command(deploy(num=2))
    loop.settle()
    counts = {row.state: row.count for row in views.count_replicas(loop.checkpoint)}
    assert counts.pop("running") == 2
    assert set(counts.values()) == {0}
    assert len(counts) == len(ReplicaState) - 2
    everything = [views.view_backends(loop.checkpoint), views.view_endpoints(loop.checkpoint)]
    assert b"default/a" in msgspec.json.encode(everything)
