"""`drain_host` and `undrain_host`, and hosts that leave, fall silent and come back."""

from __future__ import annotations

import pytest

from serve_common.api.commands import DrainHost, UndrainHost
from serve_common.api.views import GoalStatus
from serve_common.errors import BadField, NotFound
from serve_common.protocol.reports import HostGoal
from serve_controller.core.objects import ReplicaState
from serve_controller.core.observed import HOST_LOST_AFTER_S, HOST_SUSPECT_AFTER_S
from serve_controller.core.reconcile import SendHostGoal
from serve_controller.core.views import view_hosts
from tests.simulation.closed_loop import Loop, check_converged
from tests.simulation.orders import deploy
from tests.simulation.pure_host import PureHost


@pytest.fixture
def loop() -> Loop:
    """Four replicas spread over two hosts that have room for all of them."""
    loop = Loop(PureHost("host-1", cpus=8), PureHost("host-2", cpus=8))
    loop.done(deploy(num=4))
    return loop


# -- drain -------------------------------------------------------------------------------------------------------------


def test_every_replica_moves_off_a_drained_host_new_ones_first(loop: Loop) -> None:
    goal_id = loop.ask(DrainHost(host_id="host-1")).goal_id
    while loop.goal_status(goal_id) is GoalStatus.PENDING:
        loop.step()
        assert len(loop.routed() & loop.running()) >= 4
        assert len(loop.running()) <= 5, "no more beside them than an update may have"
    assert loop.hosts_of() == ["host-2"] * 4
    assert [
        (h.host_id, h.draining, h.num_replicas) for h in view_hosts(loop.checkpoint, loop.observed, loop.now)
    ] == [
        ("host-1", True, 0),
        ("host-2", False, 4),
    ]
    check_converged(loop)


def test_nothing_is_placed_on_a_drained_host_until_it_is_taken_back(loop: Loop) -> None:
    loop.done(DrainHost(host_id="host-1"))
    loop.command(deploy("b", num=8))
    loop.steps(5)
    assert loop.hosts_of("default/b") == ["host-2"] * 4
    reply = loop.ask(UndrainHost(host_id="host-1"))
    assert (reply.goal_id, reply.updating) == (None, True), "it is done when it is recorded"
    loop.settle()
    assert loop.hosts_of("default/b") == ["host-1"] * 4 + ["host-2"] * 4
    check_converged(loop)


def test_a_drain_that_finds_no_room_elsewhere_waits_and_says_why() -> None:
    loop = Loop(PureHost("host-1", cpus=4), PureHost("host-2", cpus=1))
    loop.done(deploy(num=4))
    goal_id = loop.ask(DrainHost(host_id="host-1")).goal_id
    loop.steps(20)
    assert loop.goal_status(goal_id) is GoalStatus.PENDING
    assert len(loop.running()) == 4, "what cannot move serves on"
    assert "replicas are still on it" in loop.waiting_for(goal_id)
    assert "needs 1 CPU" in loop.waiting_for(goal_id)
    loop.hosts.append(PureHost("host-3", cpus=4))
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED
    check_converged(loop)


def test_draining_a_drained_host_again_answers_the_same_goal(loop: Loop) -> None:
    first = loop.ask(DrainHost(host_id="host-1"))
    again = loop.command(DrainHost(host_id="host-1"))
    assert (again.reply.goal_id, bool(again.changes)) == (first.goal_id, False)


def test_taking_a_host_back_ends_a_drain_under_way(loop: Loop) -> None:
    first = loop.ask(DrainHost(host_id="host-1"))
    loop.step()
    loop.command(UndrainHost(host_id="host-1"))
    assert loop.goal_status(first.goal_id) is GoalStatus.SUPERSEDED
    loop.settle()
    check_converged(loop)


def test_taking_back_what_is_not_drained_is_a_success(loop: Loop) -> None:
    accepted = loop.command(UndrainHost(host_id="host-1"))
    assert (accepted.reply.updating, bool(accepted.changes)) == (False, False)


@pytest.mark.parametrize("command", [DrainHost(host_id="nobody"), UndrainHost(host_id="nobody")], ids=repr)
def test_an_unknown_host_is_not_found(loop: Loop, command: DrainHost | UndrainHost) -> None:
    with pytest.raises(NotFound, match="host_id: there is no host 'nobody'"):
        loop.command(command)


def test_what_is_no_name_of_a_host_is_a_bad_field(loop: Loop) -> None:
    with pytest.raises(BadField) as refused:
        loop.command(DrainHost(host_id="a/b"))
    assert refused.value.field == "host_id"


def test_a_drain_outlasts_the_hosts_absence_and_a_change_of_leader(loop: Loop) -> None:
    loop.done(DrainHost(host_id="host-1"))
    loop.hosts[0].is_up = False
    loop.steps(3, HOST_LOST_AFTER_S)
    loop.take_over()
    loop.hosts[0].is_up = True
    loop.hosts[0].restart()
    loop.command(deploy(num=6))
    loop.settle()
    assert loop.hosts_of() == ["host-2"] * 6


# -- a host that leaves by itself --------------------------------------------------------------------------------------


def test_the_replicas_of_a_host_that_leaves_are_replaced_elsewhere(loop: Loop) -> None:
    loop.hosts[0].is_leaving = True
    loop.step()
    assert len(loop.routed()) == 2, "what drains is sent nothing new"
    loop.steps(3)
    assert {r.host_id for r in loop.replicas().values() if r.state is ReplicaState.RUNNING} == {"host-2"}
    assert len(loop.routed()) == 4


# -- silence -----------------------------------------------------------------------------------------------------------


def test_forgotten_replicas_of_a_host_that_comes_back_are_stopped(loop: Loop) -> None:
    away = loop.hosts[0]
    orphans = away.running()
    away.is_up = False
    loop.step(HOST_LOST_AFTER_S)
    loop.steps(3)
    assert {r.host_id for r in loop.replicas().values()} == {"host-2"}
    away.is_up = True
    loop.step()
    assert away.running() == set()
    assert away.drained == orphans, "they are drained like any others: requests may be in flight"
    loop.settle()
    check_converged(loop)


def test_a_host_that_was_silent_for_less_than_its_lease_keeps_its_replicas(loop: Loop) -> None:
    before = loop.running()
    loop.hosts[0].is_up = False
    loop.step(HOST_LOST_AFTER_S - 0.5)
    loop.hosts[0].is_up = True
    loop.settle()
    assert loop.running() == before


def test_a_host_process_that_starts_anew_is_given_everything_to_start_again(loop: Loop) -> None:
    before = loop.hosts[0].running()
    loop.hosts[0].restart()
    loop.now += HOST_SUSPECT_AFTER_S
    loop.settle()
    assert not before & loop.running(), "a replica's number is never used again"
    assert len(loop.running()) == 4
    check_converged(loop)


def test_what_a_new_life_of_a_host_starts_again_under_an_old_number_is_not_taken_for_what_had_served(
    loop: Loop,
) -> None:
    """A goal can reach the new process before its first report reaches the controller."""
    host = loop.hosts[0]
    before = host.running()
    host.restart()
    host.hangs_in_starting = True
    loop.command(deploy("b"))
    loop.cycle()
    assert host.running() >= before, "it was told of them by the goal that brought the other one"
    loop.now += HOST_SUSPECT_AFTER_S
    loop.step()
    assert not before & loop.routed()
    host.hangs_in_starting = False
    loop.steps(2, 400.0)
    loop.settle()
    assert not before & loop.running()
    check_converged(loop)


def test_a_goal_that_is_not_acknowledged_is_sent_again_after_a_while_and_not_before(loop: Loop) -> None:
    for host in loop.hosts:
        host.is_deaf = True
    loop.command(deploy(num=5))
    assert goals_in(loop) != []
    assert goals_in(loop) == []
    loop.now += 1.0
    assert goals_in(loop) != []


def goals_in(loop: Loop) -> list[HostGoal]:
    return [a.goal for a in loop.step(0.1).actions if isinstance(a, SendHostGoal)]


def test_a_lost_host_is_sent_no_goals(loop: Loop) -> None:
    loop.hosts[0].is_up = False
    loop.step(HOST_LOST_AFTER_S)
    loop.command(deploy(num=6))
    assert {goal.host_id for _ in range(20) for goal in goals_in(loop)} == {"host-2"}
