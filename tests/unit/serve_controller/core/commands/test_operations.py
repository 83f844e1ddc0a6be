"""What is about all of the system: the options of all proxies, and `shutdown`."""

from __future__ import annotations

import pytest

from serve_common.api.commands import (
    DeleteApplication,
    DeleteBackend,
    DeleteDeployment,
    DeploymentSpec,
    DrainHost,
    Rollback,
    SetHttpOptions,
    SetTraffic,
    Shutdown,
    ShutdownReply,
    UpdateBackendConfig,
)
from serve_common.api.views import DeploymentStatus, GoalStatus
from serve_common.config.backend import HttpOptions
from serve_common.errors import BadField, CommandRefused, Conflict
from serve_common.names import BackendTag, EndpointTag
from serve_common.protocol.snapshots import HttpSnapshot
from serve_controller.core.objects import HttpRecord
from serve_controller.core.views.backends import view_backends
from serve_controller.core.views.deployments import (
    view_applications,
    view_deployments,
    view_endpoints,
)
from serve_controller.core.views.hosts import view_proxies
from tests.support.control_loop.closed_loop import Loop, check_converged
from tests.support.control_loop.orders import (
    BAD_CODE,
    application,
    create_backend,
    create_endpoint,
    deploy,
    spec,
)
from tests.support.control_loop.pure_host import PureHost

# -- options of all proxies --------------------------------------------------------------------------------------------


def test_without_a_change_the_options_are_the_defaults() -> None:
    assert Loop().checkpoint.http_options == HttpOptions()


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
    assert loop.checkpoint.http_options == HttpOptions(
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
    assert loop.checkpoint.http_options == HttpOptions(request_timeout_s=5.0, body_bytes_max=1000)


@pytest.mark.parametrize("had_options", [False, True])
def test_options_that_a_proxy_cannot_apply_fail_and_go_back(had_options: bool) -> None:
    loop = Loop(proxies=2)
    loop.steps(2)
    if had_options:
        loop.done(SetHttpOptions(options={"request_timeout_s": 5}))
    before = loop.checkpoint.http_options
    loop.missing_middlewares = {"nowhere:To"}
    goal_id = loop.ask(SetHttpOptions(options={"middlewares": ["nowhere:To"]})).goal_id
    loop.settle()
    goal = loop.goal(goal_id)
    assert goal.status is GoalStatus.FAILED
    assert goal.error == "the proxy proxy-1: cannot be imported"
    assert loop.checkpoint.http_options == before
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
    assert len(reply.goal_ids) == len(set(reply.goal_ids)) == 6, (
        "one for each backend, one for the endpoint, and one for the port"
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


def test_shutdown_of_nothing_tells_the_proxies_once() -> None:
    loop = Loop()
    reply = shut_down(loop)
    loop.settle()
    assert [loop.goal_status(goal_id) for goal_id in reply.goal_ids] == [GoalStatus.SUCCEEDED]
    accepted = loop.command(Shutdown(confirm="everything"))
    assert accepted.reply == ShutdownReply(goal_ids=[])
    assert not accepted.changes


def told_of_http(loop: Loop) -> HttpSnapshot:
    content = loop.bucket["http.options"].content
    assert isinstance(content, HttpSnapshot)
    return content


@pytest.mark.parametrize("options", [None, HttpOptions(request_timeout_s=5)])
def test_proxies_know_that_all_was_shut_down_until_there_is_an_endpoint(options: HttpOptions | None) -> None:
    loop = Loop(PureHost("host-1", cpus=16))
    loop.missing_middlewares = {"a:missing"}
    if options is not None:
        loop.done(SetHttpOptions(options={"request_timeout_s": 5}))
    shut_down(loop)
    loop.settle()
    assert told_of_http(loop) == HttpSnapshot(options=options, is_shut_down=True)
    goal_id = loop.ask(SetHttpOptions(options={"middlewares": ["a:missing"]})).goal_id
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.FAILED
    assert told_of_http(loop) == HttpSnapshot(options=options, is_shut_down=True), "what failed opens nothing"
    loop.done(deploy("a", route="/a"))
    assert told_of_http(loop) == HttpSnapshot(options=options)
    loop.done(DeleteDeployment(name="a"))
    assert told_of_http(loop) == HttpSnapshot(options=options), "a deletion is no shutdown"
    loop.done(SetHttpOptions(options={"request_timeout_s": 6}))
    assert told_of_http(loop) == HttpSnapshot(options=HttpOptions(request_timeout_s=6))
    check_converged(loop)


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
    loop.done(create_endpoint("e", route="/e", b=1.0))
    assert len(loop.all_replicas()) == 5
    check_converged(loop)


# Commands that meet each other while goals are pending: what was found by looking for gaps between them.


def traffic_of(loop: Loop, tag: str) -> dict[str, float]:
    return dict(loop.checkpoint.endpoints[EndpointTag(tag)].target.traffic)


def route_of(loop: Loop, tag: str) -> str | None:
    return loop.checkpoint.endpoints[EndpointTag(tag)].target.route


def crashing(host: PureHost) -> Loop:
    """An application of which one part has crashed again and again."""
    loop = Loop(host)
    loop.done(application(spec("x"), spec("y", config="shaky")))
    host.raises_at = {"shaky"}
    for _ in range(4):
        for tag in sorted(loop.running("app/y")):
            host.kill(tag)
        loop.steps(3, 1.0)
    assert loop.backend("app/y").start_failures >= 3
    return loop


# -- traffic and deploys of the same endpoint --------------------------------------------------------------------------


def test_a_failed_deploy_leaves_traffic_that_was_set_meanwhile_and_is_not_applied_yet() -> None:
    loop = Loop()
    loop.done(create_backend("b"))
    loop.done(deploy("a"))
    loop.ask(deploy("a", version="v2", code=BAD_CODE, retries=1))
    loop.are_proxies_slow = True
    split = {"default/a": 0.5, "default/b": 0.5}
    goal = loop.ask(SetTraffic(endpoint="a", weights={"a": 0.5, "b": 0.5})).goal_id
    loop.steps(10, 0.5)
    assert loop.backend().last_error
    loop.are_proxies_slow = False
    loop.settle()
    assert loop.goal_status(goal) is not GoalStatus.SUCCEEDED or traffic_of(loop, "default/a") == split


def test_traffic_that_succeeds_while_a_deploy_is_pending_does_not_make_the_deploys_route_last() -> None:
    loop = Loop()
    loop.done(create_backend("b"))
    loop.done(deploy("a", route="/old"))
    for host in loop.hosts:
        host.hangs_in_starting = True
    goal = loop.ask(deploy("a", version="v2", route="/new", start_timeout_s=30.0, retries=1)).goal_id
    loop.steps(3)
    loop.ask(SetTraffic(endpoint="a", weights={"a": 0.5, "b": 0.5}))
    loop.steps(200, 0.5)
    assert loop.goal_status(goal) is GoalStatus.FAILED
    assert route_of(loop, "default/a") == "/old"
    assert traffic_of(loop, "default/a") == {"default/a": 0.5, "default/b": 0.5}


def test_scaling_a_deployment_does_not_supersede_its_traffic() -> None:
    loop = Loop()
    loop.done(create_backend("b"))
    loop.done(deploy("a"))
    loop.are_proxies_slow = True
    goal = loop.ask(SetTraffic(endpoint="a", weights={"a": 0.5, "b": 0.5})).goal_id
    loop.ask(UpdateBackendConfig(backend_tag="a", config={"num_replicas": 2}))
    loop.are_proxies_slow = False
    loop.settle()
    assert loop.goal_status(goal) is GoalStatus.SUCCEEDED
    assert traffic_of(loop, "default/a") == {"default/a": 0.5, "default/b": 0.5}


def test_traffic_is_not_sent_to_what_an_application_is_dropping() -> None:
    loop = Loop()
    loop.done(application(spec("x"), spec("y")))
    loop.done(create_backend("b"))
    loop.done(create_endpoint("e", b=1.0))
    loop.are_proxies_slow = True
    loop.ask(application(spec("x", version="v2")))
    loop.steps(2)
    with pytest.raises(CommandRefused):
        loop.ask(SetTraffic(endpoint="e", weights={"app/y": 1.0}))


def test_a_failed_application_leaves_no_endpoint_without_its_backend() -> None:
    loop = Loop()
    loop.done(application(spec("x")))
    loop.done(create_backend("b"))
    loop.done(create_endpoint("e", b=1.0))
    loop.ask(application(spec("x", version="v2", code=BAD_CODE, retries=1), spec("y")))
    loop.done(SetTraffic(endpoint="e", weights={"app/y": 1.0}))
    for endpoint in loop.checkpoint.endpoints.values():
        for tag in endpoint.target.backend_tags():
            assert tag in loop.checkpoint.backends, f"{endpoint.endpoint_tag} sends to {tag}, which is gone"


# -- deletions ---------------------------------------------------------------------------------------------------------


def test_deleting_a_deployments_idle_backend_alone_does_not_cut_its_endpoint() -> None:
    loop = Loop()
    loop.done(create_backend("b"))
    loop.done(deploy("a"))
    loop.done(SetTraffic(endpoint="a", weights={"b": 1.0}))
    with pytest.raises(Conflict):
        loop.ask(DeleteBackend(backend_tag="a"))
    assert EndpointTag("default/a") in loop.checkpoint.endpoints


def test_a_deletion_is_not_failed_by_a_config_that_was_refused_before_it() -> None:
    loop = Loop()
    for host in loop.hosts:
        host.raises_at = {"bad"}
    loop.done(deploy("a", config="good"))
    loop.ask(UpdateBackendConfig(backend_tag="a", config={"user_config": "bad"}))
    loop.cycle()
    loop.hear_hosts()  # the refusal is heard, and before the next plan the deployment is deleted
    loop.done(DeleteDeployment(name="a"))


def test_deleting_what_an_application_drops_already_is_answered_with_a_goal_that_is_true() -> None:
    loop = Loop()
    loop.done(application(spec("x"), spec("y")))
    for host in loop.hosts:
        host.hangs_in_draining = True
    loop.ask(application(spec("x")))
    loop.steps(5)
    assert loop.backend("app/y").deleting
    goal = loop.ask(DeleteDeployment(name="app/y")).goal_id
    loop.steps(3)
    assert loop.replicas("app/y")
    assert loop.goal_status(goal) is GoalStatus.PENDING
    for host in loop.hosts:
        host.finish_drains()
    loop.settle()
    assert loop.goal_status(goal) is GoalStatus.SUCCEEDED


def test_deleting_again_after_the_deletion_was_superseded_in_part_has_a_goal_that_ends_well() -> None:
    loop = Loop()
    loop.done(application(spec("x"), spec("y")))
    for host in loop.hosts:
        host.hangs_in_draining = True
    loop.ask(DeleteApplication(name="app"))
    loop.steps(2)
    loop.ask(deploy("app/x"))
    goal = loop.ask(DeleteDeployment(name="app/y")).goal_id
    for host in loop.hosts:
        host.finish_drains()
    loop.settle()
    assert loop.goal_status(goal) is GoalStatus.SUCCEEDED


def test_an_endpoint_is_not_made_under_the_name_of_a_deployment_that_still_goes() -> None:
    loop = Loop()
    loop.done(create_backend("b"))
    loop.done(deploy("a"))
    for host in loop.hosts:
        host.hangs_in_draining = True
    loop.ask(DeleteDeployment(name="a"))
    loop.steps(2)
    with pytest.raises(Conflict):
        loop.ask(create_endpoint("a", b=1.0))


def test_shutdown_answers_goals_that_all_succeed_also_while_an_application_is_pending() -> None:
    loop = Loop()
    loop.ask(application(spec("x"), spec("y"), spec("z")))
    loop.done(deploy("a"))
    loop.ask(application(spec("x", version="v2"), spec("y"), spec("z")))
    loop.ask(DeleteDeployment(name="app/z"))
    reply = loop.command(Shutdown(confirm="everything")).reply
    assert isinstance(reply, ShutdownReply)
    loop.settle()
    assert {loop.goal_status(g) for g in reply.goal_ids} == {GoalStatus.SUCCEEDED}
    assert not loop.checkpoint.backends


# -- answers to the same again -----------------------------------------------------------------------------------------


def test_a_part_of_an_application_is_answered_with_the_goal_that_is_about_it_now() -> None:
    loop = Loop()
    loop.are_proxies_slow = True
    loop.ask(application(spec("x"), spec("y")))
    whole = loop.ask(deploy("app/x", version="v2")).goal_id
    assert loop.ask(deploy("app/y")).goal_id == whole
    assert loop.ask(application(spec("x", version="v2"), spec("y"))).goal_id == whole


def test_an_application_as_it_is_deployed_is_not_called_done_while_a_part_is_pending() -> None:
    loop = Loop()
    loop.done(application(spec("x"), spec("y")))
    loop.are_proxies_slow = True
    loop.ask(deploy("app/x", version="v2"))
    goal = loop.ask(application(spec("x", version="v2"), spec("y"))).goal_id
    assert loop.goal_status(goal) is GoalStatus.PENDING


def test_a_change_of_the_only_part_of_a_pending_application_keeps_the_application() -> None:
    loop = Loop()
    loop.ask(application(spec("x")))
    loop.done(UpdateBackendConfig(backend_tag="app/x", config={"num_replicas": 2}))
    assert loop.checkpoint.applications["app"].last_good is not None
    loop.ask(application(spec("x", num=2), spec("y", code=BAD_CODE, retries=1)))
    loop.settle()
    assert loop.checkpoint.applications["app"].target.deployments == ["app/x"]


def test_an_application_that_a_part_joined_is_the_same_again() -> None:
    loop = Loop()
    loop.done(application(spec("b"), spec("c")))
    loop.done(deploy("app/a"))
    again = loop.ask(application(spec("a"), spec("b"), spec("c"), ingress="b"))
    assert not again.updating


def test_a_failed_change_is_not_the_answer_to_asking_for_what_is_there() -> None:
    loop = Loop()
    for host in loop.hosts:
        host.raises_at = {"bad"}
    loop.done(deploy("a", config="good"))
    loop.ask(UpdateBackendConfig(backend_tag="a", config={"user_config": "bad"}))
    loop.settle()
    goal = loop.ask(UpdateBackendConfig(backend_tag="a", config={"user_config": "good"})).goal_id
    loop.settle()
    assert goal is None or loop.goal_status(goal) is GoalStatus.SUCCEEDED


def test_a_failed_rollback_is_not_the_answer_to_a_rollback_to_what_is_there() -> None:
    loop = Loop()
    loop.done(deploy("a", version="v1"))
    loop.done(deploy("a", version="v2"))
    loop.ask(deploy("a", version="v3", code=BAD_CODE, retries=1))
    loop.settle()
    goal = loop.ask(Rollback(name="a", to="v2")).goal_id
    loop.settle()
    assert goal is None or loop.goal_status(goal) is GoalStatus.SUCCEEDED


def test_failed_http_options_are_not_the_answer_to_asking_for_those_that_are_there() -> None:
    loop = Loop()
    loop.done(SetHttpOptions(options={"request_timeout_s": 5.0}))
    loop.missing_middlewares = {"no:Such"}
    loop.ask(SetHttpOptions(options={"middlewares": ["no:Such"]}))
    loop.settle()
    goal = loop.ask(SetHttpOptions(options={"request_timeout_s": 5.0})).goal_id
    loop.settle()
    assert goal is None or loop.goal_status(goal) is GoalStatus.SUCCEEDED


def test_an_unchanged_part_is_not_failed_by_what_had_crashed_before_the_application_changed() -> None:
    host = PureHost("host-1")
    loop = crashing(host)
    host.raises_at = set()
    loop.done(application(spec("x", version="v2"), spec("y", config="shaky")))


# -- history -----------------------------------------------------------------------------------------------------------


def test_scaling_often_does_not_push_out_the_versions_to_go_back_to() -> None:
    loop = Loop()
    loop.done(deploy("a", version="v1"))
    loop.done(deploy("a", version="v2"))
    for number in range(12):
        loop.done(UpdateBackendConfig(backend_tag="a", config={"num_replicas": 2 - number % 2}))
    loop.done(Rollback(name="a"))
    assert loop.backend().target.version == "v1"
    assert loop.backend().target.backend_config.num_replicas == 1


def test_a_backend_under_the_name_of_a_former_deployment_stays_a_backend_when_it_is_rolled_back() -> None:
    loop = Loop()
    loop.done(deploy("a"))
    loop.done(DeleteDeployment(name="a"))
    loop.done(create_backend("b"))
    loop.done(create_endpoint("a", b=1.0))
    loop.done(create_backend("a"))
    loop.done(create_backend("a", code="other:Code"))
    loop.done(Rollback(name="a"))
    assert traffic_of(loop, "default/a") == {"default/b": 1.0}
    deployment = loop.checkpoint.deployments[BackendTag("default/a")]
    assert deployment.ended_at is not None


# -- goals that hang ---------------------------------------------------------------------------------------------------


def test_a_light_change_does_not_wait_for_a_host_that_cannot_be_drained() -> None:
    loop = Loop(PureHost("host-1", cpus=1), PureHost("host-2", cpus=1))
    loop.done(deploy("a", num=2))
    loop.ask(DrainHost(host_id="host-1"))
    loop.steps(4)
    goal = loop.ask(UpdateBackendConfig(backend_tag="a", config={"max_queued_requests": 7})).goal_id
    loop.steps(8)
    assert loop.goal_status(goal) is GoalStatus.SUCCEEDED


def test_a_new_config_reaches_replicas_on_a_host_that_cannot_be_drained() -> None:
    loop = Loop(PureHost("host-1", cpus=1), PureHost("host-2", cpus=1))
    loop.done(deploy("a", num=2, config="one"))
    loop.ask(DrainHost(host_id="host-1"))
    loop.steps(4)
    goal = loop.ask(UpdateBackendConfig(backend_tag="a", config={"user_config": "two"})).goal_id
    loop.steps(20)
    assert loop.user_configs() == ["two", "two"]
    assert loop.goal_status(goal) is GoalStatus.SUCCEEDED


def test_an_update_makes_room_on_another_host_when_the_oldest_replica_is_on_one_that_is_drained() -> None:
    loop = Loop(PureHost("host-1", cpus=2), PureHost("host-2", cpus=2))
    loop.done(deploy("a", num=4))
    oldest = min(loop.replicas().values(), key=lambda r: r.ordinal)
    assert oldest.host_id is not None
    loop.ask(DrainHost(host_id=oldest.host_id))
    loop.ask(deploy("a", num=4, version="v2"))
    loop.steps(40)
    current = [r for r in loop.replicas().values() if r.code_version == loop.backend().target.code_version]
    assert any(r.host_id is not None for r in current)


def test_an_update_makes_room_where_it_helps_though_the_oldest_replica_is_elsewhere() -> None:
    small, large = PureHost("host-1", cpus=2), PureHost("host-2", cpus=3)
    loop = Loop(small, large)
    loop.done(deploy("a", num=5))
    loop.hosts[0].resources["CPU"] = 2.0
    goal = loop.ask(deploy("a", num=2, version="v2", cpus=2.0)).goal_id
    loop.steps(200, 1.0)
    assert loop.goal_status(goal) is GoalStatus.SUCCEEDED
    check_converged(loop)


def test_a_rollback_without_a_version_undoes_a_change_of_the_route_alone() -> None:
    loop = Loop()
    loop.done(deploy("a", version="v1", route="/a"))
    loop.done(deploy("a", version="v2", route="/a"))
    loop.done(deploy("a", version="v2", route="/b"))
    loop.done(Rollback(name="a"))
    assert (loop.backend().target.version, route_of(loop, "default/a")) == ("v2", "/a")


# -- what an application leaves out ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "came_to"),
    [(spec("y", code=BAD_CODE), GoalStatus.FAILED), (spec("y", cpus=99.0), GoalStatus.PENDING)],
    ids=["does not start", "has no room"],
)
def test_an_application_may_drop_a_deployment_that_never_ran(
    part: DeploymentSpec, came_to: GoalStatus
) -> None:
    loop = Loop()
    goal_id = loop.ask(application(spec("x"), part)).goal_id
    loop.steps(80, 0.5)
    assert loop.goal_status(goal_id) is came_to
    loop.done(application(spec("x")))
    assert BackendTag("app/y") not in loop.checkpoint.backends


def test_an_application_may_drop_a_deployment_that_crashes_again_and_again() -> None:
    loop = crashing(PureHost("host-1", cpus=20))
    loop.done(application(spec("x", version="v2")))
    assert BackendTag("app/y") not in loop.checkpoint.backends
