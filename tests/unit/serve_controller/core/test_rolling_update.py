"""How a backend gets to its target: what starts, what stops, what goes back, and in which order."""

from __future__ import annotations

import msgspec
import pytest

from serve_common.api.commands import DeleteDeployment, DrainHost, UpdateBackendConfig
from serve_common.api.views import DeploymentStatus, GoalStatus
from serve_common.names import HostId
from serve_common.protocol.reports import ReplicaReport, ReplicaStatus
from serve_controller.core.objects import HostRecord, ReplicaState
from serve_controller.core.observed import (
    HOST_LOST_AFTER_S,
    HostStatus,
    ObservedState,
    host_status,
    observe_host,
    silent_at,
)
from serve_controller.core.reconcile import reconcile
from serve_controller.core.rolling_update import max_surge, max_unavailable
from serve_controller.core.transitions import (
    DRAINING,
    IN_HOST_GOAL,
    ROUTED,
    TRANSITIONS,
    WANTED,
    IllegalTransition,
    TransitionEvent,
    moved,
)
from serve_controller.core.views.deployments import view_deployment
from tests.support.control_loop.closed_loop import Loop, check_converged
from tests.support.control_loop.orders import BAD_CODE, UNUSABLE_CODE, backend_config, deploy
from tests.support.control_loop.pure_host import PureHost
from tests.support.controller_parts import (
    NOW,
    TAG,
    backend_of,
    checkpoint_of,
    deployment_of,
    get_version,
    observed_hosts,
    replica_of,
)


def serving(**options: object) -> Loop:
    """A loop in which a deployment serves for an hour already."""
    loop = Loop(PureHost("host-1", cpus=8))
    loop.done(deploy(**options))
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
    loop.done(deploy(num=4))
    goal_id = loop.command(deploy(num=4, version="v2")).goal_id
    while loop.goal_status(goal_id) is GoalStatus.PENDING:
        loop.step()
        assert len(loop.running()) >= 3
    check_converged(loop)


def test_a_version_that_no_start_can_serve_fails_with_the_first() -> None:
    loop = serving(num=2)
    old = loop.running()
    goal_id = loop.command(deploy(num=2, version="v2", code=UNUSABLE_CODE, retries=20)).goal_id
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.FAILED
    assert loop.running() == old
    assert len({tag for host in loop.hosts for tag in host.asked} - old) == 1
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
    loop.done(deploy(num=4, config="two"))
    assert loop.running() == before
    assert loop.user_configs() == ["two"] * 4


def test_after_a_refused_config_every_replica_really_runs_the_former_one_again() -> None:
    """Replicas that took the new one before another refused it must hear of the way back, too."""
    loop = Loop(PureHost("host-1", cpus=3), PureHost("host-2", cpus=3))
    loop.done(deploy(num=6, config="one"))
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
    v1, v2 = get_version(1), get_version(2, num_replicas=2)
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
    states = {r.ordinal: r.state for r in after.get_replicas(TAG).values()}
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
    loop.done(deploy(num=1))
    home = next(host for host in loop.hosts if host.running())
    before = home.number
    loop.done(deploy(num=0))
    assert home.number > before
    loop.done(deploy(num=1))
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
    loop.done(deploy(num=2))
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
    loop.done(deploy(code="good:Code"))


def test_a_deleted_deployment_leaves_nothing() -> None:
    loop = serving(num=2)
    loop.done(DeleteDeployment(name="a"))
    assert loop.running() == set()
    assert not loop.checkpoint.backends
    assert all(snapshot.content is None for snapshot in loop.bucket.values())


@pytest.mark.parametrize(("before", "after"), [(4, 1), (6, 2), (8, 3), (3, 1), (5, 0)])
def test_a_new_version_with_far_fewer_replicas_gets_through(before: int, after: int) -> None:
    """The many old ones are beyond the surge of the few new ones, and wait for a new one to serve."""
    loop = Loop(PureHost("host-1", cpus=20))
    loop.done(deploy(num=before))
    goal_id = loop.command(deploy(num=after, version="v2")).goal_id
    while loop.goal_status(goal_id) is GoalStatus.PENDING and loop.now < 1_000_100.0:
        loop.step()
        assert len(loop.routed() & loop.running()) >= after
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED
    check_converged(loop)


def test_a_bad_version_with_fewer_replicas_takes_none_of_the_old_ones_away() -> None:
    loop = Loop(PureHost("host-1", cpus=20))
    loop.done(deploy(num=4))
    old = loop.running()
    goal_id = loop.command(deploy(num=1, version="v2", code=BAD_CODE)).goal_id
    while loop.goal_status(goal_id) is GoalStatus.PENDING and loop.now < 1_000_100.0:
        loop.step()
        assert loop.running() >= old
    assert loop.goal_status(goal_id) is GoalStatus.FAILED


# Rollouts that meet what is left of others: found by looking for states that a plan does not come out of.


def test_what_a_failed_update_leaves_of_an_unfinished_one_is_of_one_version_each() -> None:
    host = PureHost("host-1", cpus=40)
    host.raises_at = {"bad"}
    loop = Loop(host)
    loop.done(deploy("a", num=4, max_surge_percent=50.0))
    loop.ask(deploy("a", num=4, version="v2", config="good", max_surge_percent=50.0))
    loop.steps(2)
    loop.ask(UpdateBackendConfig(backend_tag="a", config={"user_config": "bad"}))
    loop.settle()
    check_converged(loop)
    assert {(r.code_version, r.config_version) for r in loop.replicas().values()} <= {
        (v.code_version, v.config_version) for v in loop.backend().versions()
    }


def test_what_took_a_config_that_kills_later_is_of_one_version_each() -> None:
    host = PureHost("host-1", cpus=40)
    host.dies_at = {"bad"}
    loop = Loop(host)
    loop.done(deploy("a", num=4, config="good"))
    loop.ask(deploy("a", num=4, version="v2", config="other", max_surge_percent=100.0))
    loop.steps(1)
    loop.ask(UpdateBackendConfig(backend_tag="a", config={"user_config": "bad"}))
    loop.settle()
    check_converged(loop)


def test_a_drain_ends_though_starts_failed_now_and_then() -> None:
    first, second = PureHost("host-1", cpus=4), PureHost("host-2", cpus=4)
    loop = Loop(first)
    loop.done(deploy("a", num=4))
    loop.hosts.append(second)
    second.is_up = True
    loop.steps(2)
    goal = loop.ask(DrainHost(host_id="host-1")).goal_id
    for _ in range(6):
        loop.step(0.5)
        for tag in sorted(second.running())[:1]:
            second.kill(tag)
    loop.settle(limit=300, seconds=1.0)
    assert loop.goal_status(goal) is GoalStatus.SUCCEEDED


def test_starts_that_a_leaving_host_never_made_do_not_fail_the_goal() -> None:
    leaving = PureHost("host-1", cpus=8)
    loop = Loop(leaving)
    goal = loop.ask(deploy("a", num=4)).goal_id
    loop.step()
    leaving.held.clear()  # it was told to leave just before it heard its goal
    leaving.is_leaving = True
    loop.hosts.append(PureHost("host-2", cpus=8))
    loop.steps(3)
    assert loop.backend().start_failures == 0
    loop.settle()
    assert loop.goal_status(goal) is GoalStatus.SUCCEEDED


def test_a_silence_is_over_exactly_at_the_time_that_was_planned_for_it() -> None:
    host = PureHost("host-1")
    for number in range(1000):
        last_seen_at = 1_700_000_000.0 + number * 0.1
        observed = observe_host(ObservedState(since=last_seen_at), host.report(), last_seen_at)
        at = silent_at(observed, observed.hosts[host.host_id], HOST_LOST_AFTER_S)
        assert at is not None
        assert host_status(observed, host.host_id, at) is HostStatus.LOST


def test_less_than_the_smallest_share_of_a_resource_that_no_host_has_is_placed() -> None:
    loop = Loop(is_checked=False)
    loop.done(deploy("a", gpus=0.00001))
    check_converged(loop)


# An update that fails: it stops, the old version serves on, and what becomes of the new one is the user's choice.


def half_good(**options: object) -> tuple[Loop, str]:
    """A loop in which some of eight replicas run v2, and no more of them would start any more; and its goal."""
    loop = Loop(PureHost("host-1", cpus=6), PureHost("host-2", cpus=6))
    loop.done(deploy(num=8, config="old"))
    goal_id = loop.command(deploy(num=8, version="v2", config="new", **options)).goal_id
    while loop.user_configs().count("old") > 5:
        loop.step()
    for host in loop.hosts:
        host.dies_at = {"new"}
    loop.steps(150, 0.2)
    assert goal_id is not None
    return loop, goal_id


def test_an_update_stops_at_the_failure_threshold_and_keeps_the_old_version() -> None:
    loop, goal_id = half_good()
    assert loop.goal_status(goal_id) is GoalStatus.FAILED
    assert loop.backend().target.version == "v1"
    assert len(loop.routed() & loop.running()) == 8


def test_by_default_replicas_of_the_new_version_that_serve_are_kept() -> None:
    loop, _ = half_good()
    loop.settle()
    kept = loop.user_configs().count("new")
    assert kept >= 3
    assert loop.user_configs().count("old") == 8 - kept
    view = view_deployment(loop.checkpoint, "a")
    assert view.status is DeploymentStatus.HEALTHY
    assert f"{kept} replicas of version v2 are kept" in view.message
    check_converged(loop)


def test_on_request_replicas_of_the_new_version_go_back_too() -> None:
    loop, _ = half_good(on_failure="go_back")
    loop.settle()
    assert loop.user_configs() == ["old"] * 8
    assert view_deployment(loop.checkpoint, "a").message.startswith("the last change failed and was undone")
    check_converged(loop)


def test_what_is_kept_never_makes_more_than_are_wanted() -> None:
    """One new one came up beside all of the old ones: the newest goes, so all are old ones again."""
    loop = Loop(PureHost("host-1", cpus=6), PureHost("host-2", cpus=6))
    loop.done(deploy(num=8, config="old"))
    loop.hosts[1].dies_at = {"new"}
    goal_id = loop.command(deploy(num=8, version="v2", config="new")).goal_id
    loop.steps(150, 0.2)
    assert loop.goal_status(goal_id) is GoalStatus.FAILED
    assert loop.user_configs() == ["old"] * 8
    check_converged(loop)


def test_while_it_goes_back_never_fewer_than_the_budget_serve() -> None:
    loop = Loop(PureHost("host-1", cpus=20), PureHost("host-2", cpus=20))
    loop.done(deploy(num=8, config="old"))
    loop.hosts[1].dies_at = {"new"}
    loop.command(deploy(num=8, version="v2", config="new", on_failure="go_back"))
    for _ in range(150):
        loop.step(0.2)
        assert len(loop.routed() & loop.running()) >= 8
    assert loop.user_configs() == ["old"] * 8


def test_a_kept_replica_that_dies_is_replaced_by_the_old_version() -> None:
    loop, _ = half_good()
    loop.settle()
    for host in loop.hosts:
        for tag in sorted(host.running()):
            if host.user_config[tag] == "new":
                host.kill(tag)
    loop.steps(100, 0.5)
    assert loop.user_configs() == ["old"] * 8
    assert loop.backend().retained is None
    check_converged(loop)


def test_the_next_update_replaces_kept_replicas_like_old_ones() -> None:
    loop, _ = half_good()
    loop.settle()
    loop.done(deploy(num=8, version="v3", config="newest"))
    assert loop.user_configs() == ["newest"] * 8
    check_converged(loop)


def test_a_kept_replica_counts_when_the_backend_is_scaled() -> None:
    loop, _ = half_good()
    loop.settle()
    kept = loop.user_configs().count("new")
    loop.done(UpdateBackendConfig(backend_tag="a", config={"num_replicas": 9}))
    assert (loop.user_configs().count("new"), len(loop.user_configs())) == (kept, 9)
    assert loop.ask(UpdateBackendConfig(backend_tag="a", config={"num_replicas": 9})).updating is False
    loop.done(UpdateBackendConfig(backend_tag="a", config={"num_replicas": 1}))
    assert len(loop.running()) == 1
    check_converged(loop)


def test_deploying_the_old_version_again_replaces_what_was_kept() -> None:
    loop, _ = half_good()
    loop.settle()
    loop.done(UpdateBackendConfig(backend_tag="a", config={"num_replicas": 9}))
    assert "new" in loop.user_configs()
    loop.done(deploy(num=9, config="old"))
    assert loop.user_configs() == ["old"] * 9
    check_converged(loop)


def test_a_new_config_reaches_every_replica_also_kept_ones() -> None:
    loop, _ = half_good()
    loop.settle()
    for host in loop.hosts:
        host.dies_at = set()
    loop.done(UpdateBackendConfig(backend_tag="a", config={"user_config": "better"}))
    assert loop.user_configs() == ["better"] * 8
    check_converged(loop)


def test_after_a_refused_config_replicas_that_took_it_keep_it() -> None:
    loop = Loop(PureHost("host-1", cpus=3), PureHost("host-2", cpus=3))
    loop.done(deploy(num=6, config="one"))
    before = loop.running()
    loop.hosts[1].raises_at = {"two"}
    goal_id = loop.command(deploy(num=6, config="two")).goal_id
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.FAILED
    assert "no such config" in loop.goal(goal_id).error
    assert loop.running() == before
    assert set(loop.user_configs()) == {"one", "two"}
    assert loop.backend().target.backend_config.user_config == "one"
    check_converged(loop)


@pytest.mark.parametrize("on_failure", ["keep", "go_back"])
@pytest.mark.parametrize("num", [1, 4])
def test_a_version_that_never_starts_costs_the_old_one_nothing(on_failure: str, num: int) -> None:
    loop = Loop(PureHost("host-1", cpus=8))
    loop.done(deploy(num=num, route="/old"))
    old = loop.running()
    goal_id = loop.command(
        deploy(num=num, version="v2", code=BAD_CODE, route="/new", on_failure=on_failure)
    ).goal_id
    while loop.goal_status(goal_id) is GoalStatus.PENDING:
        loop.step()
        assert loop.routed() >= old
    loop.settle()
    assert loop.goal(goal_id).error == "RuntimeError: no"
    assert loop.running() == old
    assert view_deployment(loop.checkpoint, "a").route_prefix == "/old", "the route goes back too"
    check_converged(loop)


@pytest.mark.parametrize("retries", [1, 3, 5])
def test_constructor_failures_are_bounded(retries: int) -> None:
    loop = Loop(PureHost("host-1", cpus=8))
    goal_id = loop.command(deploy(code=BAD_CODE, retries=retries)).goal_id
    loop.steps(300, 0.5)
    assert loop.goal_status(goal_id) is GoalStatus.FAILED
    assert loop.checkpoint.counters.ordinal == retries, "so many were started, and no more ever after"
    assert loop.states() == []


def test_a_constructor_that_fails_now_and_then_does_not_fail_the_goal() -> None:
    loop = Loop(PureHost("host-1", cpus=8))
    loop.hosts[0].dies_at = {"flaky"}
    goal_id = loop.command(deploy(config="flaky", retries=3)).goal_id
    loop.steps(2)
    loop.hosts[0].dies_at = set()
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED
    assert loop.states() == [ReplicaState.RUNNING]


def test_a_start_with_the_former_configuration_that_fails_does_not_fail_the_change_that_mends_it() -> None:
    loop = Loop(PureHost("host-1", cpus=8))
    loop.hosts[0].hangs_in_starting = True
    loop.command(deploy(config="bad", retries=1))
    loop.steps(2)
    assert loop.states() == [ReplicaState.STARTING]
    goal_id = loop.command(deploy(config="good", retries=1)).goal_id
    loop.step()
    loop.hosts[0].hangs_in_starting = False
    for tag in loop.replicas():
        loop.hosts[0].kill(tag)
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED, loop.goal(goal_id).error
    assert loop.user_configs() == ["good"]


# The one table of a replica's life.


def test_every_state_has_its_moves_and_nothing_leaves_the_end() -> None:
    assert set(TRANSITIONS) == set(ReplicaState)
    assert TRANSITIONS[ReplicaState.STOPPED] == {}
    assert {event for moves in TRANSITIONS.values() for event in moves} == set(TransitionEvent)


@pytest.mark.parametrize("state", [state for state in ReplicaState if state is not ReplicaState.STOPPED])
def test_whatever_lives_can_be_gone(state: ReplicaState) -> None:
    assert moved(state, TransitionEvent.GONE) is ReplicaState.STOPPED


@pytest.mark.parametrize("state", sorted(WANTED, key=lambda s: s.value))
def test_whatever_is_wanted_can_be_unwanted_and_is_never_wanted_again(state: ReplicaState) -> None:
    stopping = moved(state, TransitionEvent.UNWANTED)
    found = {stopping}
    while True:
        more = found | {to for at in found for to in TRANSITIONS[at].values()}
        if more == found:
            break
        found = more
    assert not found & WANTED


def test_what_is_no_move_is_an_error_that_names_both() -> None:
    with pytest.raises(IllegalTransition, match="placed cannot happen in running"):
        moved(ReplicaState.RUNNING, TransitionEvent.PLACED)


def test_what_is_routed_runs_and_what_drains_is_not_routed() -> None:
    assert ROUTED <= IN_HOST_GOAL <= WANTED
    assert not ROUTED & DRAINING
