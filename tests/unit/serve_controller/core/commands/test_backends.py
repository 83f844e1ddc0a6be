"""Backends by themselves: create, update, delete."""

from __future__ import annotations

import pytest

from serve_common.api.commands import (
    DeleteBackend,
    DeleteDeployment,
    DeleteEndpoint,
    Rollback,
    SetTraffic,
    ShadowTraffic,
    UpdateBackendConfig,
)
from serve_common.api.views import DeploymentStatus, GoalStatus
from serve_common.errors import BadField, Conflict, LimitReached, NotFound
from serve_controller.core import goals
from serve_controller.core.commands import changes
from serve_controller.core.objects import ReplicaState
from serve_controller.core.views.backends import view_backend_config, view_backends, view_revisions
from serve_controller.core.views.deployments import view_deployment, view_deployments, view_endpoints
from tests.support.control_loop.closed_loop import Loop, check_converged
from tests.support.control_loop.orders import BAD_CODE, create_backend, create_endpoint, deploy
from tests.support.control_loop.pure_host import PureHost

# -- create ------------------------------------------------------------------------------------------------------------


def test_a_backend_is_made_and_is_no_deployment() -> None:
    loop = Loop()
    reply = loop.ask(create_backend("b", num=2))
    assert reply.updating
    loop.settle()
    assert loop.goal_status(reply.goal_id) is GoalStatus.SUCCEEDED
    (view,) = view_backends(loop.checkpoint)
    assert (view.backend_tag, view.status, len(view.replicas)) == ("default/b", DeploymentStatus.HEALTHY, 2)
    assert view_deployments(loop.checkpoint) == []
    assert view_endpoints(loop.checkpoint) == []
    check_converged(loop)


def test_the_same_configs_again_are_a_success_with_no_new_goal() -> None:
    loop = Loop()
    first = loop.ask(create_backend("b"))
    for _ in range(2):
        again = loop.command(create_backend("b"))
        assert not again.changes
        assert (again.reply.goal_id, again.reply.updating) == (first.goal_id, False)
        loop.settle()
    assert len(loop.checkpoint.goals) == 1


@pytest.mark.parametrize("different", [{"num": 2}, {"code": "other:Code"}, {"user_config": "x"}], ids=str)
def test_different_configs_replace_the_goal_and_who_waited_for_the_old_one_is_told(
    different: dict[str, object],
) -> None:
    loop = Loop()
    first = loop.ask(create_backend("b"))
    second = loop.ask(create_backend("b", **different))
    assert second.goal_id != first.goal_id
    assert loop.goal_status(first.goal_id) is GoalStatus.SUPERSEDED
    assert str(second.goal_id) in loop.goal(first.goal_id).error
    loop.settle()
    assert loop.goal_status(second.goal_id) is GoalStatus.SUCCEEDED
    check_converged(loop)


def test_a_backend_that_failed_is_tried_again_by_the_same_configs() -> None:
    loop = Loop()
    first = loop.ask(create_backend("b", code=BAD_CODE))
    loop.settle()
    assert loop.goal_status(first.goal_id) is GoalStatus.FAILED
    again = loop.ask(create_backend("b", code=BAD_CODE))
    assert again.updating
    assert again.goal_id != first.goal_id


def test_a_backend_while_it_is_deleted_can_be_made_anew() -> None:
    loop = Loop()
    loop.done(create_backend("b"))
    deleted = loop.ask(DeleteBackend(backend_tag="b"))
    loop.step()
    made = loop.ask(create_backend("b"))
    assert loop.goal_status(deleted.goal_id) is GoalStatus.SUPERSEDED
    loop.settle()
    assert loop.goal_status(made.goal_id) is GoalStatus.SUCCEEDED
    check_converged(loop)


def test_a_deployments_backend_is_not_taken_over() -> None:
    loop = Loop()
    loop.done(deploy("a"))
    with pytest.raises(Conflict, match="'default/a' is a deployment's; use deploy or update_backend_config"):
        loop.command(create_backend("a"))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"name": "a/b/c"}, "backend_tag"),
        ({"num": -1}, "backend_config.num_replicas"),
        ({"code": "nothing"}, "replica_config.import_path"),
        ({"cpus": -1.0}, "replica_config.ray_actor_options.num_cpus"),
    ],
    ids=str,
)
def test_a_bad_value_is_refused_with_its_path(options: dict[str, object], field: str) -> None:
    with pytest.raises(BadField) as refused:
        Loop().command(create_backend(**options))
    assert refused.value.field == field


def test_backends_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    monkeypatch.setattr(changes, "NUM_BACKENDS_MAX", 1)
    loop.command(create_backend("b"))
    with pytest.raises(LimitReached):
        loop.command(create_backend("c"))
    loop.command(create_backend("b", num=2))


# -- delete ------------------------------------------------------------------------------------------------------------


def test_deleting_an_unknown_backend_is_a_success_without_a_goal() -> None:
    loop = Loop()
    accepted = loop.command(DeleteBackend(backend_tag="nobody"))
    assert (accepted.reply.goal_id, accepted.reply.updating, bool(accepted.changes)) == (None, False, False)
    assert not loop.checkpoint.goals


def test_a_backend_in_use_by_traffic_or_shadows_is_not_deleted_and_the_endpoint_is_named() -> None:
    loop = Loop()
    for name in ("b", "c"):
        loop.done(create_backend(name))
    loop.done(create_endpoint("e", b=1.0))
    with pytest.raises(Conflict, match="'default/b' is used by the endpoint 'default/e'"):
        loop.command(DeleteBackend(backend_tag="b"))
    loop.done(ShadowTraffic(endpoint="e", backend_tag="c", proportion=0.1))
    with pytest.raises(Conflict, match="'default/c' is used by the endpoint 'default/e'"):
        loop.command(DeleteBackend(backend_tag="c", force_kill=True))
    loop.done(ShadowTraffic(endpoint="e", backend_tag="c", proportion=0))
    loop.done(DeleteBackend(backend_tag="c"))
    loop.done(DeleteEndpoint(endpoint="e"))
    loop.done(DeleteBackend(backend_tag="b"))
    assert loop.running("default/b") == set()
    assert view_backends(loop.checkpoint) == []


def test_a_backend_that_traffic_may_go_back_to_is_still_in_use() -> None:
    """Until proxies know the new weights, requests go there."""
    loop = Loop()
    for name in ("b", "c"):
        loop.done(create_backend(name))
    loop.done(create_endpoint("e", b=1.0))
    loop.are_proxies_slow = True
    loop.ask(SetTraffic(endpoint="e", weights={"c": 1.0}))
    loop.steps(3)
    with pytest.raises(Conflict, match="default/e"):
        loop.command(DeleteBackend(backend_tag="b"))
    loop.are_proxies_slow = False
    loop.settle()
    loop.done(DeleteBackend(backend_tag="b"))


def test_a_deployments_own_endpoint_keeps_its_backend_from_being_deleted_alone() -> None:
    loop = Loop()
    loop.done(deploy("a"))
    with pytest.raises(Conflict, match="'default/a' is used by the endpoint 'default/a'"):
        loop.command(DeleteBackend(backend_tag="a"))


def test_a_second_delete_answers_the_same_goal() -> None:
    loop = Loop()
    loop.done(create_backend("b"))
    first = loop.ask(DeleteBackend(backend_tag="b"))
    again = loop.command(DeleteBackend(backend_tag="b"))
    assert (again.reply.goal_id, bool(again.changes)) == (first.goal_id, False)


# -- update ------------------------------------------------------------------------------------------------------------


def test_an_update_merges_only_the_fields_given() -> None:
    loop = Loop()
    loop.done(create_backend("b", num=2, max_queued_requests=7, user_config="x"))
    before = loop.running("default/b")
    loop.done(UpdateBackendConfig(backend_tag="b", config={"num_replicas": 3}))
    config = view_backend_config(loop.checkpoint, "b").backend_config
    assert (config.num_replicas, config.max_queued_requests, config.user_config) == (3, 7, "x")
    assert before < loop.running("default/b")


def test_an_update_that_changes_nothing_makes_no_goal() -> None:
    loop = Loop()
    goal_id = loop.done(create_backend("b", num=2))
    again = loop.command(UpdateBackendConfig(backend_tag="b", config={"num_replicas": 2}))
    assert (again.reply.goal_id, again.reply.updating, bool(again.changes)) == (goal_id, False, False)
    assert not loop.command(UpdateBackendConfig(backend_tag="b", config={})).changes


@pytest.mark.parametrize("name", ["nobody", "gone"])
def test_an_unknown_backend_is_not_updated(name: str) -> None:
    loop = Loop()
    loop.done(create_backend("gone"))
    loop.command(DeleteBackend(backend_tag="gone"))
    with pytest.raises(NotFound, match=f"there is no backend '{name}'"):
        loop.command(UpdateBackendConfig(backend_tag=name, config={"num_replicas": 1}))


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"num_replica": 1}, "config.num_replica"),
        ({"num_replicas": "3"}, "config.num_replicas"),
        ({"num_replicas": None}, "config.num_replicas"),
        ({"num_replicas": -1}, "config.num_replicas"),
        ({"placement": "heap"}, "config.placement"),
        ({"max_surge_percent": 0}, "config.max_surge_percent"),
    ],
    ids=str,
)
def test_the_whole_is_validated_and_nothing_changes(config: dict[str, object], field: str) -> None:
    """The last one is valid by itself, and not together with what is there."""
    loop = Loop()
    loop.done(create_backend("b", max_unavailable_percent=0.0))
    before = view_backend_config(loop.checkpoint, "b")
    with pytest.raises(BadField) as refused:
        loop.command(UpdateBackendConfig(backend_tag="b", config=config))
    assert refused.value.field == field
    assert view_backend_config(loop.checkpoint, "b") == before


def test_a_changed_user_config_reconfigures_in_place() -> None:
    loop = Loop(PureHost("host-1", cpus=8))
    loop.done(create_backend("b", num=4, user_config="one"))
    before = loop.running("default/b")
    loop.done(UpdateBackendConfig(backend_tag="b", config={"user_config": "two"}))
    assert loop.running("default/b") == before
    assert loop.user_configs("default/b") == ["two"] * 4


@pytest.mark.parametrize(
    "config", [{"num_replicas": 5}, {"max_queued_requests": 3}, {"max_surge_percent": 100.0}], ids=str
)
def test_a_light_change_touches_no_replica(config: dict[str, object]) -> None:
    loop = Loop(PureHost("host-1", cpus=8))
    loop.done(create_backend("b", num=4))
    before = loop.replicas("default/b")
    loop.done(UpdateBackendConfig(backend_tag="b", config=config))
    after = loop.replicas("default/b")
    assert {tag: after[tag] for tag in before} == before, "not even its record"


def test_an_update_while_another_is_pending_builds_on_it() -> None:
    loop = Loop()
    loop.done(create_backend("b"))
    first = loop.ask(UpdateBackendConfig(backend_tag="b", config={"num_replicas": 3}))
    second = loop.ask(UpdateBackendConfig(backend_tag="b", config={"user_config": "x"}))
    assert loop.goal_status(first.goal_id) is GoalStatus.SUPERSEDED
    loop.settle()
    assert loop.goal_status(second.goal_id) is GoalStatus.SUCCEEDED
    assert loop.user_configs("default/b") == ["x"] * 3


def test_scaling_to_none_and_back() -> None:
    loop = Loop()
    loop.done(create_backend("b", num=2))
    loop.done(UpdateBackendConfig(backend_tag="b", config={"num_replicas": 0}))
    assert loop.replicas("default/b") == {}
    loop.done(UpdateBackendConfig(backend_tag="b", config={"num_replicas": 2}))
    assert loop.states("default/b") == [ReplicaState.RUNNING] * 2


def test_the_config_of_an_unknown_backend_is_not_found() -> None:
    with pytest.raises(NotFound, match="there is no backend 'default/x'"):
        view_backend_config(Loop().checkpoint, "x")


# `rollback`: a deployment or backend becomes again what it was.


@pytest.fixture
def loop() -> Loop:
    """A deployment that was v1, then v2, and is v3."""
    loop = Loop(PureHost("host-1", cpus=8))
    for number in (1, 2, 3):
        loop.done(deploy(version=f"v{number}", code=f"m:V{number}", config=f"c{number}", route=f"/r{number}"))
    return loop


def now(loop: Loop) -> tuple[str | None, str, object, str | None]:
    view = view_deployment(loop.checkpoint, "a")
    config = view.backend_config.user_config
    return view.version, view.replica_config.import_path, config, view.route_prefix


def test_without_a_target_it_goes_to_what_last_succeeded_before_the_present(loop: Loop) -> None:
    loop.done(Rollback(name="a"))
    assert now(loop) == ("v2", "m:V2", "c2", "/r2")
    assert loop.user_configs() == ["c2"]
    check_converged(loop)


def test_it_goes_to_a_version_by_its_name(loop: Loop) -> None:
    loop.done(Rollback(name="a", to="v1"))
    assert now(loop) == ("v1", "m:V1", "c1", "/r1")


def test_it_goes_to_a_revision_by_its_number(loop: Loop) -> None:
    numbers = {r.version: r.revision for r in view_revisions(loop.checkpoint, "a")}
    loop.done(Rollback(name="a", to=numbers["v2"]))
    assert now(loop) == ("v2", "m:V2", "c2", "/r2")


def test_a_failed_version_is_never_gone_to(loop: Loop) -> None:
    failed = loop.ask(deploy(version="v4", code=BAD_CODE, route="/r4"))
    loop.settle()
    assert loop.goal_status(failed.goal_id) is GoalStatus.FAILED
    assert "v4" not in {r.version for r in view_revisions(loop.checkpoint, "a")}
    loop.done(Rollback(name="a"))
    assert now(loop)[0] == "v2", "v3 was put back by the failure: before it was v2"


def test_a_bad_update_under_way_is_rolled_back_without_waiting_for_its_end(loop: Loop) -> None:
    before = loop.running()
    pending = loop.ask(deploy(version="v4", code=BAD_CODE, retries=100, config="c3", route="/r3"))
    loop.steps(5)
    back = loop.ask(Rollback(name="a"))
    assert loop.goal_status(pending.goal_id) is GoalStatus.SUPERSEDED
    loop.settle()
    assert loop.goal_status(back.goal_id) is GoalStatus.SUCCEEDED
    assert now(loop)[0] == "v3"
    assert len(loop.running()) == len(before)


def test_the_number_of_replicas_stays_as_it_is(loop: Loop) -> None:
    """Who rolls back a bad version at night, after having scaled up for the load, must not be scaled down with it."""
    loop.done(UpdateBackendConfig(backend_tag="a", config={"num_replicas": 4}))
    loop.done(Rollback(name="a", to="v1"))
    assert now(loop)[0] == "v1"
    assert len(loop.running()) == 4


def test_scaling_alone_is_no_version_to_go_back_from(loop: Loop) -> None:
    loop.done(UpdateBackendConfig(backend_tag="a", config={"num_replicas": 4}))
    loop.done(Rollback(name="a"))
    assert now(loop)[0] == "v2"


def test_a_changed_user_config_is_rolled_back_in_place() -> None:
    loop = Loop()
    loop.done(deploy(config="one"))
    loop.done(deploy(config="two"))
    before = loop.running()
    loop.done(Rollback(name="a"))
    assert loop.user_configs() == ["one"]
    assert loop.running() == before


def test_an_unversioned_deployment_is_rolled_back_by_new_replicas() -> None:
    """Other files may have stood under the same import path."""
    loop = Loop()
    loop.done(deploy(version=None, config="one"))
    loop.done(deploy(version=None, config="two"))
    before = loop.running()
    loop.done(Rollback(name="a"))
    assert loop.user_configs() == ["one"]
    assert not before & loop.running()


def test_a_rollback_is_rolled_back_by_another(loop: Loop) -> None:
    loop.done(Rollback(name="a"))
    loop.done(Rollback(name="a"))
    assert now(loop)[0] == "v3"


def test_a_retry_of_a_rollback_does_not_go_back_twice(loop: Loop) -> None:
    first = loop.ask(Rollback(name="a", request_id="r1"))
    assert loop.ask(Rollback(name="a", request_id="r1")) == first
    loop.settle()
    assert not loop.command(Rollback(name="a", request_id="r1")).changes
    assert now(loop)[0] == "v2"


def test_going_to_where_it_is_already_is_nothing_to_do(loop: Loop) -> None:
    accepted = loop.command(Rollback(name="a", to="v3"))
    assert (accepted.reply.updating, bool(accepted.changes)) == (False, False)


def test_a_backend_by_itself_is_rolled_back_too() -> None:
    loop = Loop()
    loop.done(create_backend("b", code="m:Old"))
    loop.done(create_backend("b", code="m:New"))
    loop.done(Rollback(name="b"))
    assert loop.backend("default/b").target.replica_config.import_path == "m:Old"
    assert not loop.checkpoint.endpoints
    check_converged(loop)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (Rollback(name="nobody"), "there is no deployment or backend 'nobody'"),
        (
            Rollback(name="a", to="v9"),
            r"'default/a' has no revision 'v9'; it has 3 \(v3\), 2 \(v2\), 1 \(v1\)",
        ),
        (Rollback(name="a", to=99), "has no revision 99"),
    ],
    ids=["name", "version", "number"],
)
def test_what_is_unknown_is_not_found_and_what_there_is_is_named(
    loop: Loop, command: Rollback, message: str
) -> None:
    with pytest.raises(NotFound, match=message):
        loop.command(command)


def test_with_no_earlier_version_there_is_nothing_to_go_to() -> None:
    loop = Loop()
    loop.done(deploy())
    with pytest.raises(NotFound, match="has no earlier version that succeeded"):
        loop.command(Rollback(name="a"))
    with pytest.raises(BadField):
        loop.command(Rollback(name="a/b/c"))


def test_what_is_deleted_is_not_rolled_back(loop: Loop) -> None:
    loop.command(DeleteDeployment(name="a"))
    with pytest.raises(NotFound):
        loop.command(Rollback(name="a"))
    loop.settle()
    with pytest.raises(NotFound):
        loop.command(Rollback(name="a"))


def test_a_route_that_somebody_else_has_by_now_is_refused(loop: Loop) -> None:
    loop.done(deploy("b", route="/r2"))
    with pytest.raises(Conflict, match="to: '/r2' belongs to the endpoint 'default/b'"):
        loop.command(Rollback(name="a", to="v2"))


def test_revisions_are_remembered_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goals, "REVISIONS_MAX", 3)
    loop = Loop()
    for number in range(6):
        loop.done(create_backend("b", num=0, code=f"m:V{number}"))
    assert [r.import_path for r in view_revisions(loop.checkpoint, "b")] == ["m:V5", "m:V4", "m:V3"]
    loop.done(DeleteBackend(backend_tag="b"))
    assert not loop.checkpoint.revisions
