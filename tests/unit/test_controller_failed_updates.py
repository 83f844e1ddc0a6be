"""An update that fails: it stops, the old version serves on, and what becomes of the new one is the user's choice."""

from __future__ import annotations

import pytest

from serve_common.api.commands import UpdateBackendConfig
from serve_common.api.views import DeploymentStatus, GoalStatus
from serve_controller.core.objects import ReplicaState
from serve_controller.core.views import view_deployment
from tests.simulation.closed_loop import Loop, check_converged
from tests.simulation.orders import BAD_CODE, deploy
from tests.simulation.pure_host import PureHost


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
    assert loop.backend().kept is None
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
