"""Which host a replica goes to, and what people are told when there is none."""

from __future__ import annotations

import msgspec
import pytest

from serve_common.api.views import GoalStatus
from serve_common.names import BackendTag, HostId
from serve_controller.core.checkpoint import UNITS, fits
from serve_controller.core.objects import BackendVersion, ReplicaState
from serve_controller.core.observed import HOST_LOST_AFTER_S, HOST_SUSPECT_AFTER_S, observe_host
from serve_controller.core.placement import GOAL_BYTES_MAX, Ledger, estimate_goal_bytes, resource_needs
from serve_controller.core.rollout import NO_CAPACITY_FOR_CONFIG
from tests.simulation.closed_loop import Loop, check_converged, draft_of
from tests.simulation.orders import deploy
from tests.simulation.pure_host import PureHost
from tests.unit.controller_parts import TAG, version_of


def ledger_of(loop: Loop) -> Ledger:
    return Ledger(draft_of(loop), loop.observed, loop.now)


def needing(**resources: float) -> BackendVersion:
    version = version_of(cpus=resources.pop("CPU", 1.0))
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
    loop.command(deploy(num=4))
    loop.settle()
    assert [len(host.running()) for host in loop.hosts] == [2, 2]


def test_on_request_replicas_are_packed_onto_as_few_hosts_as_hold_them() -> None:
    loop = Loop(*(PureHost(f"host-{n}", cpus=4) for n in (1, 2, 3)))
    loop.command(deploy(num=4, placement="pack"))
    loop.settle()
    assert sorted(len(host.running()) for host in loop.hosts) == [0, 0, 4]
    loop.command(deploy("b", num=2, placement="pack"))
    loop.settle()
    assert sorted(len(host.running()) for host in loop.hosts) == [0, 2, 4]


def test_packing_prefers_a_host_in_use_to_a_smaller_empty_one() -> None:
    loop = Loop(PureHost("host-1", cpus=2), PureHost("host-2", cpus=8))
    loop.command(deploy("big", num=1, cpus=4))
    loop.settle()
    loop.command(deploy("a", num=2, placement="pack"))
    loop.settle()
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
    loop.command(deploy(num=10, cpus=0.1))
    loop.settle()
    assert len(loop.running()) == 10
    assert fits({"CPU": UNITS}, {"CPU": 0.1 + 0.2 + 0.7})
    assert not fits({"CPU": UNITS}, {"CPU": 1.0001})


@pytest.mark.parametrize("name", ["GPU", "memory", "lora_slots"])
def test_every_kind_of_resource_is_counted(name: str) -> None:
    loop = Loop(PureHost("host-1", cpus=8), PureHost("host-2", cpus=8, **{name: 2.0}))
    loop.hear_hosts()
    ledger = ledger_of(loop)
    placer = ledger.placer(TAG, needing(**{name: 1.0}))
    assert [placer.place() for _ in range(3)] == ["host-2", "host-2", None]
    assert ledger.count_fitting(needing(**{name: 1.0}), TAG, 10) == 2
    assert ledger.why_not(TAG, needing(**{name: 3.0})) == f"needs 3 {name} (the freest host has 2)"


def test_what_stops_still_holds_its_resources() -> None:
    loop = Loop(PureHost("host-1", cpus=2))
    loop.command(deploy("a", num=2))
    loop.settle()
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
    loop.command(deploy("a", num=1, cpus=2))
    loop.settle()
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
    assert "none is live" in ledger_of(loop).why_not(TAG, version_of())


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
    assert ledger.placer(TAG, needy).place() is None
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
    loop.command(deploy(num=40, config="x"))
    loop.settle()
    goal_id = loop.command(deploy(num=40, config="x" * 60_000)).goal_id
    loop.steps(40)
    assert loop.goal_status(goal_id) is GoalStatus.PENDING
    sizes = [len(msgspec.json.encode(goal)) for goal in loop.remembered.goals_sent.values()]
    assert max(sizes) < 1024 * 1024
    assert NO_CAPACITY_FOR_CONFIG in messages(loop)
    loop.command(deploy(num=40, config="y"))
    loop.settle()
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
