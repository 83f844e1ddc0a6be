"""Which host a replica goes to, and what people are told when there is none."""

from __future__ import annotations

import msgspec

from serve_common.names import HostId
from serve_common.wires.views import GoalStatus
from serve_controller.core.objects import ReplicaState
from serve_controller.core.observed import HOST_SUSPECT_AFTER_S, observe_host
from serve_controller.core.placement import GOAL_BYTES, GOAL_BYTES_MAX, Ledger, fits, needs_of
from serve_controller.core.rollout import NO_ROOM_FOR_CONFIG
from tests.simulation.closed_loop import Loop, PureHost, deploy, draft_of


def ledger_of(loop: Loop) -> Ledger:
    return Ledger(draft_of(loop), loop.observed, loop.now)


def test_replicas_are_spread_over_the_hosts() -> None:
    loop = Loop(PureHost("host-1", cpus=8), PureHost("host-2", cpus=8))
    loop.command(deploy(num=4))
    loop.settle()
    assert [len(host.running()) for host in loop.hosts] == [2, 2]


def test_fractions_that_add_up_fit() -> None:
    loop = Loop(PureHost("host-1", cpus=1))
    loop.command(deploy(num=10, cpus=0.1))
    loop.settle()
    assert len(loop.running()) == 10
    assert fits({"CPU": 0.30000000000000004 - 0.3}, {"CPU": 0.0000005})


def test_what_stops_still_holds_its_resources() -> None:
    loop = Loop(PureHost("host-1", cpus=2))
    loop.command(deploy("a", num=2))
    loop.settle()
    loop.hosts[0].is_deaf = True
    loop.command(deploy("a", num=0))
    loop.command(deploy("b", num=1))
    loop.steps(5)
    assert loop.states("default/b") == [ReplicaState.SHOULD_START]


def test_nothing_is_placed_on_hosts_that_leave_or_are_silent() -> None:
    loop = Loop(PureHost("host-1"), PureHost("host-2"))
    loop.hear_hosts()
    leaving = msgspec.structs.replace(loop.hosts[0].report(), leaving=True)
    loop.observed = observe_host(loop.observed, leaving, loop.now)
    assert set(ledger_of(loop).free) == {"host-2"}
    loop.now += HOST_SUSPECT_AFTER_S
    assert ledger_of(loop).free == {}
    assert "none is live" in ledger_of(loop).why_not({"CPU": 1.0})


def test_people_are_told_what_lacks() -> None:
    loop = Loop(PureHost("host-1", cpus=2))
    loop.hear_hosts()
    ledger = ledger_of(loop)
    assert ledger.why_not({"CPU": 4.0, "GPU": 1.0}) == (
        "needs 4 CPU (the freest host has 2), 1 GPU (the freest host has 0)"
    )
    loop.hosts.append(PureHost("host-2", cpus=4))
    loop.hear_hosts()
    ledger = ledger_of(loop)
    ledger.free[HostId("host-1")]["GPU"] = 1.0
    assert ledger.place({"CPU": 4.0, "GPU": 1.0}) is None
    assert "no single host has room" in ledger.why_not({"CPU": 4.0, "GPU": 1.0})


def test_a_hosts_whole_goal_stays_within_one_message() -> None:
    loop = Loop(PureHost("host-1", cpus=100))
    loop.command(deploy(num=40, config="x" * 60_000))
    loop.steps(5)
    assert sum(s is ReplicaState.RUNNING for s in loop.states()) == int(
        GOAL_BYTES_MAX // needs_of(loop.backend().target)[GOAL_BYTES]
    )
    assert GOAL_BYTES in next(r.message for r in loop.replicas().values() if r.message)


def test_a_larger_config_reaches_only_as_many_replicas_as_their_hosts_goal_has_room_for() -> None:
    """Or else the goal could never be sent, and nothing on that host would ever change again."""
    loop = Loop(PureHost("host-1", cpus=100))
    loop.command(deploy(num=40, config="x"))
    loop.settle()
    goal_id = loop.command(deploy(num=40, config="x" * 60_000)).goal_id
    loop.steps(40)
    assert loop.goal_status(goal_id) is GoalStatus.PENDING
    sizes = [len(msgspec.json.encode(goal)) for goal in loop.history.goals_sent.values()]
    assert max(sizes) < 1024 * 1024
    assert NO_ROOM_FOR_CONFIG in {r.message for r in loop.replicas().values()}
    loop.command(deploy(num=40, config="y"))
    loop.settle()
    assert set(loop.user_configs()) == {"y"}


def test_what_stops_holds_its_resources_also_after_the_goal_that_replaced_it_succeeded() -> None:
    loop = Loop(PureHost("host-1", cpus=3))
    loop.command(deploy("a", num=1, cpus=2))
    loop.settle()
    loop.hosts[0].is_up = False  # for a moment: it neither hears nor says anything
    goal_id = loop.command(deploy("a", num=0, version="v2")).goal_id
    loop.steps(3)
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED
    assert loop.states() == [ReplicaState.SHOULD_STOP]
    assert ledger_of(loop).free[HostId("host-1")]["CPU"] == 1.0
