"""How a backend gets to its target: what starts, what stops, what goes back, and in which order."""

from __future__ import annotations

import msgspec
import pytest

from serve_common.api.commands import DeleteDeployment
from serve_common.api.views import GoalStatus
from serve_common.names import HostId
from serve_common.protocol.reports import ReplicaReport, ReplicaStatus
from serve_controller.core.objects import HostRecord, ReplicaState
from serve_controller.core.observed import observe_host
from serve_controller.core.reconcile import reconcile
from serve_controller.core.rollout import max_surge, max_unavailable
from tests.simulation.closed_loop import Loop, check_converged
from tests.simulation.orders import BAD_CODE, backend_config, deploy
from tests.simulation.pure_host import PureHost
from tests.unit.controller_parts import (
    NOW,
    TAG,
    backend_of,
    checkpoint_of,
    deployment_of,
    observed_hosts,
    replica_of,
    version_of,
)


def serving(**options: object) -> Loop:
    """A loop in which a deployment serves for an hour already."""
    loop = Loop(PureHost("host-1", cpus=8))
    loop.command(deploy(**options))
    loop.settle()
    loop.step(3600.0)
    loop.settle()
    return loop


@pytest.mark.parametrize(("wanted", "budget"), [(0, 1), (1, 1), (4, 1), (5, 2), (8, 2), (100, 25)])
def test_the_budget_is_a_quarter_and_at_least_one(wanted: int, budget: int) -> None:
    config = backend_config(wanted)
    assert (max_surge(config), max_unavailable(config)) == (budget, budget)


@pytest.mark.parametrize(
    ("percent", "surge"), [(0.0, 0), (1.0, 1), (25.0, 2), (50.0, 4), (51.0, 5), (100.0, 8)]
)
def test_surge_and_unavailable_are_percentages_rounded_up(percent: float, surge: int) -> None:
    assert max_surge(backend_config(8, max_surge_percent=percent)) == surge
    assert max_unavailable(backend_config(8, max_unavailable_percent=percent)) == surge


@pytest.mark.parametrize(
    ("options", "running_max", "serving_min"),
    [
        ({}, 10, 8),
        ({"max_surge_percent": 100.0}, 16, 8),
        ({"max_surge_percent": 0.0, "max_unavailable_percent": 25.0}, 8, 6),
        ({"max_surge_percent": 0.0, "max_unavailable_percent": 100.0}, 8, 0),
        ({"max_surge_percent": 25.0, "max_unavailable_percent": 0.0}, 10, 8),
    ],
)
def test_an_update_stays_within_its_budgets(
    options: dict[str, object], running_max: int, serving_min: int
) -> None:
    loop = Loop(PureHost("host-1", cpus=20))
    loop.done(deploy(num=8, **options))
    goal_id = loop.command(deploy(num=8, version="v2", **options)).goal_id
    most, least = 0, 8
    while loop.goal_status(goal_id) is GoalStatus.PENDING:
        loop.step()
        most, least = max(most, len(loop.running())), min(least, len(loop.routed() & loop.running()))
    assert most <= running_max
    assert least >= serving_min
    assert most > 8 or not max_surge(backend_config(8, **options)), "it uses what it may"
    check_converged(loop)


def test_without_an_unavailable_budget_an_update_that_finds_no_room_waits_and_says_so() -> None:
    loop = Loop(PureHost("host-1", cpus=4))
    loop.done(deploy(num=4))
    goal_id = loop.command(deploy(num=4, version="v2", max_unavailable_percent=0.0)).goal_id
    loop.steps(20)
    assert loop.goal_status(goal_id) is GoalStatus.PENDING
    assert len(loop.routed() & loop.running()) == 4
    assert "needs 1 CPU (the freest host has 0)" in loop.waiting_for(goal_id)
    loop.hosts.append(PureHost("host-2", cpus=1))
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED


def test_a_new_version_is_routed_before_the_old_one_stops() -> None:
    loop = serving(num=2)
    old = loop.running()
    goal_id = loop.command(deploy(num=2, version="v2")).goal_id
    while loop.goal_status(goal_id) is GoalStatus.PENDING:
        loop.step()
        assert len(loop.routed() & loop.running()) >= 2
        assert len(loop.running()) <= 3
    assert not loop.running() & old
    check_converged(loop)


def test_without_room_for_one_more_the_old_one_makes_room_within_the_budget() -> None:
    loop = Loop(PureHost("host-1", cpus=4))
    loop.command(deploy(num=4))
    loop.settle()
    goal_id = loop.command(deploy(num=4, version="v2")).goal_id
    while loop.goal_status(goal_id) is GoalStatus.PENDING:
        loop.step()
        assert len(loop.running()) >= 3
    check_converged(loop)


def test_a_version_that_fails_to_start_goes_back_and_the_old_one_never_stops() -> None:
    loop = serving(num=2)
    old = loop.running()
    goal_id = loop.command(deploy(num=2, version="v2", code=BAD_CODE)).goal_id
    while loop.goal_status(goal_id) is GoalStatus.PENDING:
        loop.step()
        assert loop.running() >= old
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.FAILED
    assert loop.running() == old
    check_converged(loop)


def test_a_changed_config_keeps_every_replica() -> None:
    loop = serving(num=4, config="one")
    before = loop.running()
    goal_id = loop.command(deploy(num=4, config="two")).goal_id
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED
    assert loop.running() == before
    assert loop.user_configs() == ["two"] * 4


def test_after_a_refused_config_every_replica_really_runs_the_former_one_again() -> None:
    """Replicas that took the new one before another refused it must hear of the way back, too."""
    loop = Loop(PureHost("host-1", cpus=3), PureHost("host-2", cpus=3))
    loop.command(deploy(num=6, config="one"))
    loop.settle()
    before = loop.running()
    loop.hosts[1].raises_at = {"two"}
    goal_id = loop.command(deploy(num=6, config="two", on_failure="go_back")).goal_id
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.FAILED
    assert loop.user_configs() == ["one"] * 6
    assert loop.running() == before, "a refused configuration costs no replica"
    check_converged(loop)


def test_a_version_back_after_several_changes_reaches_replicas_of_each_of_them() -> None:
    loop = serving(num=4, config="one")
    loop.command(deploy(num=4, config="two"))
    loop.steps(3)
    goal_id = loop.command(deploy(num=4, config="three", version="v2", code=BAD_CODE)).goal_id
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.FAILED
    assert loop.user_configs() == ["one"] * 4
    check_converged(loop)


def test_a_config_that_kills_replicas_fails_its_goal_although_others_lived_long() -> None:
    loop = serving(num=4, config="one")
    loop.hosts[0].dies_at = {"two"}
    goal_id = loop.command(deploy(num=4, config="two")).goal_id
    loop.steps(100, 0.2)
    assert loop.goal_status(goal_id) is GoalStatus.FAILED
    assert "exit code 1" in loop.backend().last_error or "no" in loop.backend().last_error
    loop.settle()
    assert loop.user_configs() == ["one"] * 4


def test_a_config_that_kills_replicas_reaches_no_more_of_them_than_the_budget() -> None:
    loop = serving(num=4, config="one")
    loop.hosts[0].dies_at = {"two"}
    old = loop.running()
    loop.command(deploy(num=4, config="two"))
    loop.steps(100, 0.2)
    assert len(loop.running() & old) >= 3


def test_starts_that_fail_wait_longer_each_time_although_others_lived_long() -> None:
    loop = serving(num=2)
    loop.hosts[0].dies_at = {None}
    loop.command(deploy(num=3, retries=100))
    before = loop.checkpoint.counters.ordinal
    loop.steps(200, 0.1)
    tries = loop.checkpoint.counters.ordinal - before
    assert 3 <= tries <= 8, f"{tries} starts in 20 s"


def test_a_replica_that_lives_ends_the_series_of_failed_starts() -> None:
    loop = serving(num=2)
    loop.hosts[0].dies_at = {None}
    loop.command(deploy(num=3, retries=100))
    loop.steps(10, 0.2)
    assert loop.backend().start_failures > 0
    loop.hosts[0].dies_at = set()
    loop.settle(seconds=1.0)
    loop.steps(15, 1.0)
    assert loop.backend().start_failures == 0
    check_converged(loop)


def test_an_update_goes_on_after_a_failed_start_that_is_wanted_no_more() -> None:
    """As many as are wanted serve, and served before it failed: no other start can end the series."""
    v1, v2 = version_of(1), version_of(2, num_replicas=2)
    backend = backend_of(v2, last_good=v1, others=[v1], start_failures=1, retry_at=NOW - 500)
    replicas = [replica_of(n, v1) for n in (1, 2)] + [replica_of(n, v2, since=NOW - 600) for n in (3, 4)]
    h1 = HostId("host-1")
    checkpoint = checkpoint_of(backend, deployment_of(), HostRecord(host_id=h1, generation=1), *replicas)
    observed = observed_hosts(h1, cpus=8)
    serving = [
        ReplicaReport(
            replica_tag=r.replica_tag, status=ReplicaStatus.RUNNING, config_version=r.config_version
        )
        for r in replicas
    ]
    report = msgspec.structs.replace(observed.hosts[h1].report, sequence=2, replicas=serving)
    after = reconcile(checkpoint, observe_host(observed, report, NOW), 1, NOW).checkpoint
    assert after.backends[TAG].start_failures == 0
    states = {r.ordinal: r.state for r in after.replicas_of(TAG).values()}
    assert states[1] is states[2] is ReplicaState.SHOULD_STOP
    assert states[3] is states[4] is ReplicaState.RUNNING


def test_a_dead_replica_is_replaced_under_a_new_number() -> None:
    loop = serving(num=2)
    victim = min(loop.running())
    loop.hosts[0].kill(victim)
    loop.settle()
    assert len(loop.running()) == 2
    assert victim not in loop.running()
    check_converged(loop)


def test_the_goal_of_a_host_rises_when_a_dead_replica_leaves_it() -> None:
    """One number names one goal: or else a late copy of the former could bring the dead one back."""
    loop = Loop(PureHost("host-1"), PureHost("host-2"))
    loop.command(deploy(num=1))
    loop.settle()
    home = next(host for host in loop.hosts if host.running())
    before = home.number
    loop.command(deploy(num=0))
    loop.settle()
    assert home.number > before
    loop.command(deploy(num=1))
    loop.settle()
    home = next(host for host in loop.hosts if host.running())
    before = home.number
    home.kill(min(home.running()))
    loop.steps(2)
    assert home.number > before
    assert all("DEAD" not in str(r.status) for r in home.held.values()), "the host may forget it"


def test_a_reconfigured_replica_that_was_unhealthy_in_between_counts_only_with_the_new_config() -> None:
    loop = serving(num=1, config="one")
    host, tag = loop.hosts[0], min(loop.running())
    loop.hosts[0].is_deaf = True
    goal_id = loop.command(deploy(num=1, config="two")).goal_id
    loop.step()
    assert loop.states() == [ReplicaState.UPDATING]
    host.is_unhealthy.add(tag)
    loop.step()
    assert loop.states()[0] is ReplicaState.SHOULD_STOP
    host.is_unhealthy.clear()
    loop.steps(3)
    assert loop.goal_status(goal_id) is GoalStatus.PENDING, "it still runs the old one"
    host.is_deaf = False
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED
    assert loop.user_configs() == ["two"]
    assert tag not in loop.running()


def test_a_refused_config_fails_the_goal_also_while_the_replica_is_unhealthy() -> None:
    loop = serving(num=1, config="one")
    host, tag = loop.hosts[0], min(loop.running())
    host.raises_at = {"two"}
    goal_id = loop.command(deploy(num=1, config="two")).goal_id
    loop.step()
    host.is_unhealthy.add(tag)
    loop.steps(3)
    assert loop.goal_status(goal_id) is GoalStatus.FAILED


def test_scaling_down_takes_what_serves_least_and_then_the_newest() -> None:
    loop = Loop(PureHost("host-1", cpus=3))
    loop.command(deploy(num=4))
    loop.steps(4)
    waiting = [tag for tag, r in loop.replicas().items() if r.state is ReplicaState.SHOULD_START]
    assert len(waiting) == 1
    loop.command(deploy(num=2))
    loop.settle()
    assert sorted(r.ordinal for r in loop.replicas().values()) == [1, 2]


def test_what_has_no_room_waits_says_why_and_starts_when_room_appears() -> None:
    loop = Loop(PureHost("host-1", cpus=2))
    goal_id = loop.command(deploy(num=1, cpus=4)).goal_id
    loop.steps(3)
    (replica,) = loop.replicas().values()
    assert replica.message == "needs 4 CPU (the freest host has 2)"
    loop.hosts.append(PureHost("host-2", cpus=4))
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED


def test_a_first_version_that_fails_halts_and_is_tried_again_by_the_next_deploy() -> None:
    loop = Loop()
    goal_id = loop.command(deploy(code=BAD_CODE)).goal_id
    loop.steps(40, 0.2)
    assert loop.goal_status(goal_id) is GoalStatus.FAILED
    assert loop.backend().halted
    before = loop.checkpoint.counters.ordinal
    loop.steps(20, 5.0)
    assert loop.checkpoint.counters.ordinal == before, "nothing is started any more"
    goal_id = loop.command(deploy(code="good:Code")).goal_id
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED


def test_a_deleted_deployment_leaves_nothing() -> None:
    loop = serving(num=2)
    goal_id = loop.command(DeleteDeployment(name="a")).goal_id
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED
    assert loop.running() == set()
    assert not loop.checkpoint.backends
    assert all(snapshot.content is None for snapshot in loop.bucket.values())


@pytest.mark.parametrize(("before", "after"), [(4, 1), (6, 2), (8, 3), (3, 1), (5, 0)])
def test_a_new_version_with_far_fewer_replicas_gets_through(before: int, after: int) -> None:
    """The many old ones are beyond the surge of the few new ones, and wait for a new one to serve."""
    loop = Loop(PureHost("host-1", cpus=20))
    loop.command(deploy(num=before))
    loop.settle()
    goal_id = loop.command(deploy(num=after, version="v2")).goal_id
    while loop.goal_status(goal_id) is GoalStatus.PENDING and loop.now < 1_000_100.0:
        loop.step()
        assert len(loop.routed() & loop.running()) >= after
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED
    check_converged(loop)


def test_a_bad_version_with_fewer_replicas_takes_none_of_the_old_ones_away() -> None:
    loop = Loop(PureHost("host-1", cpus=20))
    loop.command(deploy(num=4))
    loop.settle()
    old = loop.running()
    goal_id = loop.command(deploy(num=1, version="v2", code=BAD_CODE)).goal_id
    while loop.goal_status(goal_id) is GoalStatus.PENDING and loop.now < 1_000_100.0:
        loop.step()
        assert loop.running() >= old
    assert loop.goal_status(goal_id) is GoalStatus.FAILED
