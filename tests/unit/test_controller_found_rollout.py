"""Rollouts that meet what is left of others: found by looking for states that a plan does not come out of."""

from __future__ import annotations

from serve_common.api.commands import DrainHost, UpdateBackendConfig
from serve_common.api.views import GoalStatus
from serve_controller.core.observed import (
    HOST_LOST_AFTER_S,
    HostStatus,
    ObservedState,
    host_status,
    observe_host,
    silent_at,
)
from tests.simulation.closed_loop import Loop, check_converged
from tests.simulation.orders import deploy
from tests.simulation.pure_host import PureHost


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
        heard_at = 1_700_000_000.0 + number * 0.1
        observed = observe_host(ObservedState(since=heard_at), host.report(), heard_at)
        at = silent_at(observed, observed.hosts[host.host_id], HOST_LOST_AFTER_S)
        assert at is not None
        assert host_status(observed, host.host_id, at) is HostStatus.LOST


def test_less_than_the_smallest_share_of_a_resource_that_no_host_has_is_placed() -> None:
    loop = Loop(is_checked=False)
    loop.done(deploy("a", gpus=0.00001))
    check_converged(loop)
