"""Endpoints by themselves, and the traffic and shadows of any endpoint."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from serve_common.api.commands import (
    CreateEndpoint,
    DeleteBackend,
    DeleteDeployment,
    DeleteEndpoint,
    Deploy,
    DeployApplication,
    Rollback,
    SetEndpointOptions,
    SetTraffic,
    ShadowTraffic,
)
from serve_common.api.views import EndpointView, GoalStatus
from serve_common.config.backend import EndpointOptions
from serve_common.errors import BadField, Conflict, LimitReached, NotFound
from serve_common.names import BackendTag, EndpointTag
from serve_common.protocol.snapshots import EndpointSnapshot
from serve_controller.core.audit import audit_values
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.commands import endpoints
from serve_controller.core.forecast import forecast
from serve_controller.core.views.backends import view_backends
from serve_controller.core.views.deployments import view_deployment, view_endpoints
from tests.support.control_loop.closed_loop import Loop
from tests.support.control_loop.orders import (
    BAD_CODE,
    application,
    create_backend,
    create_endpoint,
    deploy,
    spec,
)
from tests.support.control_loop.pure_host import PureHost


@pytest.fixture
def loop() -> Loop:
    """Three backends, and an endpoint ``e`` that sends everything to ``b``."""
    loop = Loop()
    for name in ("b", "c", "d"):
        loop.command(create_backend(name))
    loop.done(create_endpoint("e", route="/e", b=1.0))
    return loop


def shown(loop: Loop, name: str = "default/e") -> EndpointView:
    return next(view for view in view_endpoints(loop.checkpoint) if view.endpoint_tag == name)


# -- create and delete -------------------------------------------------------------------------------------------------


def test_an_endpoint_is_shown_with_route_methods_traffic_and_shadows(loop: Loop) -> None:
    loop.done(ShadowTraffic(endpoint="e", backend_tag="c", proportion=0.25))
    assert shown(loop) == EndpointView(
        endpoint_tag="default/e",
        route="/e",
        methods=["GET"],
        traffic={"default/b": 1.0},
        shadows={"default/c": 0.25},
    )


def test_without_a_route_an_endpoint_is_headless(loop: Loop) -> None:
    loop.done(create_endpoint("quiet", b=1.0))
    assert shown(loop, "default/quiet").route is None
    assert "endpoints.default.quiet" in loop.bucket, "it is reached by its name"
    loop.done(create_endpoint("silent", b=1.0))


def test_the_same_again_is_a_success_with_no_new_goal(loop: Loop) -> None:
    before = len(loop.checkpoint.goals)
    again = loop.command(create_endpoint("e", route="/e/", b=1.0))
    assert (again.reply.updating, bool(again.changes)) == (False, False)
    assert again.reply.goal_id == loop.checkpoint.endpoints[EndpointTag("default/e")].goal_id
    assert len(loop.checkpoint.goals) == before


@pytest.mark.parametrize(
    "other",
    [
        create_endpoint("e", route="/other", b=1.0),
        create_endpoint("e", b=1.0),
        create_endpoint("e", route="/e", methods=["POST"], b=1.0),
        create_endpoint("e", route="/e", c=1.0),
    ],
    ids=["route", "headless", "methods", "traffic"],
)
def test_another_endpoint_under_the_same_name_is_refused(loop: Loop, other: CreateEndpoint) -> None:
    with pytest.raises(Conflict, match="'default/e' exists already"):
        loop.command(other)


def test_a_route_that_another_endpoint_has_is_refused_and_the_other_is_named(loop: Loop) -> None:
    with pytest.raises(Conflict, match="route: '/e' belongs to the endpoint 'default/e'"):
        loop.command(create_endpoint("f", route="/e/", b=1.0))
    loop.done(deploy("a", route="/a"))
    with pytest.raises(Conflict, match="default/a"):
        loop.command(create_endpoint("f", route="/a", b=1.0))


def test_the_name_of_a_deployment_is_not_taken_over(loop: Loop) -> None:
    loop.done(deploy("a", route="/a"))
    with pytest.raises(Conflict):
        loop.command(create_endpoint("a", route="/a", methods=["GET", "POST"], a=1.0))
    with pytest.raises(Conflict, match="belongs to the deployment of that name; use delete_deployment"):
        loop.command(DeleteEndpoint(endpoint="a"))


def test_a_deleted_endpoint_leaves_its_backends_and_gives_its_route_away(loop: Loop) -> None:
    before = view_backends(loop.checkpoint)
    reply = loop.ask(DeleteEndpoint(endpoint="e"))
    loop.done(create_endpoint("f", route="/e", c=1.0))
    assert loop.goal_status(reply.goal_id) is GoalStatus.SUCCEEDED
    assert view_backends(loop.checkpoint) == before
    assert [view.endpoint_tag for view in view_endpoints(loop.checkpoint)] == ["default/f"]
    assert loop.bucket["endpoints.default.e"].content is None


def test_deleting_an_unknown_endpoint_is_a_success_without_a_goal(loop: Loop) -> None:
    accepted = loop.command(DeleteEndpoint(endpoint="nobody"))
    assert (accepted.reply.goal_id, accepted.reply.updating, bool(accepted.changes)) == (None, False, False)


def test_deleting_it_again_while_proxies_still_know_it_answers_the_goal_to_wait_for(loop: Loop) -> None:
    loop.are_proxies_slow = True
    first = loop.ask(DeleteEndpoint(endpoint="e"))
    loop.steps(3)
    again = loop.command(DeleteEndpoint(endpoint="e"))
    assert (again.reply.goal_id, again.reply.updating, bool(again.changes)) == (first.goal_id, True, False)
    loop.are_proxies_slow = False
    loop.settle()
    assert loop.ask(DeleteEndpoint(endpoint="e")).goal_id is None


def test_an_endpoint_that_a_leader_deleted_before_it_died_is_taken_from_the_routers_by_the_next(
    loop: Loop,
) -> None:
    reply = loop.ask(DeleteEndpoint(endpoint="e"))
    loop.take_over()
    loop.settle()
    assert loop.bucket["endpoints.default.e"].content is None
    assert loop.goal_status(reply.goal_id) is GoalStatus.SUCCEEDED


def test_an_endpoint_made_anew_while_its_deletion_is_pending_replaces_it(loop: Loop) -> None:
    loop.are_proxies_slow = True
    deleted = loop.ask(DeleteEndpoint(endpoint="e"))
    loop.steps(3)
    made = loop.ask(create_endpoint("e", route="/e", c=1.0))
    assert loop.goal_status(deleted.goal_id) is GoalStatus.SUPERSEDED
    loop.are_proxies_slow = False
    loop.settle()
    assert loop.goal_status(made.goal_id) is GoalStatus.SUCCEEDED


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"endpoint": "a/b/c"}, "endpoint"),
        ({"endpoint": ""}, "endpoint"),
        ({"route": "no-slash"}, "route"),
        ({"route": "/-/routes"}, "route"),
        ({"methods": []}, "methods"),
        ({"methods": ["TEA"]}, "methods[0]"),
        ({"traffic": {}}, "traffic"),
        ({"traffic": {"b": 0.5}}, "traffic"),
        ({"traffic": {"b": 2.0}}, "traffic.b"),
    ],
    ids=str,
)
def test_a_bad_value_is_refused_with_its_path(loop: Loop, fields: dict[str, object], field: str) -> None:
    command = msgspec.structs.replace(create_endpoint("new", b=1.0), **fields)
    with pytest.raises(BadField) as refused:
        loop.command(command)
    assert refused.value.field == field


def test_traffic_to_an_unknown_backend_is_refused_when_an_endpoint_is_made(loop: Loop) -> None:
    with pytest.raises(NotFound, match=r"traffic\.nobody: there is no backend 'default/nobody'"):
        loop.command(create_endpoint("new", nobody=1.0))


def test_endpoints_have_a_limit(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "NUM_ENDPOINTS_MAX", 1)
    with pytest.raises(LimitReached):
        loop.command(create_endpoint("f", b=1.0))


# -- traffic -----------------------------------------------------------------------------------------------------------


def test_traffic_is_split_by_weights_over_backends(loop: Loop) -> None:
    loop.done(SetTraffic(endpoint="e", weights={"b": 0.9, "c": 0.1}))
    assert shown(loop).traffic == {"default/b": 0.9, "default/c": 0.1}
    loop.done(SetTraffic(endpoint="e", weights={"c": 1.0, "b": 0.0}))
    assert shown(loop).traffic == {"default/b": 0.0, "default/c": 1.0}


def test_the_same_traffic_again_makes_no_new_goal(loop: Loop) -> None:
    goal_id = loop.done(SetTraffic(endpoint="e", weights={"b": 0.5, "c": 0.5}))
    again = loop.command(SetTraffic(endpoint="e", weights={"c": 0.5, "default/b": 0.5}))
    assert (again.reply.goal_id, again.reply.updating, bool(again.changes)) == (goal_id, False, False)


def test_tenths_that_add_up_are_accepted(loop: Loop) -> None:
    loop.done(SetTraffic(endpoint="e", weights={"b": 0.1 + 0.2, "c": 0.7}))


@pytest.mark.parametrize(
    ("weights", "field"),
    [
        ({}, "weights"),
        ({"b": 0.5, "c": 0.4}, "weights"),
        ({"b": 0.6, "c": 0.6}, "weights"),
        ({"b": 0.0}, "weights"),
        ({"b": -0.5, "c": 0.5}, "weights.b"),
        ({"b": 1.5}, "weights.b"),
        ({"b": math.nan}, "weights.b"),
        ({"b": 10**400}, "weights.b"),
        ({"b": 0.5, "default/b": 0.5}, "weights.default/b"),
        ({"../b": 1.0}, "weights"),
    ],
    ids=["empty", "too little", "too much", "zero", "negative", "above one", "nan", "huge", "twice", "name"],
)
def test_bad_weights_are_refused(loop: Loop, weights: dict[str, float], field: str) -> None:
    before = shown(loop)
    with pytest.raises(BadField) as refused:
        loop.command(SetTraffic(endpoint="e", weights=weights))
    assert refused.value.field == field
    assert shown(loop) == before


def test_traffic_of_an_unknown_endpoint_or_to_an_unknown_backend_is_refused(loop: Loop) -> None:
    with pytest.raises(NotFound, match="there is no endpoint 'nobody'"):
        loop.command(SetTraffic(endpoint="nobody", weights={"b": 1.0}))
    with pytest.raises(NotFound, match=r"weights\.nobody: there is no backend 'default/nobody'"):
        loop.command(SetTraffic(endpoint="e", weights={"b": 0.5, "nobody": 0.5}))
    loop.command(DeleteBackend(backend_tag="d"))
    with pytest.raises(NotFound, match="default/d"):
        loop.command(SetTraffic(endpoint="e", weights={"b": 0.5, "d": 0.5}))


def test_traffic_may_be_sent_to_a_deployments_backend_which_is_then_kept(loop: Loop) -> None:
    loop.done(deploy("a"))
    loop.done(SetTraffic(endpoint="e", weights={"b": 0.5, "a": 0.5}))
    with pytest.raises(Conflict, match="default/e"):
        loop.command(DeleteDeployment(name="a"))


def test_a_newer_traffic_supersedes_the_pending_one(loop: Loop) -> None:
    loop.are_proxies_slow = True
    first = loop.ask(SetTraffic(endpoint="e", weights={"b": 0.5, "c": 0.5}))
    loop.steps(3)
    second = loop.ask(SetTraffic(endpoint="e", weights={"c": 1.0}))
    assert loop.goal_status(first.goal_id) is GoalStatus.SUPERSEDED
    loop.are_proxies_slow = False
    loop.settle()
    assert loop.goal_status(second.goal_id) is GoalStatus.SUCCEEDED


def test_too_many_backends_in_one_split_are_refused(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "SPLIT_MAX", 1)
    with pytest.raises(BadField, match="at most 1"):
        loop.command(SetTraffic(endpoint="e", weights={"b": 0.5, "c": 0.5}))
    loop.command(ShadowTraffic(endpoint="e", backend_tag="c", proportion=0.5))
    with pytest.raises(LimitReached):
        loop.command(ShadowTraffic(endpoint="e", backend_tag="d", proportion=0.5))


# -- shadows -----------------------------------------------------------------------------------------------------------


def test_a_proportion_of_zero_ends_a_shadow(loop: Loop) -> None:
    loop.done(ShadowTraffic(endpoint="e", backend_tag="c", proportion=0.5))
    loop.done(ShadowTraffic(endpoint="e", backend_tag="d", proportion=1.0))
    assert shown(loop).shadows == {"default/c": 0.5, "default/d": 1.0}
    loop.done(ShadowTraffic(endpoint="e", backend_tag="c", proportion=0))
    assert shown(loop).shadows == {"default/d": 1.0}
    assert shown(loop).traffic == {"default/b": 1.0}, "traffic is another matter"


def test_ending_a_shadow_that_is_not_there_makes_no_goal(loop: Loop) -> None:
    accepted = loop.command(ShadowTraffic(endpoint="e", backend_tag="nobody", proportion=0))
    assert (accepted.reply.updating, bool(accepted.changes)) == (False, False)


def test_the_same_shadow_again_makes_no_new_goal(loop: Loop) -> None:
    goal_id = loop.done(ShadowTraffic(endpoint="e", backend_tag="c", proportion=0.5))
    again = loop.command(ShadowTraffic(endpoint="e", backend_tag="c", proportion=0.5))
    assert (again.reply.goal_id, bool(again.changes)) == (goal_id, False)


@pytest.mark.parametrize("proportion", [-0.1, 1.1, math.nan, 10**400], ids=["below", "above", "nan", "huge"])
def test_a_proportion_outside_0_to_1_is_refused(loop: Loop, proportion: float) -> None:
    with pytest.raises(BadField) as refused:
        loop.command(ShadowTraffic(endpoint="e", backend_tag="c", proportion=proportion))
    assert refused.value.field == "proportion"


def test_a_shadow_of_an_unknown_endpoint_or_backend_is_refused(loop: Loop) -> None:
    with pytest.raises(NotFound, match="there is no endpoint 'nobody'"):
        loop.command(ShadowTraffic(endpoint="nobody", backend_tag="c", proportion=0.5))
    with pytest.raises(NotFound, match="backend_tag: there is no backend 'default/nobody'"):
        loop.command(ShadowTraffic(endpoint="e", backend_tag="nobody", proportion=0.5))


def test_traffic_and_shadows_changed_together_keep_each_other(loop: Loop) -> None:
    first = loop.ask(SetTraffic(endpoint="e", weights={"b": 0.5, "c": 0.5}))
    second = loop.ask(ShadowTraffic(endpoint="e", backend_tag="d", proportion=0.5))
    assert loop.goal_status(first.goal_id) is GoalStatus.SUPERSEDED, "the later goal is of the whole endpoint"
    loop.settle()
    assert loop.goal_status(second.goal_id) is GoalStatus.SUCCEEDED
    assert (shown(loop).traffic, shown(loop).shadows) == (
        {"default/b": 0.5, "default/c": 0.5},
        {"default/d": 0.5},
    )


def test_the_traffic_of_a_deployment_survives_a_failed_deploy_of_it() -> None:
    """It succeeded before: the failed deploy puts back what last succeeded."""
    loop = Loop()
    loop.done(deploy("a"))
    loop.done(create_backend("b"))
    loop.done(SetTraffic(endpoint="a", weights={"a": 0.5, "b": 0.5}))
    failed = loop.ask(deploy("a", version="v2", code=BAD_CODE))
    loop.settle()
    assert loop.goal_status(failed.goal_id) is GoalStatus.FAILED
    assert shown(loop, "default/a").traffic == {"default/a": 0.5, "default/b": 0.5}


def test_an_endpoint_that_a_failed_deploy_may_send_back_to_keeps_its_backend() -> None:
    loop = Loop()
    loop.done(deploy("a"))
    loop.done(create_backend("b"))
    loop.done(SetTraffic(endpoint="a", weights={"a": 0.5, "b": 0.5}))
    loop.command(deploy("a", version="v2"))
    with pytest.raises(Conflict, match="default/a"):
        loop.command(DeleteBackend(backend_tag="b"))
    assert Checkpoint().used_by.get(BackendTag("default/b")) is None


# How requests are told apart: given with an endpoint, changed while it serves, undone only with what it came with.


BY_USER = EndpointOptions(shard_key_header="X-User", relative_slo_ms=250.0)


def with_options(command: Any, options: EndpointOptions = BY_USER) -> Any:
    field = "options" if isinstance(command, CreateEndpoint) else "endpoint_options"
    return msgspec.structs.replace(command, **{field: options})


def shown_options(loop: Loop, name: str) -> EndpointOptions:
    return next(view.options for view in view_endpoints(loop.checkpoint) if view.endpoint_tag == name)


def routed_by(loop: Loop, key: str) -> EndpointOptions:
    content = loop.bucket[key].content
    assert isinstance(content, EndpointSnapshot)
    return content.options


def pending_deploy(loop: Loop, command: Deploy) -> str:
    """A deploy that neither succeeds nor fails until hosts start replicas again; its goal."""
    for host in loop.hosts:
        host.hangs_in_starting = True
    goal_id = loop.ask(command).goal_id
    loop.steps(3)
    assert goal_id is not None
    assert loop.goal_status(goal_id) is GoalStatus.PENDING
    return goal_id


# -- given with the endpoint -------------------------------------------------------------------------------------------


def test_options_come_with_an_endpoint_a_deployment_and_each_part_of_an_application() -> None:
    loop = Loop(PureHost("host-1", cpus=8))
    loop.done(create_backend("b"))
    loop.done(with_options(create_endpoint("e", b=1.0)))
    loop.done(with_options(deploy("a")))
    loop.done(application(spec("front"), with_options(spec("model"))))
    for name in ("default/e", "default/a", "app/model"):
        assert shown_options(loop, name) == BY_USER
        assert routed_by(loop, f"endpoints.{name.replace('/', '.')}") == BY_USER
    assert shown_options(loop, "app/front") == EndpointOptions()
    assert view_deployment(loop.checkpoint, "a").endpoint_options == BY_USER
    assert view_deployment(loop.checkpoint, "app/front").endpoint_options == EndpointOptions()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (EndpointOptions(shard_key_header="X User"), "shard_key_header"),
        (EndpointOptions(backend_header="ä"), "backend_header"),
        (EndpointOptions(relative_slo_ms=0.0), "relative_slo_ms"),
        (EndpointOptions(relative_slo_ms=float("nan")), "relative_slo_ms"),
    ],
)
def test_options_that_cannot_be_are_refused_with_their_path(options: EndpointOptions, name: str) -> None:
    loop = Loop()
    loop.done(create_backend("b"))
    at_spec = f"deployments[1].endpoint_options.{name}"
    for command, path in (
        (with_options(create_endpoint("e"), options), f"options.{name}"),
        (with_options(deploy("a"), options), f"endpoint_options.{name}"),
        (application(spec("front"), with_options(spec("model"), options)), at_spec),
    ):
        with pytest.raises(BadField) as refused:
            loop.command(command)
        assert refused.value.field == path


def test_a_redeploy_with_other_options_touches_no_replica_and_the_same_again_is_nothing_to_do() -> None:
    loop = Loop()
    loop.done(deploy("a", num=2))
    before, keys = loop.replicas(), dict(loop.bucket)
    loop.done(with_options(deploy("a", num=2)))
    assert loop.replicas() == before, "not even their records"
    assert {key for key in loop.bucket if loop.bucket[key] != keys[key]} == {"endpoints.default.a"}
    assert not loop.command(with_options(deploy("a", num=2))).changes


def test_options_of_an_application_are_part_of_what_it_is() -> None:
    loop = Loop(PureHost("host-1", cpus=8))
    loop.done(application(spec("front"), spec("model")))
    before = loop.replicas("app/model")
    command: DeployApplication = application(spec("front"), with_options(spec("model")))
    loop.done(command)
    assert shown_options(loop, "app/model") == BY_USER
    assert loop.replicas("app/model") == before
    assert not loop.command(command).changes


def test_an_endpoint_with_other_options_under_the_same_name_is_refused() -> None:
    loop = Loop()
    loop.done(create_backend("b"))
    loop.done(create_endpoint("e"))
    with pytest.raises(Conflict, match="with another route, methods, traffic or options"):
        loop.command(with_options(create_endpoint("e")))


def test_a_rollback_brings_the_options_back_too() -> None:
    loop = Loop()
    loop.done(with_options(deploy("a")))
    loop.done(deploy("a"))
    assert shown_options(loop, "default/a") == EndpointOptions()
    loop.done(Rollback(name="a"))
    assert shown_options(loop, "default/a") == BY_USER


def test_options_that_were_set_meanwhile_are_no_version_to_go_back_from() -> None:
    loop = Loop()
    loop.done(with_options(deploy("a")))
    loop.done(deploy("a", version="v2"))
    loop.done(SetEndpointOptions(endpoint="a", options={"backend_header": "X-To"}))
    loop.done(Rollback(name="a"))
    assert loop.backend().target.version == "v1"
    assert shown_options(loop, "default/a") == BY_USER


def test_a_failed_deploy_does_not_leave_its_options() -> None:
    loop = Loop()
    loop.done(with_options(deploy("a")))
    goal_id = loop.ask(deploy("a", version="v2", code=BAD_CODE, retries=1)).goal_id
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.FAILED
    assert shown_options(loop, "default/a") == routed_by(loop, "endpoints.default.a") == BY_USER


# -- changed while it serves -------------------------------------------------------------------------------------------


def test_some_options_are_changed_and_the_others_stay() -> None:
    loop = Loop()
    loop.done(with_options(deploy("a", num=2)))
    before = loop.replicas()
    command = SetEndpointOptions(endpoint="a", options={"backend_header": "X-To", "relative_slo_ms": None})
    loop.done(command)
    wanted = EndpointOptions(shard_key_header="X-User", backend_header="X-To")
    assert shown_options(loop, "default/a") == routed_by(loop, "endpoints.default.a") == wanted
    assert loop.replicas() == before
    again = loop.command(command)
    assert (again.reply.updating, bool(again.changes)) == (False, False)
    loop.done(with_options(deploy("a", num=2)))
    assert shown_options(loop, "default/a") == BY_USER, "a deploy says everything"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"shard_key": "X-User"}, "options.shard_key"),
        ({"backend_header": 1}, "options.backend_header"),
        ({"backend_header": "a b"}, "options.backend_header"),
        ({"relative_slo_ms": 10**400}, "options.relative_slo_ms"),
    ],
)
def test_a_change_that_cannot_be_is_refused_with_its_path(options: dict[str, Any], field: str) -> None:
    loop = Loop()
    loop.done(deploy("a"))
    with pytest.raises(BadField) as refused:
        loop.command(SetEndpointOptions(endpoint="a", options=options))
    assert refused.value.field == field


def test_options_of_an_unknown_endpoint_are_not_found() -> None:
    with pytest.raises(NotFound, match="there is no endpoint 'nobody'"):
        Loop().command(SetEndpointOptions(endpoint="nobody", options={}))


def test_options_set_during_a_deploy_that_fails_hold_and_the_deploys_own_do_not() -> None:
    loop = Loop()
    loop.done(deploy("a", route="/old"))
    command = with_options(deploy("a", version="v2", route="/new", start_timeout_s=30.0, retries=1))
    failed = pending_deploy(loop, command)
    goal_id = loop.ask(SetEndpointOptions(endpoint="a", options={"backend_header": "X-To"})).goal_id
    loop.steps(200, 0.5)
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED
    assert loop.goal_status(failed) is GoalStatus.FAILED
    target = loop.checkpoint.endpoints[EndpointTag("default/a")].target
    assert (target.route, target.options.backend_header) == ("/old", "X-To")


def test_traffic_set_during_a_deploy_that_fails_does_not_keep_the_deploys_options() -> None:
    loop = Loop()
    loop.done(create_backend("b"))
    loop.done(deploy("a"))
    failed = pending_deploy(loop, with_options(deploy("a", version="v2", start_timeout_s=30.0, retries=1)))
    loop.ask(SetTraffic(endpoint="a", weights={"a": 0.5, "b": 0.5}))
    loop.steps(200, 0.5)
    assert loop.goal_status(failed) is GoalStatus.FAILED
    target = loop.checkpoint.endpoints[EndpointTag("default/a")].target
    assert target.options == EndpointOptions()
    assert target.traffic == {"default/a": 0.5, "default/b": 0.5}


def test_traffic_and_options_changed_together_both_survive_a_failed_deploy() -> None:
    loop = Loop()
    loop.done(create_backend("b"))
    loop.done(deploy("a"))
    loop.ask(deploy("a", version="v2", code=BAD_CODE, retries=1))
    loop.are_proxies_slow = True
    loop.ask(SetTraffic(endpoint="a", weights={"a": 0.5, "b": 0.5}))
    loop.ask(SetEndpointOptions(endpoint="a", options={"backend_header": "X-To"}))
    loop.steps(10, 0.5)
    assert loop.backend().last_error
    loop.are_proxies_slow = False
    loop.settle()
    target = loop.checkpoint.endpoints[EndpointTag("default/a")].target
    assert target.traffic == {"default/a": 0.5, "default/b": 0.5}
    assert target.options.backend_header == "X-To"


# -- told --------------------------------------------------------------------------------------------------------------


def test_a_plan_and_the_history_tell_of_changed_options() -> None:
    loop = Loop()
    loop.done(deploy("a"))
    before = loop.checkpoint
    changes = loop.command(SetEndpointOptions(endpoint="a", options={"backend_header": "X-To"})).changes
    plan = forecast(before, before.applied(changes), loop.observed, loop.now)
    assert plan.replicas == []
    assert plan.notes == ["the endpoint default/a changes: backend_header none → X-To"]
    old, new = audit_values(before, changes)
    assert old is not None
    assert new is not None
    assert old["endpoint default/a"]["options"]["backend_header"] == ""
    assert new["endpoint default/a"]["options"]["backend_header"] == "X-To"


def test_a_deployment_that_is_gone_is_shown_without_options() -> None:
    loop = Loop()
    loop.done(with_options(deploy("a")))
    assert BackendTag("default/a") in loop.checkpoint.deployments
    assert view_deployment(loop.checkpoint, "a").endpoint_options == BY_USER
