"""Replicas that hang, die or fail their health checks: each is replaced, each holds up nobody else."""

from __future__ import annotations

from serve_common.api.commands import DeleteBackend, DeleteDeployment
from serve_common.api.views import GoalStatus
from serve_controller.core.objects import ReplicaState
from serve_controller.core.replica_reports import (
    RAN_RETRY_WAIT_MAX_S,
    RETRY_WAIT_MAX_S,
    SHORT_LIFE_S,
    STUCK_GRACE_S,
    retry_wait_s,
)
from tests.simulation.closed_loop import Loop, check_converged
from tests.simulation.orders import create_backend, deploy
from tests.simulation.pure_host import PureHost


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
