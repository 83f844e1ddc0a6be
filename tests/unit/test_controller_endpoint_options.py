"""How requests are told apart: given with an endpoint, changed while it serves, undone only with what it came with."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from serve_common.api.commands import (
    CreateEndpoint,
    Deploy,
    DeployApplication,
    Rollback,
    SetEndpointOptions,
    SetTraffic,
)
from serve_common.api.views import GoalStatus
from serve_common.config.endpoint import EndpointOptions
from serve_common.errors import BadField, Conflict, NotFound
from serve_common.names import BackendTag, EndpointTag
from serve_common.protocol.snapshots import EndpointSnapshot
from serve_controller.core.audit import audit_values
from serve_controller.core.forecast import forecast
from serve_controller.core.views import view_deployment, view_endpoints
from tests.simulation.closed_loop import Loop
from tests.simulation.orders import BAD_CODE, application, create_backend, create_endpoint, deploy, spec
from tests.simulation.pure_host import PureHost

BY_USER = EndpointOptions(shard_key_header="X-User", relative_slo_ms=250.0)


def with_options(command: Any, options: EndpointOptions = BY_USER) -> Any:
    field = "options" if isinstance(command, CreateEndpoint) else "endpoint_options"
    return msgspec.structs.replace(command, **{field: options})


def shown(loop: Loop, name: str) -> EndpointOptions:
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
        assert shown(loop, name) == BY_USER
        assert routed_by(loop, f"endpoints.{name.replace('/', '.')}") == BY_USER
    assert shown(loop, "app/front") == EndpointOptions()
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
    assert shown(loop, "app/model") == BY_USER
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
    assert shown(loop, "default/a") == EndpointOptions()
    loop.done(Rollback(name="a"))
    assert shown(loop, "default/a") == BY_USER


def test_options_that_were_set_meanwhile_are_no_version_to_go_back_from() -> None:
    loop = Loop()
    loop.done(with_options(deploy("a")))
    loop.done(deploy("a", version="v2"))
    loop.done(SetEndpointOptions(endpoint="a", options={"backend_header": "X-To"}))
    loop.done(Rollback(name="a"))
    assert loop.backend().target.version == "v1"
    assert shown(loop, "default/a") == BY_USER


def test_a_failed_deploy_does_not_leave_its_options() -> None:
    loop = Loop()
    loop.done(with_options(deploy("a")))
    goal_id = loop.ask(deploy("a", version="v2", code=BAD_CODE, retries=1)).goal_id
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.FAILED
    assert shown(loop, "default/a") == routed_by(loop, "endpoints.default.a") == BY_USER


# -- changed while it serves -------------------------------------------------------------------------------------------


def test_some_options_are_changed_and_the_others_stay() -> None:
    loop = Loop()
    loop.done(with_options(deploy("a", num=2)))
    before = loop.replicas()
    command = SetEndpointOptions(endpoint="a", options={"backend_header": "X-To", "relative_slo_ms": None})
    loop.done(command)
    wanted = EndpointOptions(shard_key_header="X-User", backend_header="X-To")
    assert shown(loop, "default/a") == routed_by(loop, "endpoints.default.a") == wanted
    assert loop.replicas() == before
    again = loop.command(command)
    assert (again.reply.updating, bool(again.changes)) == (False, False)
    loop.done(with_options(deploy("a", num=2)))
    assert shown(loop, "default/a") == BY_USER, "a deploy says everything"


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
