"""Which host a replica goes to, and what people are told when there is none."""

from __future__ import annotations

import msgspec
import pytest

from serve_common.api.commands import DrainHost, UndrainHost
from serve_common.api.views import GoalStatus
from serve_common.errors import BadField, NotFound
from serve_common.names import BackendTag, HostId
from serve_common.protocol.reports import HostGoal
from serve_controller.core.host_load import UNITS, fits
from serve_controller.core.objects import BackendVersion, ReplicaState
from serve_controller.core.observed import HOST_LOST_AFTER_S, HOST_SUSPECT_AFTER_S, observe_host
from serve_controller.core.placement import (
    GOAL_BYTES_MAX,
    Ledger,
    Placer,
    estimate_goal_bytes,
    resource_needs,
)
from serve_controller.core.reconcile import SendHostGoal
from serve_controller.core.rolling_update import NO_CAPACITY_FOR_CONFIG
from serve_controller.core.views.hosts import view_hosts
from tests.support.control_loop.closed_loop import Loop, check_converged, draft_of
from tests.support.control_loop.orders import deploy
from tests.support.control_loop.pure_host import PureHost
from tests.support.controller_parts import TAG, get_version


def ledger_of(loop: Loop) -> Ledger:
    return Ledger(draft_of(loop), loop.observed, loop.now)


def needing(**resources: float) -> BackendVersion:
    version = get_version(cpus=resources.pop("CPU", 1.0))
    options = msgspec.structs.replace(
        version.replica_config.ray_actor_options,
        num_gpus=resources.pop("GPU", 0.0),
        memory=resources.pop("memory", 0.0),
        resources=resources,
    )
    config = msgspec.structs.replace(version.replica_config, ray_actor_options=options)
    return msgspec.structs.replace(version, replica_config=config)


def messages(loop: Loop, tag: str = "default/a") -> set[str]:
    return {r.message for r in loop.replicas(tag).values() if r.message}


# -- spread, pack, and a limit for each host ---------------------------------------------------------------------------


def test_replicas_are_spread_over_the_hosts() -> None:
    loop = Loop(PureHost("host-1", cpus=8), PureHost("host-2", cpus=8))
    loop.done(deploy(num=4))
    assert [len(host.running()) for host in loop.hosts] == [2, 2]


def test_on_request_replicas_are_packed_onto_as_few_hosts_as_hold_them() -> None:
    loop = Loop(*(PureHost(f"host-{n}", cpus=4) for n in (1, 2, 3)))
    loop.done(deploy(num=4, placement="pack"))
    assert sorted(len(host.running()) for host in loop.hosts) == [0, 0, 4]
    loop.done(deploy("b", num=2, placement="pack"))
    assert sorted(len(host.running()) for host in loop.hosts) == [0, 2, 4]


def test_packing_prefers_a_host_in_use_to_a_smaller_empty_one() -> None:
    loop = Loop(PureHost("host-1", cpus=2), PureHost("host-2", cpus=8))
    loop.done(deploy("big", num=1, cpus=4))
    loop.done(deploy("a", num=2, placement="pack"))
    assert loop.hosts_of() == ["host-2", "host-2"]


def test_no_more_replicas_of_a_backend_run_on_one_host_than_may() -> None:
    loop = Loop(PureHost("host-1", cpus=8), PureHost("host-2", cpus=8))
    goal_id = loop.command(deploy(num=5, max_replicas_per_host=2)).goal_id
    loop.steps(5)
    assert sorted(loop.hosts_of()) == ["host-1", "host-1", "host-2", "host-2"]
    assert messages(loop) == {"max_replicas_per_host is 2, and every host has so many"}
    loop.command(deploy("other", num=8))
    loop.steps(5)
    assert len(loop.running("default/other")) == 8, "the limit is of one backend"
    loop.hosts.append(PureHost("host-3"))
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED


def test_a_rolling_update_keeps_the_limit_for_each_host() -> None:
    """The check of every plan counts what still stops, too."""
    loop = Loop(PureHost("host-1", cpus=8), PureHost("host-2", cpus=8))
    loop.done(deploy(num=4, max_replicas_per_host=2))
    loop.done(deploy(num=4, version="v2", max_replicas_per_host=2))
    assert loop.hosts_of() == ["host-1", "host-1", "host-2", "host-2"]
    check_converged(loop)


# -- resources ---------------------------------------------------------------------------------------------------------


def test_fractions_that_add_up_fit() -> None:
    loop = Loop(PureHost("host-1", cpus=1))
    loop.done(deploy(num=10, cpus=0.1))
    assert len(loop.running()) == 10
    assert fits({"CPU": UNITS}, {"CPU": 0.1 + 0.2 + 0.7})
    assert not fits({"CPU": UNITS}, {"CPU": 1.0001})


@pytest.mark.parametrize("name", ["GPU", "memory", "lora_slots"])
def test_every_kind_of_resource_is_counted(name: str) -> None:
    loop = Loop(PureHost("host-1", cpus=8), PureHost("host-2", cpus=8, **{name: 2.0}))
    loop.hear_hosts()
    ledger = ledger_of(loop)
    placer = Placer(ledger, TAG, needing(**{name: 1.0}))
    assert [placer.place() for _ in range(3)] == ["host-2", "host-2", None]
    assert ledger.why_not(TAG, needing(**{name: 3.0})) == f"needs 3 {name} (the freest host has 2)"


def test_what_stops_still_holds_its_resources() -> None:
    loop = Loop(PureHost("host-1", cpus=2))
    loop.done(deploy("a", num=2))
    loop.hosts[0].is_deaf = True
    loop.command(deploy("a", num=0))
    loop.command(deploy("b", num=1))
    loop.steps(5)
    assert loop.states("default/b") == [ReplicaState.SHOULD_START]


def test_what_drains_still_holds_its_resources_and_the_next_starts_when_it_is_gone() -> None:
    loop = Loop(PureHost("host-1", cpus=2))
    loop.done(deploy("a", num=2))
    loop.hosts[0].hangs_in_draining = True
    loop.command(deploy("a", num=0))
    loop.command(deploy("b", num=1))
    loop.steps(5)
    assert loop.states("default/b") == [ReplicaState.SHOULD_START]
    assert loop.states("default/a") == [ReplicaState.STOPPING, ReplicaState.STOPPING]
    loop.hosts[0].finish_drains()
    loop.settle()
    assert loop.states("default/b") == [ReplicaState.RUNNING]


def test_what_stops_holds_its_resources_also_after_the_goal_that_replaced_it_succeeded() -> None:
    loop = Loop(PureHost("host-1", cpus=3))
    loop.done(deploy("a", num=1, cpus=2))
    loop.hosts[0].is_up = False  # for a moment: it neither hears nor says anything
    goal_id = loop.command(deploy("a", num=0, version="v2")).goal_id
    loop.steps(3)
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED
    assert loop.states() == [ReplicaState.SHOULD_STOP]
    assert ledger_of(loop).free(HostId("host-1"))["CPU"] == 1 * UNITS


# -- hosts that do not count -------------------------------------------------------------------------------------------


def test_nothing_is_placed_on_hosts_that_leave_or_are_silent() -> None:
    loop = Loop(PureHost("host-1"), PureHost("host-2"))
    loop.hear_hosts()
    leaving = msgspec.structs.replace(loop.hosts[0].report(), leaving=True)
    loop.observed = observe_host(loop.observed, leaving, loop.now)
    assert set(ledger_of(loop).hosts) == {"host-2"}
    loop.now += HOST_SUSPECT_AFTER_S
    assert ledger_of(loop).hosts == {}
    assert "none is live" in ledger_of(loop).why_not(TAG, get_version())


def test_replicas_of_a_suspect_host_are_kept_and_those_of_a_lost_one_are_placed_elsewhere() -> None:
    loop = Loop(PureHost("host-1"), PureHost("host-2"))
    loop.done(deploy(num=2))
    away = loop.hosts[0]
    before = set(loop.replicas())
    away.is_up = False
    loop.step(HOST_SUSPECT_AFTER_S)
    loop.step()
    assert set(loop.replicas()) == before
    loop.step(HOST_LOST_AFTER_S - HOST_SUSPECT_AFTER_S)
    loop.steps(3)
    assert loop.hosts_of() == ["host-1", "host-2", "host-2"], "the lost one still runs what it cannot be told"
    assert {r.host_id for r in loop.replicas().values()} == {"host-2"}
    away.is_up = True
    loop.settle()
    assert loop.hosts_of() == ["host-2", "host-2"], "and stops it when it is back"
    check_converged(loop)


# -- what people are told ----------------------------------------------------------------------------------------------


def test_people_are_told_what_lacks() -> None:
    loop = Loop(PureHost("host-1", cpus=2))
    loop.hear_hosts()
    needy = needing(CPU=4.0, GPU=1.0)
    assert ledger_of(loop).why_not(TAG, needy) == (
        "needs 4 CPU (the freest host has 2), 1 GPU (the freest host has 0)"
    )
    loop.hosts = [PureHost("host-1", cpus=2, GPU=1.0), PureHost("host-2", cpus=4)]
    loop.hosts[0].sequence = 10
    loop.hear_hosts()
    ledger = ledger_of(loop)
    assert Placer(ledger, TAG, needy).place() is None
    assert "no single host has room" in ledger.why_not(TAG, needy)


def test_people_are_told_how_many_would_fit() -> None:
    loop = Loop(PureHost("host-1", cpus=4), PureHost("host-2", cpus=4))
    goal_id = loop.command(deploy(num=5, cpus=3.0)).goal_id
    loop.steps(3)
    assert loop.goal_status(goal_id) is GoalStatus.PENDING
    assert len(loop.running()) == 2, "what fits runs"
    assert messages(loop) == {"0 of 3 more fit: needs 3 CPU (the freest host has 1)"}
    assert "2 of 5 replicas of default/a run" in loop.waiting_for(goal_id)
    assert "needs 3 CPU" in loop.waiting_for(goal_id)


# -- one message -------------------------------------------------------------------------------------------------------


def test_a_hosts_whole_goal_stays_within_one_message() -> None:
    loop = Loop(PureHost("host-1", cpus=100))
    loop.command(deploy(num=40, config="x" * 60_000))
    loop.steps(5)
    running = sum(s is ReplicaState.RUNNING for s in loop.states())
    assert running == GOAL_BYTES_MAX // estimate_goal_bytes(loop.backend().target)
    assert any("larger than one message" in message for message in messages(loop))
    (sent, *_) = sorted(
        (len(msgspec.json.encode(g)) for g in loop.remembered.goals_sent.values()), reverse=True
    )
    assert sent < 1024 * 1024


def test_a_larger_config_reaches_only_as_many_replicas_as_their_hosts_goal_has_room_for() -> None:
    """Or else the goal could never be sent, and nothing on that host would ever change again."""
    loop = Loop(PureHost("host-1", cpus=100))
    loop.done(deploy(num=40, config="x"))
    goal_id = loop.command(deploy(num=40, config="x" * 60_000)).goal_id
    loop.steps(40)
    assert loop.goal_status(goal_id) is GoalStatus.PENDING
    sizes = [len(msgspec.json.encode(goal)) for goal in loop.remembered.goals_sent.values()]
    assert max(sizes) < 1024 * 1024
    assert NO_CAPACITY_FOR_CONFIG in messages(loop)
    loop.done(deploy(num=40, config="y"))
    assert set(loop.user_configs()) == {"y"}


def test_what_one_replica_needs_is_named_as_ray_names_it() -> None:
    assert resource_needs(needing(CPU=0.5, GPU=1.0, memory=100.0, lora=2.0)) == {
        "CPU": 0.5,
        "GPU": 1.0,
        "memory": 100.0,
        "lora": 2.0,
    }
    assert resource_needs(needing(CPU=0.0)) == {}
    assert BackendTag("default/a") == TAG


# `drain_host` and `undrain_host`, and hosts that leave, fall silent and come back.


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
    loop.done(deploy(num=6))
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
