"""`deploy` and `delete_deployment`: what is accepted and what is refused; saying it twice changes nothing more."""

from __future__ import annotations

import msgspec
import pytest

from serve_common.api.commands import DeleteDeployment, SetTraffic, ShadowTraffic, UpdateBackendConfig
from serve_common.api.views import DeploymentStatus, GoalStatus
from serve_common.errors import BadField, Conflict, LimitReached, NotFound
from serve_common.names import BackendTag
from serve_controller.core import reconcile
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.commands import changes, decide
from serve_controller.core.views.deployments import view_deployment, view_deployments, view_snapshot
from tests.support.control_loop.closed_loop import Loop, check_converged
from tests.support.control_loop.orders import BAD_CODE, create_backend, create_endpoint, deploy
from tests.support.control_loop.pure_host import PureHost

# -- what a deploy makes -----------------------------------------------------------------------------------------------


def test_a_first_deploy_makes_a_backend_an_endpoint_and_a_goal() -> None:
    accepted = decide(Checkpoint(), deploy(route="/a/"), 5.0)
    after = Checkpoint().applied(accepted.changes)
    backend = after.backends[BackendTag("default/a")]
    assert (backend.target.code_version, backend.target.config_version, backend.last_good) == (1, 1, None)
    (endpoint,) = after.endpoints.values()
    assert endpoint.target.route == "/a"
    assert endpoint.target.traffic == {"default/a": 1.0}
    (goal,) = after.goals.values()
    assert (goal.status, goal.created_at) == (GoalStatus.PENDING, 5.0)
    assert accepted.reply == type(accepted.reply)(goal_id=goal.goal_id, updating=True)


def test_the_same_version_again_is_nothing_to_do_and_answers_the_same_goal() -> None:
    loop = Loop()
    first = loop.command(deploy())
    again = loop.command(deploy())
    assert not again.changes
    assert again.reply == type(again.reply)(goal_id=first.goal_id, updating=False)
    loop.settle()
    before = loop.running()
    assert not loop.command(deploy()).changes
    loop.settle()
    assert loop.running() == before


def test_without_a_version_every_deploy_is_a_new_one_unless_it_is_a_retry() -> None:
    loop = Loop()
    first = loop.ask(deploy(version=None, request_id="r1"))
    retry = loop.ask(deploy(version=None, request_id="r1"))
    assert retry == first, "a retry is answered as the first try was"
    assert loop.ask(deploy(version=None, request_id="r2")).goal_id != first.goal_id
    loop.settle()
    before = loop.running()
    loop.done(deploy(version=None))
    assert not before & loop.running(), "other code may stand behind the same path"


def test_a_retry_is_answered_with_its_goal_also_after_a_later_change() -> None:
    """The first answer was lost, somebody else changed it again, and only then the client tried again."""
    loop = Loop()
    first = loop.ask(deploy(version="v1", request_id="r1"))
    loop.done(deploy(version="v2", request_id="r2"))
    late = loop.command(deploy(version="v1", request_id="r1"))
    assert (late.reply.goal_id, bool(late.changes)) == (first.goal_id, False)
    assert loop.backend().target.version == "v2"


def test_a_request_id_of_another_deployment_is_no_retry() -> None:
    loop = Loop()
    first = loop.ask(deploy("a", request_id="r1"))
    assert loop.ask(deploy("b", request_id="r1")).goal_id != first.goal_id
    assert "default/b" in loop.checkpoint.backends


@pytest.mark.parametrize(
    ("change", "code", "config"),
    [
        ({"num": 3}, 1, 1),
        ({"max_queued_requests": 7}, 1, 1),
        ({"max_surge_percent": 50.0}, 1, 1),
        ({"placement": "pack"}, 1, 1),
        ({"max_replicas_per_host": 3}, 1, 1),
        ({"on_failure": "go_back"}, 1, 1),
        ({"config": "two"}, 1, 2),
        ({"max_concurrent_queries": 7}, 1, 2),
        ({"graceful_shutdown_timeout_s": 7.0}, 1, 2),
        ({"health_check_period_s": 7.0}, 1, 2),
        ({"version": "v2"}, 2, 2),
        ({"code": "other:Code"}, 2, 2),
        ({"cpus": 2.0}, 2, 2),
        ({"route": "/b"}, 1, 1),
    ],
    ids=str,
)
def test_a_change_costs_no_more_than_it_must(change: dict[str, object], code: int, config: int) -> None:
    """Nothing, a reconfiguration, or new replicas."""
    loop = Loop()
    loop.done(deploy())
    before = loop.running()
    loop.done(deploy(**change))
    target = loop.backend().target
    assert (target.code_version, target.config_version) == (code, config)
    assert (before <= loop.running()) == (code == 1)
    check_converged(loop)


# -- one after another -------------------------------------------------------------------------------------------------


def test_calling_off_an_update_keeps_the_replicas_that_still_run() -> None:
    loop = Loop()
    loop.done(deploy(version="v1", num=2))
    before = loop.running()
    loop.command(deploy(version="v2", num=2, code=BAD_CODE))
    loop.done(deploy(version="v1", num=2))
    assert loop.running() == before, "what never stopped serving need not start again"


def test_a_newer_deploy_supersedes_the_pending_one() -> None:
    loop = Loop()
    first = loop.command(deploy(num=1))
    second = loop.command(deploy(num=2))
    assert loop.goal_status(first.goal_id) is GoalStatus.SUPERSEDED
    assert str(second.goal_id) in loop.goal(first.goal_id).error


def test_a_deploy_while_a_delete_waits_for_proxies_supersedes_it() -> None:
    """The delete's backend is gone already, and its goal must not wait for the new deployment's replicas to stop."""
    loop = Loop()
    loop.done(deploy())
    loop.are_proxies_slow = True
    deleted = loop.command(DeleteDeployment(name="a"))
    loop.steps(10)
    assert not loop.checkpoint.backends
    assert loop.goal_status(deleted.goal_id) is GoalStatus.PENDING
    loop.command(deploy(version="v2"))
    assert loop.goal_status(deleted.goal_id) is GoalStatus.SUPERSEDED
    loop.are_proxies_slow = False
    loop.settle()
    check_converged(loop)


def test_the_version_that_serves_deployed_again_after_a_failure_is_not_answered_with_the_failure() -> None:
    loop = Loop()
    loop.done(deploy())
    before = loop.running()
    failed = loop.command(deploy(version="v2", code=BAD_CODE))
    loop.settle()
    assert loop.goal_status(failed.goal_id) is GoalStatus.FAILED
    again = loop.done(deploy())
    assert again != failed.goal_id
    assert loop.running() == before, "it costs no replica"


def test_what_failed_is_tried_again_when_it_is_deployed_again() -> None:
    loop = Loop()
    loop.done(deploy())
    loop.command(deploy(version="v2", code=BAD_CODE))
    loop.settle()
    again = loop.ask(deploy(version="v2", code=BAD_CODE))
    assert again.updating
    loop.settle()
    assert loop.goal_status(again.goal_id) is GoalStatus.FAILED


def test_what_was_deleted_does_not_come_back_when_the_next_deploy_fails() -> None:
    loop = Loop(PureHost("host-1", cpus=8))
    loop.done(deploy(num=2, route="/old"))
    loop.command(DeleteDeployment(name="a"))
    failed = loop.command(deploy(version="v2", code=BAD_CODE, route="/new"))
    loop.settle()
    assert loop.goal_status(failed.goal_id) is GoalStatus.FAILED
    assert loop.backend().halted
    assert loop.running() == set()


def test_a_deleted_deployment_deployed_again_as_it_was_serves_again() -> None:
    loop = Loop(PureHost("host-1", cpus=8))
    loop.done(deploy(num=2, route="/a"))
    loop.command(DeleteDeployment(name="a"))
    loop.step()
    loop.done(deploy(num=2, route="/a"))
    check_converged(loop)


# -- delete ------------------------------------------------------------------------------------------------------------


def test_deleting_what_is_not_there_or_already_goes_is_a_success_without_a_change() -> None:
    loop = Loop()
    nobody = loop.ask(DeleteDeployment(name="nobody"))
    assert (nobody.goal_id, nobody.updating) == (None, False)
    loop.command(deploy())
    first = loop.command(DeleteDeployment(name="a"))
    again = loop.command(DeleteDeployment(name="a"))
    assert (again.reply.goal_id, bool(again.changes)) == (first.goal_id, False)


def test_a_retry_of_a_delete_whose_replicas_are_gone_waits_for_the_proxies_too() -> None:
    loop = Loop()
    loop.done(deploy())
    loop.are_proxies_slow = True
    first = loop.ask(DeleteDeployment(name="a"))
    loop.steps(10)
    assert not loop.checkpoint.backends
    again = loop.ask(DeleteDeployment(name="a"))
    assert (again.goal_id, again.updating) == (first.goal_id, True)


def test_what_is_deleted_leaves_the_routes_before_its_replicas_stop() -> None:
    loop = Loop()
    loop.done(deploy(num=2, route="/a"))
    loop.hosts[0].hangs_in_draining = loop.hosts[1].hangs_in_draining = True
    loop.command(DeleteDeployment(name="a"))
    loop.steps(3)
    assert loop.bucket["endpoints.default.a"].content is None
    assert sum(len(host.held) for host in loop.hosts) == 2


def test_a_deployment_whose_backend_serves_another_endpoint_is_not_deleted() -> None:
    loop = Loop()
    loop.done(deploy())
    loop.done(create_endpoint("canary", a=1.0))
    with pytest.raises(Conflict, match="'default/a' is used by the endpoint 'default/canary'"):
        loop.command(DeleteDeployment(name="a"))


# `deploy` and `delete_deployment` that are refused: by `prev_version`, names, routes, values and limits.


# -- prev_version ------------------------------------------------------------------------------------------------------


def test_prev_version_must_be_the_one_that_is_deployed_and_both_are_named() -> None:
    loop = Loop()
    loop.done(deploy(version="v1"))
    with pytest.raises(Conflict, match="prev_version: 'v0' was expected, and 'v1' is deployed"):
        loop.command(deploy(version="v2", prev_version="v0"))
    assert loop.ask(deploy(version="v2", prev_version="v1")).updating
    with pytest.raises(Conflict, match="'v1' was expected, and 'v2' is deployed"):
        loop.command(deploy(version="v3", prev_version="v1"))


def test_prev_version_of_an_unversioned_one_or_of_none_at_all_is_refused() -> None:
    loop = Loop()
    with pytest.raises(Conflict, match="'v1' was expected, and nothing is deployed"):
        loop.command(deploy(prev_version="v1"))
    loop.done(deploy(version=None))
    with pytest.raises(Conflict, match="'v1' was expected, and an unversioned one is deployed"):
        loop.command(deploy(prev_version="v1"))
    loop.command(DeleteDeployment(name="a"))
    with pytest.raises(Conflict, match="nothing is deployed"):
        loop.command(deploy(prev_version="v1"))


def test_a_retry_of_a_deploy_with_prev_version_is_answered_as_the_first_was() -> None:
    loop = Loop()
    loop.done(deploy(version="v1"))
    first = loop.ask(deploy(version="v2", prev_version="v1", request_id="r"))
    assert loop.ask(deploy(version="v2", prev_version="v1", request_id="r")) == first


# -- names and routes --------------------------------------------------------------------------------------------------


def test_a_route_belongs_to_one_endpoint() -> None:
    loop = Loop()
    loop.command(deploy("a", route="/x"))
    with pytest.raises(Conflict, match="route_prefix: '/x' belongs to the endpoint 'default/a'"):
        loop.command(deploy("b", route="/x/"))
    loop.command(deploy("b", route="/x/y"))


def test_the_route_that_a_pending_goal_may_take_back_is_not_given_away() -> None:
    loop = Loop()
    loop.done(deploy("a", route="/x"))
    loop.command(deploy("a", route="/y", version="v2"))
    for route in ("/x", "/y"):
        with pytest.raises(Conflict):
            loop.command(deploy("b", route=route))
    loop.settle()
    loop.command(deploy("b", route="/x"))


def test_the_name_of_a_backend_or_an_endpoint_is_not_taken_over() -> None:
    loop = Loop()
    loop.done(create_backend("b"))
    loop.done(create_endpoint("e", b=1.0))
    with pytest.raises(Conflict, match="'default/b' is a backend that was made by create_backend"):
        loop.command(deploy("b"))
    with pytest.raises(Conflict, match="'default/e' is an endpoint that was made by create_endpoint"):
        loop.command(deploy("e"))
    with pytest.raises(Conflict, match="create_backend"):
        loop.command(DeleteDeployment(name="b"))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": "a/b/c"}, "name"),
        ({"name": ""}, "name"),
        ({"version": "v" * 201}, "version"),
        ({"version": ""}, "version"),
        ({"request_id": "a b"}, "request_id"),
        ({"methods": []}, "methods"),
        ({"methods": ["GET", "get"]}, "methods[1]"),
        ({"route_prefix": "x"}, "route_prefix"),
        ({"route_prefix": "/-/healthz"}, "route_prefix"),
    ],
    ids=str,
)
def test_a_refusal_names_the_field(fields: dict[str, object], field: str) -> None:
    with pytest.raises(BadField) as refused:
        decide(Checkpoint(), msgspec.structs.replace(deploy(), **fields), 0.0)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"num": -1}, "backend_config.num_replicas"),
        ({"max_concurrent_queries": 0}, "backend_config.max_concurrent_queries"),
        ({"max_surge_percent": 101.0}, "backend_config.max_surge_percent"),
        ({"max_surge_percent": 0.0, "max_unavailable_percent": 0.0}, "backend_config.max_surge_percent"),
        ({"max_replicas_per_host": 0}, "backend_config.max_replicas_per_host"),
        ({"retries": 0}, "backend_config.max_constructor_retry_count"),
        ({"cpus": -1.0}, "replica_config.ray_actor_options.num_cpus"),
        ({"code": "nonsense"}, "replica_config.import_path"),
    ],
    ids=str,
)
def test_a_value_outside_its_limits_is_refused_with_its_path(options: dict[str, object], field: str) -> None:
    with pytest.raises(BadField) as refused:
        decide(Checkpoint(), deploy(**options), 0.0)
    assert refused.value.field == field


def test_backends_and_pending_goals_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    loop.command(deploy("a"))
    monkeypatch.setattr(changes, "NUM_BACKENDS_MAX", 1)
    with pytest.raises(LimitReached):
        loop.command(deploy("b"))
    loop.command(deploy("a", num=2))
    monkeypatch.setattr(changes, "NUM_BACKENDS_MAX", 9)
    monkeypatch.setattr(changes, "GOALS_PENDING_MAX", 1)
    with pytest.raises(LimitReached):
        loop.command(deploy("b"))
    loop.command(deploy("a", num=3))


# What is told of deployments, also of those that are gone, and what else may be changed of one.


def test_an_unknown_deployment_is_not_found_and_so_is_one_that_is_gone() -> None:
    loop = Loop()
    with pytest.raises(NotFound, match="there is no deployment 'default/a'"):
        view_deployment(loop.checkpoint, "a")
    loop.done(deploy())
    assert view_deployment(loop.checkpoint, "a").status is DeploymentStatus.HEALTHY
    loop.done(DeleteDeployment(name="a"))
    with pytest.raises(NotFound):
        view_deployment(loop.checkpoint, "a")


def test_deleted_deployments_are_listed_on_request() -> None:
    loop = Loop()
    loop.done(deploy("a", version="v7", route="/a"))
    loop.done(deploy("b"))
    loop.done(DeleteDeployment(name="a"))
    assert [d.name for d in view_deployments(loop.checkpoint)] == ["default/b"]
    gone, there = view_deployments(loop.checkpoint, include_deleted=True)
    assert (gone.name, gone.status, gone.version) == ("default/a", DeploymentStatus.DELETED, "v7")
    assert gone.started_at < (gone.ended_at or 0.0) <= loop.now
    assert (there.name, there.ended_at) == ("default/b", None)


def test_a_snapshot_of_all_deployments_tells_real_start_and_end_times() -> None:
    loop = Loop()
    begun = loop.now
    loop.done(deploy("a", version="v7", route="/a", code="m:Model"))
    loop.step(100.0)
    loop.done(deploy("a", version="v8", route="/a", code="m:Model"))
    loop.done(deploy("b", version=None))
    loop.done(DeleteDeployment(name="a"))
    ended, running = view_snapshot(loop.checkpoint)
    assert (ended.name, ended.class_name, ended.version) == ("default/a", "Model", "v8")
    assert (ended.route, ended.status) == ("/a", DeploymentStatus.DELETED)
    assert ended.start_time == begun
    assert begun + 100 < (ended.end_time or 0.0) <= loop.now
    assert (running.name, running.version, running.route) == ("default/b", "Unversioned", None)
    assert running.end_time is None


def test_deployments_that_are_gone_are_remembered_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "ENDED_RETAINED_MAX", 2)
    loop = Loop()
    for name in "abc":
        loop.done(deploy(name, num=0))
        loop.done(DeleteDeployment(name=name))
    assert [d.name for d in view_deployments(loop.checkpoint, include_deleted=True)] == [
        "default/b",
        "default/c",
    ]


def test_a_deployments_endpoint_may_split_its_traffic_until_the_next_deploy() -> None:
    loop = Loop()
    loop.done(deploy("a"))
    loop.done(create_backend("b"))
    loop.done(SetTraffic(endpoint="a", weights={"a": 0.9, "b": 0.1}))
    loop.done(ShadowTraffic(endpoint="a", backend_tag="b", proportion=0.5))
    loop.done(deploy("a", version="v2"))
    endpoint = next(iter(loop.checkpoint.endpoints.values()))
    assert endpoint.target.traffic == {"default/a": 1.0}, "a deploy makes it be as given"
    assert endpoint.target.shadows == {"default/b": 0.5}, "of shadows it says nothing"


def test_a_deployments_backend_config_may_be_changed_by_itself() -> None:
    loop = Loop()
    loop.done(deploy("a", route="/a"))
    before = loop.running()
    loop.done(UpdateBackendConfig(backend_tag="a", config={"num_replicas": 2}))
    view = view_deployment(loop.checkpoint, "a")
    assert (view.backend_config.num_replicas, view.route_prefix) == (2, "/a")
    assert before < loop.running()
