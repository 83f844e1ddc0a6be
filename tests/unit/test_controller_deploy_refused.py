"""`deploy` and `delete_deployment` that are refused: by `prev_version`, names, routes, values and limits."""

from __future__ import annotations

import msgspec
import pytest

from serve_common.api.commands import DeleteDeployment
from serve_common.errors import BadField, Conflict, LimitReached
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.commands import accepted as accepting
from serve_controller.core.commands import decide, versions
from tests.simulation.closed_loop import Loop
from tests.simulation.orders import create_backend, create_endpoint, deploy

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
    monkeypatch.setattr(versions, "NUM_BACKENDS_MAX", 1)
    with pytest.raises(LimitReached):
        loop.command(deploy("b"))
    loop.command(deploy("a", num=2))
    monkeypatch.setattr(versions, "NUM_BACKENDS_MAX", 9)
    monkeypatch.setattr(accepting, "GOALS_PENDING_MAX", 1)
    with pytest.raises(LimitReached):
        loop.command(deploy("b"))
    loop.command(deploy("a", num=3))
