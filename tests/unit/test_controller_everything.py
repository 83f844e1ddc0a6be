"""What is about all of the system: the options of all proxies, and `shutdown`."""

from __future__ import annotations

import pytest

from serve_common.api.commands import SetHttpOptions, Shutdown, ShutdownReply
from serve_common.api.views import DeploymentStatus, GoalStatus
from serve_common.config.endpoint import HttpOptions
from serve_common.errors import BadField
from serve_controller.core.objects import HttpRecord
from serve_controller.core.views import (
    view_applications,
    view_backends,
    view_deployments,
    view_endpoints,
    view_http_config,
    view_proxies,
)
from tests.simulation.closed_loop import Loop, check_converged
from tests.simulation.orders import application, create_backend, create_endpoint, deploy, spec
from tests.simulation.pure_host import PureHost

# -- options of all proxies --------------------------------------------------------------------------------------------


def test_without_a_change_the_options_are_the_defaults() -> None:
    assert view_http_config(Loop().checkpoint) == HttpOptions()


def test_only_the_given_options_change_and_every_proxy_has_them_when_the_goal_succeeds() -> None:
    loop = Loop(proxies=2)
    loop.steps(2)
    loop.done(SetHttpOptions(options={"request_timeout_s": 5, "middlewares": ["m:One"]}))
    loop.are_proxies_slow = True
    goal_id = loop.ask(SetHttpOptions(options={"body_bytes_max": 1000})).goal_id
    loop.steps(10)
    assert loop.goal_status(goal_id) is GoalStatus.PENDING
    assert "2 proxies have not applied" in loop.waiting_for(goal_id)
    loop.are_proxies_slow = False
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED
    assert view_http_config(loop.checkpoint) == HttpOptions(
        request_timeout_s=5.0, body_bytes_max=1000, middlewares=["m:One"]
    )
    newest = loop.bucket["http.options"].snapshot_id
    assert [p.applied_snapshot_id for p in view_proxies(loop.observed, loop.now)] == [newest, newest]


def test_the_same_options_again_make_no_new_goal() -> None:
    loop = Loop()
    goal_id = loop.done(SetHttpOptions(options={"request_timeout_s": 5}))
    again = loop.command(SetHttpOptions(options={"request_timeout_s": 5.0}))
    assert (again.reply.goal_id, again.reply.updating, bool(again.changes)) == (goal_id, False, False)


def test_a_newer_change_of_the_options_supersedes_the_pending_one_and_builds_on_it() -> None:
    loop = Loop()
    first = loop.ask(SetHttpOptions(options={"request_timeout_s": 5}))
    second = loop.ask(SetHttpOptions(options={"body_bytes_max": 1000}))
    assert loop.goal_status(first.goal_id) is GoalStatus.SUPERSEDED
    loop.settle()
    assert loop.goal_status(second.goal_id) is GoalStatus.SUCCEEDED
    assert view_http_config(loop.checkpoint) == HttpOptions(request_timeout_s=5.0, body_bytes_max=1000)


@pytest.mark.parametrize("had_options", [False, True])
def test_options_that_a_proxy_cannot_apply_fail_and_go_back(had_options: bool) -> None:
    loop = Loop(proxies=2)
    loop.steps(2)
    if had_options:
        loop.done(SetHttpOptions(options={"request_timeout_s": 5}))
    before = view_http_config(loop.checkpoint)
    loop.missing_middlewares = {"nowhere:To"}
    goal_id = loop.ask(SetHttpOptions(options={"middlewares": ["nowhere:To"]})).goal_id
    loop.settle()
    goal = loop.goal(goal_id)
    assert goal.status is GoalStatus.FAILED
    assert goal.error == "the proxy proxy-1: cannot be imported"
    assert view_http_config(loop.checkpoint) == before
    content = loop.bucket["http.options"].content
    assert getattr(content, "options", HttpOptions()) == before, "proxies are told so too"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"timeout": 1}, "options.timeout"),
        ({"request_timeout_s": "soon"}, "options.request_timeout_s"),
        ({"request_timeout_s": 0}, "options.request_timeout_s"),
        ({"body_bytes_max": 0}, "options.body_bytes_max"),
        ({"body_bytes_max": 10**400}, "options.body_bytes_max"),
        ({"access_log": "yes"}, "options.access_log"),
        ({"middlewares": ["nonsense"]}, "options.middlewares[0]"),
        ({"middlewares": ["m:M"] * 33}, "options.middlewares"),
    ],
    ids=["unknown", "type", "zero", "no body", "huge", "no bool", "path", "many"],
)
def test_bad_options_are_refused_with_their_path(options: dict[str, object], field: str) -> None:
    loop = Loop()
    with pytest.raises(BadField) as refused:
        loop.command(SetHttpOptions(options=options))
    assert refused.value.field == field
    assert loop.checkpoint.http is None


# -- shutdown ----------------------------------------------------------------------------------------------------------


def everything() -> Loop:
    loop = Loop(PureHost("host-1", cpus=16))
    loop.done(deploy("a", num=2, route="/a"))
    loop.done(application(spec("front"), spec("model"), route="/shop"))
    loop.done(create_backend("b"))
    loop.done(create_endpoint("e", route="/e", b=0.5, a=0.5))
    loop.done(SetHttpOptions(options={"request_timeout_s": 5}))
    return loop


def shut_down(loop: Loop) -> ShutdownReply:
    reply = loop.command(Shutdown(confirm="everything")).reply
    assert isinstance(reply, ShutdownReply)
    return reply


def test_shutdown_empties_everything_and_answers_the_goals_that_do_it() -> None:
    loop = everything()
    reply = shut_down(loop)
    assert len(reply.goal_ids) == len(set(reply.goal_ids)) == 5, (
        "one for each backend, and one for the endpoint"
    )
    loop.settle()
    assert {loop.goal_status(goal_id) for goal_id in reply.goal_ids} == {GoalStatus.SUCCEEDED}
    assert loop.all_replicas() == []
    assert view_backends(loop.checkpoint) == view_endpoints(loop.checkpoint) == []
    assert view_applications(loop.checkpoint) == view_deployments(loop.checkpoint) == []
    assert {d.status for d in view_deployments(loop.checkpoint, include_deleted=True)} == {
        DeploymentStatus.DELETED
    }
    assert {k for k, s in loop.bucket.items() if s.content is not None} == {"http.options"}
    assert isinstance(loop.checkpoint.http, HttpRecord), "how proxies treat requests is nobody's deployment"
    check_converged(loop)


def test_shutdown_of_nothing_has_no_goals() -> None:
    loop = Loop()
    accepted = loop.command(Shutdown(confirm="everything"))
    assert accepted.reply == ShutdownReply(goal_ids=[])
    assert not accepted.changes


def test_shutdown_again_answers_the_goals_that_are_under_way() -> None:
    loop = everything()
    first = shut_down(loop)
    again = shut_down(loop)
    assert set(again.goal_ids) <= set(first.goal_ids)
    loop.settle()
    assert not loop.command(Shutdown(confirm="everything")).changes


def test_shutdown_supersedes_what_is_pending() -> None:
    loop = everything()
    pending = [
        loop.ask(deploy("a", version="v2")).goal_id,
        loop.ask(application(spec("front", version="v2"), spec("model"))).goal_id,
    ]
    shut_down(loop)
    assert {loop.goal_status(goal_id) for goal_id in pending} == {GoalStatus.SUPERSEDED}
    loop.settle()
    check_converged(loop)


def test_shutdown_waits_for_the_proxies_too() -> None:
    loop = everything()
    loop.are_proxies_slow = True
    reply = shut_down(loop)
    loop.steps(20)
    assert {loop.goal_status(goal_id) for goal_id in reply.goal_ids} == {GoalStatus.PENDING}
    loop.are_proxies_slow = False
    loop.settle()
    assert {loop.goal_status(goal_id) for goal_id in reply.goal_ids} == {GoalStatus.SUCCEEDED}


def test_a_leader_that_dies_right_after_a_shutdown_leaves_it_to_the_next() -> None:
    loop = everything()
    reply = shut_down(loop)
    loop.take_over()
    loop.settle()
    assert {loop.goal_status(goal_id) for goal_id in reply.goal_ids} == {GoalStatus.SUCCEEDED}
    assert {k for k, s in loop.bucket.items() if s.content is not None} == {"http.options"}


def test_after_a_shutdown_everything_can_be_deployed_again() -> None:
    loop = everything()
    shut_down(loop)
    loop.step()
    loop.command(deploy("a", num=2, route="/a"))
    loop.command(application(spec("front"), spec("model"), route="/shop"))
    loop.command(create_backend("b"))
    loop.command(create_endpoint("e", route="/e", b=1.0))
    loop.settle()
    assert len(loop.all_replicas()) == 5
    check_converged(loop)
