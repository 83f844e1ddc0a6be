"""Replicas that hang, die or fail their health checks: each is replaced, each holds up nobody else."""

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
from serve_common.protocol.reports import ERROR_LENGTH_MAX
from serve_controller.core import reconcile
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.goals import end_goal
from serve_controller.core.objects import ReplicaState, parse_number
from serve_controller.core.observed import PROXY_LOST_AFTER_S, observe_bucket, observe_proxy
from serve_controller.core.replica_reports import (
    RAN_RETRY_WAIT_MAX_S,
    RETRY_WAIT_MAX_S,
    SHORT_LIFE_S,
    STUCK_GRACE_S,
    retry_wait_s,
)
from serve_controller.core.views.hosts import view_goal
from tests.support.control_loop.closed_loop import Loop, check_converged
from tests.support.control_loop.orders import BAD_CODE, create_backend, create_endpoint, deploy
from tests.support.control_loop.pure_host import PureHost
from tests.support.controller_parts import goal_of


def serving(num: int = 2, **options: object) -> Loop:
    loop = Loop(PureHost("host-1", cpus=8))
    loop.done(deploy(num=num, **options))
    loop.step(3600.0)
    loop.settle()
    return loop


# -- stuck in starting -------------------------------------------------------------------------------------------------


def test_a_replica_stuck_in_starting_is_replaced_after_its_timeout_and_said_so() -> None:
    loop = Loop(PureHost("host-1", cpus=8))
    loop.hosts[0].hangs_in_starting = True
    goal_id = loop.command(deploy(start_timeout_s=10.0)).goal_id
    loop.steps(3)
    (stuck,) = loop.replicas()
    loop.steps(2, 10.0)
    assert loop.replicas()[stuck].state is ReplicaState.STARTING, "the host is given time to end it itself"
    loop.hosts[0].hangs_in_starting = False
    loop.step(STUCK_GRACE_S)
    assert "has been starting for" in loop.backend().last_error
    assert "has been starting for" in loop.waiting_for(goal_id)
    loop.settle()
    assert stuck not in loop.running()
    assert stuck in loop.hosts[0].killed, "it is ended by force: it could not drain"
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED


def test_a_version_that_always_hangs_fails_like_one_that_raises() -> None:
    loop = serving()
    old = loop.running()
    loop.hosts[0].hangs_in_starting = True
    goal_id = loop.command(deploy(num=2, version="v2", start_timeout_s=10.0)).goal_id
    loop.steps(60, 5.0)
    assert loop.goal_status(goal_id) is GoalStatus.FAILED
    assert "has been starting for" in loop.goal(goal_id).error
    assert loop.routed() == old


def test_the_plan_asks_to_be_made_again_when_a_start_will_be_stuck() -> None:
    loop = Loop(PureHost("host-1", cpus=8))
    loop.hosts[0].hangs_in_starting = True
    loop.command(deploy(start_timeout_s=10.0))
    loop.steps(3)
    (replica,) = loop.replicas().values()
    due = {d.subject: d.at for d in loop.step().due}
    assert due["backend", "default/a"] == replica.since + 10.0 + STUCK_GRACE_S


# -- stuck in stopping -------------------------------------------------------------------------------------------------


def test_a_replica_that_does_not_stop_is_killed_after_its_timeout_and_said_so() -> None:
    loop = serving(num=1, graceful_shutdown_timeout_s=5.0)
    (tag,) = loop.running()
    loop.hosts[0].hangs_in_draining = True
    goal_id = loop.command(DeleteDeployment(name="a")).goal_id
    loop.steps(5)
    assert loop.states() == [ReplicaState.STOPPING]
    loop.steps(2, 5.0)
    assert tag in loop.hosts[0].held, "it may finish, and its host may end it"
    loop.hosts[0].is_deaf = True
    loop.step(STUCK_GRACE_S)
    assert "is told to kill it" in loop.waiting_for(goal_id)
    loop.hosts[0].is_deaf = False
    loop.settle()
    assert loop.hosts[0].killed == {tag}
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED


def test_a_replica_that_drains_in_time_is_never_killed() -> None:
    loop = serving(num=1, graceful_shutdown_timeout_s=5.0)
    loop.hosts[0].hangs_in_draining = True
    loop.command(DeleteDeployment(name="a"))
    loop.steps(5)
    loop.hosts[0].finish_drains()
    loop.settle()
    assert loop.hosts[0].killed == set()


def test_force_kill_skips_the_graceful_wait() -> None:
    loop = Loop(PureHost("host-1", cpus=8))
    loop.done(create_backend("b", num=2))
    loop.hosts[0].hangs_in_draining = True
    loop.done(DeleteBackend(backend_tag="b", force_kill=True))
    assert len(loop.hosts[0].killed) == 2


def test_force_kill_ends_also_what_drains_already() -> None:
    loop = Loop(PureHost("host-1", cpus=8))
    loop.done(create_backend("b", num=2))
    loop.hosts[0].hangs_in_draining = True
    goal_id = loop.command(DeleteBackend(backend_tag="b")).goal_id
    loop.steps(5)
    assert loop.goal_status(goal_id) is GoalStatus.PENDING
    again = loop.ask(DeleteBackend(backend_tag="b", force_kill=True))
    assert again.goal_id == goal_id, "it is the same delete, only sooner"
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED
    assert len(loop.hosts[0].killed) == 2


# -- neither holds up anything -----------------------------------------------------------------------------------------


def test_what_hangs_in_stopping_does_not_keep_others_from_starting() -> None:
    loop = serving()
    loop.hosts[0].hangs_in_draining = True
    goal_id = loop.command(deploy(num=2, version="v2")).goal_id
    loop.steps(20)
    serving_now = loop.routed()
    assert {r.code_version for tag, r in loop.replicas().items() if tag in serving_now} == {2}
    assert loop.states().count(ReplicaState.STOPPING) == 2
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED, "the new version serves everywhere"


def test_what_hangs_in_starting_does_not_keep_others_from_stopping() -> None:
    loop = serving(num=4)
    loop.hosts[0].hangs_in_starting = True
    loop.command(deploy("other", num=1))
    loop.command(deploy("a", num=6))
    loop.steps(5)
    assert loop.states().count(ReplicaState.STARTING) == 2
    loop.command(deploy("a", num=1))
    loop.steps(10)
    assert loop.states() == [ReplicaState.RUNNING]
    assert loop.states("default/other") == [ReplicaState.STARTING]


# -- deaths and health -------------------------------------------------------------------------------------------------


def test_an_unhealthy_replica_leaves_the_routes_and_is_replaced_at_once() -> None:
    loop = serving(num=2)
    host, victim = loop.hosts[0], min(loop.running())
    host.hangs_in_draining = True
    host.is_unhealthy.add(victim)
    loop.step()
    assert victim not in loop.routed()
    loop.steps(3)
    assert len(loop.routed() & loop.running()) == 2, "its successor serves while it still drains"
    assert loop.backend().start_failures == 0, "it had served for long"
    host.finish_drains()
    loop.settle()
    assert victim not in loop.running()
    check_converged(loop)


def test_replicas_that_never_become_healthy_fail_their_goal() -> None:
    loop = serving(num=1)
    old = loop.running()
    host = loop.hosts[0]
    goal_id = loop.command(deploy(num=1, version="v2")).goal_id
    for _ in range(200):
        loop.step(0.2)
        host.is_unhealthy = host.running() - old
    assert loop.goal_status(goal_id) is GoalStatus.FAILED
    assert loop.routed() == old


def test_a_replica_that_became_unhealthy_before_anybody_heard_it_run_is_replaced_too() -> None:
    """The report that it runs was lost, or overtaken."""
    loop = Loop(PureHost("host-1", cpus=8))
    loop.steps(2)
    loop.command(deploy(num=1))
    loop.cycle()
    (first,) = loop.running()
    loop.hosts[0].is_unhealthy.add(first)
    loop.settle()
    assert len(loop.running()) == 1
    assert first not in loop.running()
    assert loop.hosts[0].drained == {first}


def test_a_replica_that_dies_young_counts_as_a_failed_start_and_an_old_one_does_not() -> None:
    loop = serving(num=1)
    loop.hosts[0].kill(min(loop.running()))
    loop.step()
    assert loop.backend().start_failures == 0
    loop.steps(3)
    loop.hosts[0].kill(min(loop.running()))
    loop.step()
    assert loop.backend().start_failures == 1
    loop.steps(3)
    loop.step(SHORT_LIFE_S)
    loop.step()
    assert loop.backend().start_failures == 0


def test_replicas_that_are_killed_again_and_again_are_back_within_moments() -> None:
    """The code can start: however often something kills what it serves, the backend does not stay away for long."""
    loop = serving(num=2)
    for _ in range(12):
        for tag in loop.running():
            loop.hosts[0].kill(tag)
        loop.step()
        waited_s = 0.0
        while not loop.routed():
            loop.step(0.2)
            waited_s += 0.2
            assert waited_s <= RAN_RETRY_WAIT_MAX_S + 1.0
    assert loop.backend().start_failures >= 12


def test_the_wait_after_failed_starts_doubles_up_to_a_limit() -> None:
    waits = [retry_wait_s(n) for n in range(1, 12)]
    assert waits[:4] == [0.0, 0.2, 0.4, 0.8]
    assert waits == sorted(waits)
    assert retry_wait_s(10**6) == RETRY_WAIT_MAX_S
    assert retry_wait_s(3, had_run=True) == retry_wait_s(3)
    assert retry_wait_s(10**6, had_run=True) == RAN_RETRY_WAIT_MAX_S


def test_a_host_that_is_told_to_start_a_replica_and_does_not_is_not_asked_in_a_ring() -> None:
    loop = Loop(PureHost("host-1", cpus=8))
    loop.steps(2)
    goal_id = loop.command(deploy(retries=100)).goal_id
    for _ in range(100):
        loop.step(0.1)
        loop.hosts[0].held.clear()
        loop.hosts[0].spent.clear()
    assert "was told to start it and does not" in loop.waiting_for(goal_id)
    assert loop.checkpoint.counters.ordinal < 10


# When goals end: not before every live proxy knows, exactly once, and remembered within bounds.


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
    assert loop.waiting_for(goal_id).startswith("one proxy has")
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
    loop.done(deploy("a"))
    loop.are_proxies_slow = True
    goal_id = loop.command(command).goal_id
    loop.steps(20)
    assert loop.goal_status(goal_id) is GoalStatus.PENDING
    assert loop.waiting_for(goal_id).startswith("one proxy has not applied snapshot")
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
    loop.done(deploy(num=2))
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
    monkeypatch.setattr(reconcile, "FINISHED_RETAINED_MAX", 3)
    loop = Loop()
    for number in range(8):
        loop.done(deploy(num=number % 2))
    assert len(loop.checkpoint.goals) == 4
    assert loop.backend().goal_id in loop.checkpoint.goals
    draft = Draft(loop.checkpoint)
    reconcile.gc(draft, loop.observed, loop.now + 3 * reconcile.FINISHED_RETENTION_S)
    assert set(draft.goals) == {loop.backend().goal_id}


def test_a_finished_goal_can_be_asked_for_at_least_a_day() -> None:
    loop = Loop()
    goal_id = loop.command(deploy()).goal_id
    loop.settle()
    loop.done(DeleteDeployment(name="a"))
    loop.step(86_400.0)
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED


def test_an_id_that_is_forgotten_is_told_from_one_that_never_was() -> None:
    loop = Loop()
    goal_id = loop.command(deploy()).goal_id
    loop.settle()
    loop.done(DeleteDeployment(name="a"))
    loop.step(3 * reconcile.FINISHED_RETENTION_S)
    with pytest.raises(NotFound, match="ended and is forgotten"):
        view_goal(loop.checkpoint, loop.observed, GoalId(str(goal_id)))
    with pytest.raises(NotFound, match="never given"):
        view_goal(loop.checkpoint, loop.observed, GoalId("g999"))
    with pytest.raises(NotFound, match="never given"):
        view_goal(loop.checkpoint, loop.observed, GoalId("nonsense"))


def test_a_host_is_forgotten_only_when_it_is_lost_runs_nothing_and_is_not_drained() -> None:
    loop = Loop(PureHost("host-1"), PureHost("host-2"))
    loop.steps(2)
    loop.done(deploy(num=1))
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
    assert parse_number(GoalId(goal_id)) == number
