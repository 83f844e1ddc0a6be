"""Endpoints by themselves, and the traffic and shadows of any endpoint."""

from __future__ import annotations

import math

import msgspec
import pytest

from serve_common.api.commands import (
    CreateEndpoint,
    DeleteBackend,
    DeleteDeployment,
    DeleteEndpoint,
    SetTraffic,
    ShadowTraffic,
)
from serve_common.api.views import EndpointView, GoalStatus
from serve_common.errors import BadField, Conflict, LimitReached, NotFound
from serve_common.names import BackendTag, EndpointTag
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.commands import endpoints
from serve_controller.core.views import view_backends, view_endpoints
from tests.simulation.closed_loop import Loop
from tests.simulation.orders import BAD_CODE, create_backend, create_endpoint, deploy


@pytest.fixture
def loop() -> Loop:
    """Three backends, and an endpoint ``e`` that sends everything to ``b``."""
    loop = Loop()
    for name in ("b", "c", "d"):
        loop.command(create_backend(name))
    loop.command(create_endpoint("e", route="/e", b=1.0))
    loop.settle()
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
    loop.command(create_endpoint("f", route="/e", c=1.0))
    loop.settle()
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
