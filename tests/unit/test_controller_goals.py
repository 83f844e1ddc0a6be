"""When goals end: not before every live proxy knows, exactly once, and remembered within bounds."""

from __future__ import annotations

import msgspec
import pytest

from serve_common.api.commands import (
    CreateEndpoint,
    DeleteBackend,
    DeleteDeployment,
    DeleteEndpoint,
    SetTraffic,
    ShadowTraffic,
    UndrainHost,
)
from serve_common.api.views import GoalStatus
from serve_common.errors import NotFound
from serve_common.names import GoalId, ProxyId
from serve_controller.core import reconcile as tidy
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.goals.scope import ERROR_LENGTH_MAX, end_goal
from serve_controller.core.objects import number_of
from serve_controller.core.observed import PROXY_LOST_AFTER_S, observe_bucket, observe_proxy
from serve_controller.core.views import view_goal
from tests.simulation.closed_loop import Loop
from tests.simulation.orders import BAD_CODE, create_backend, create_endpoint, deploy
from tests.simulation.pure_host import PureHost
from tests.unit.controller_parts import goal_of


def test_a_goal_waits_until_every_live_proxy_has_applied_the_snapshot() -> None:
    loop = Loop(proxies=2)
    loop.steps(2)
    loop.are_proxies_slow = True
    goal_id = loop.command(deploy()).goal_id
    loop.steps(20)
    assert loop.goal_status(goal_id) is GoalStatus.PENDING
    assert loop.waiting_for(goal_id).startswith("2 proxies have not applied snapshot")
    loop.proxies[ProxyId("proxy-1")] = 10**6
    loop.step()
    assert loop.waiting_for(goal_id).startswith("1 proxies")
    loop.are_proxies_slow = False
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED


@pytest.mark.parametrize(
    "command",
    [
        create_endpoint("new", b=1.0),
        SetTraffic(endpoint="e", weights={"b": 0.5, "c": 0.5}),
        ShadowTraffic(endpoint="e", backend_tag="c", proportion=0.5),
        DeleteEndpoint(endpoint="e"),
        DeleteBackend(backend_tag="spare"),
        create_backend("new"),
        create_backend("b", num=2),
        DeleteDeployment(name="a"),
    ],
    ids=lambda command: type(command).__name__,
)
def test_every_goal_that_changes_routing_waits_for_the_proxies(command: CreateEndpoint) -> None:
    loop = Loop()
    for name in ("b", "c", "spare"):
        loop.command(create_backend(name))
    loop.command(create_endpoint("e", route="/e", b=1.0))
    loop.command(deploy("a"))
    loop.settle()
    loop.are_proxies_slow = True
    goal_id = loop.command(command).goal_id
    loop.steps(20)
    assert loop.goal_status(goal_id) is GoalStatus.PENDING
    assert loop.waiting_for(goal_id).startswith("1 proxies have not applied snapshot")
    loop.are_proxies_slow = False
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED


def test_a_goal_does_not_wait_for_a_lost_proxy() -> None:
    loop = Loop(proxies=1)
    loop.steps(2)
    loop.proxies.clear()
    goal_id = loop.command(deploy()).goal_id
    loop.steps(5)
    assert loop.goal_status(goal_id) is GoalStatus.PENDING
    loop.step(PROXY_LOST_AFTER_S)
    loop.step()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED


def test_a_goal_does_not_wait_for_a_proxy_that_leaves() -> None:
    loop = Loop(proxies=1)
    loop.steps(2)
    loop.are_proxies_slow = True
    goal_id = loop.command(deploy()).goal_id
    loop.steps(5)
    assert loop.goal_status(goal_id) is GoalStatus.PENDING
    report = loop.observed.proxies[ProxyId("proxy-1")].report
    loop.proxies.clear()
    leaving = msgspec.structs.replace(report, sequence=report.sequence + 1, leaving=True)
    loop.observed = observe_proxy(loop.observed, leaving, loop.now)
    loop.step()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED


def test_a_new_leader_waits_for_the_proxies_that_the_former_one_knew() -> None:
    loop = Loop(proxies=1)
    loop.steps(2)
    loop.proxies.clear()
    goal_id = loop.command(deploy()).goal_id
    loop.take_over()
    loop.steps(5)
    assert loop.goal_status(goal_id) is GoalStatus.PENDING


def test_a_goal_waits_for_a_bucket_of_which_nothing_is_known() -> None:
    loop = Loop()
    goal_id = loop.command(deploy(num=0)).goal_id
    loop.observed = observe_bucket(loop.observed, None)
    assert loop.waiting_for(goal_id) == "waits for the bucket of snapshots"


def test_a_goal_waits_until_its_snapshots_are_in_the_bucket() -> None:
    loop = Loop()
    loop.steps(2)
    goal_id = loop.command(deploy(num=0)).goal_id
    plan = loop.plan()
    assert plan.checkpoint.goals[GoalId(str(goal_id))].status is GoalStatus.PENDING
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED


def test_a_delete_waits_for_the_last_replica() -> None:
    loop = Loop()
    loop.command(deploy(num=2))
    loop.settle()
    for host in loop.hosts:
        host.is_deaf = True
    goal_id = loop.command(DeleteDeployment(name="a")).goal_id
    loop.steps(3)
    assert loop.waiting_for(goal_id) == "2 replicas of default/a still stop"


def test_a_failed_goal_tells_the_users_error_and_its_end_is_bounded() -> None:
    loop = Loop()
    goal_id = loop.command(deploy(code=BAD_CODE)).goal_id
    loop.steps(40, 0.2)
    goal = loop.goal(goal_id)
    assert (goal.status, goal.error) == (GoalStatus.FAILED, "RuntimeError: no")
    draft = Draft(Checkpoint())
    end_goal(draft, goal_of(status=GoalStatus.PENDING), GoalStatus.FAILED, 1.0, "x" * 100_000 + "end")
    ended = draft.goals[GoalId("g1")]
    assert len(ended.error) == ERROR_LENGTH_MAX
    assert ended.error.endswith("end")
    with pytest.raises(AssertionError):
        end_goal(draft, ended, GoalStatus.SUCCEEDED, 2.0)


def test_a_pending_goal_says_what_fails_before_it_gives_up() -> None:
    loop = Loop(PureHost("host-1", cpus=8))
    goal_id = loop.command(deploy(code=BAD_CODE, retries=50)).goal_id
    loop.steps(30, 0.2)
    assert loop.goal_status(goal_id) is GoalStatus.PENDING
    assert "starts failed: RuntimeError: no" in loop.waiting_for(goal_id)


def test_finished_goals_are_forgotten_by_number_and_age_and_a_backends_newest_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tidy, "FINISHED_RETAINED_MAX", 3)
    loop = Loop()
    for number in range(8):
        loop.command(deploy(num=number % 2))
        loop.settle()
    assert len(loop.checkpoint.goals) == 4
    assert loop.backend().goal_id in loop.checkpoint.goals
    draft = Draft(loop.checkpoint)
    tidy.tidy(draft, loop.observed, loop.now + 3 * tidy.FINISHED_RETENTION_S)
    assert set(draft.goals) == {loop.backend().goal_id}


def test_a_finished_goal_can_be_asked_for_at_least_a_day() -> None:
    loop = Loop()
    goal_id = loop.command(deploy()).goal_id
    loop.settle()
    loop.command(DeleteDeployment(name="a"))
    loop.settle()
    loop.step(86_400.0)
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED


def test_an_id_that_is_forgotten_is_told_from_one_that_never_was() -> None:
    loop = Loop()
    goal_id = loop.command(deploy()).goal_id
    loop.settle()
    loop.command(DeleteDeployment(name="a"))
    loop.settle()
    loop.step(3 * tidy.FINISHED_RETENTION_S)
    with pytest.raises(NotFound, match="ended and is forgotten"):
        view_goal(loop.checkpoint, loop.observed, GoalId(str(goal_id)))
    with pytest.raises(NotFound, match="never given"):
        view_goal(loop.checkpoint, loop.observed, GoalId("g999"))
    with pytest.raises(NotFound, match="never given"):
        view_goal(loop.checkpoint, loop.observed, GoalId("nonsense"))


def test_a_host_is_forgotten_only_when_it_is_lost_runs_nothing_and_is_not_drained() -> None:
    loop = Loop(PureHost("host-1"), PureHost("host-2"))
    loop.steps(2)
    loop.command(deploy(num=1))
    loop.settle()
    away = next(host for host in loop.hosts if not host.running())
    away.is_up = False
    loop.steps(3, 10.0)
    assert away.host_id in loop.checkpoint.hosts, "it is still listed"
    loop.observed = msgspec.structs.replace(
        loop.observed, hosts=loop.observed.hosts.delete(away.host_id), since=loop.now - 100
    )
    loop.step()
    assert away.host_id not in loop.checkpoint.hosts
    with pytest.raises(NotFound):
        loop.command(UndrainHost(host_id=away.host_id))


@pytest.mark.parametrize(
    ("goal_id", "number"),
    [("g1", 1), ("g123", 123), ("g", 0), ("1", 0), ("", 0), ("g-1", 0), ("g²", 0), ("g" + "9" * 400, 0)],
)
def test_the_number_of_a_goal_is_read_from_its_id(goal_id: str, number: int) -> None:
    assert number_of(GoalId(goal_id)) == number
