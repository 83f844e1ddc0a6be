"""Commands: what is accepted, what is refused, and that saying it twice changes nothing more."""

from __future__ import annotations

import msgspec
import pytest

from serve_common.errors import BadField, Conflict, LimitReached
from serve_common.names import BackendTag
from serve_common.wires.commands import DeleteDeployment
from serve_common.wires.views import GoalStatus
from serve_controller.core import decide as deciding
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.commands import decide
from tests.simulation.closed_loop import BAD_CODE, Loop, PureHost, check_converged, deploy


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
    assert accepted.goal_id == accepted.reply.goal_id == goal.goal_id


def test_the_same_version_again_is_nothing_to_do_and_answers_the_same_goal() -> None:
    loop = Loop()
    first = loop.command(deploy())
    again = loop.command(deploy())
    assert not again.changes
    assert (again.reply.goal_id, again.reply.updating) == (first.goal_id, False)


def test_without_a_version_every_deploy_is_a_new_one_unless_it_is_a_retry() -> None:
    loop = Loop()
    first = loop.command(deploy(version=None, request_id="r1"))
    assert loop.command(deploy(version=None, request_id="r1")).reply.goal_id == first.goal_id
    assert loop.command(deploy(version=None, request_id="r2")).reply.goal_id != first.goal_id


@pytest.mark.parametrize(
    ("change", "code", "config"),
    [
        ({"num": 3}, 1, 1),
        ({"config": "two"}, 1, 2),
        ({"version": "v2"}, 2, 2),
        ({"code": "other:Code"}, 2, 2),
        ({"cpus": 2.0}, 2, 2),
        ({"route": "/b"}, 1, 1),
    ],
)
def test_a_change_costs_no_more_than_it_must(change: dict[str, object], code: int, config: int) -> None:
    """Nothing, a reconfiguration, or new replicas."""
    loop = Loop()
    loop.command(deploy())
    loop.settle()
    loop.command(deploy(**change))
    target = loop.backend().target
    assert (target.code_version, target.config_version) == (code, config)


def test_a_newer_deploy_supersedes_the_pending_one() -> None:
    loop = Loop()
    first = loop.command(deploy(num=1))
    second = loop.command(deploy(num=2))
    assert loop.goal_status(first.goal_id) is GoalStatus.SUPERSEDED
    assert second.goal_id in loop.checkpoint.goals[first.goal_id].error


def test_a_deploy_while_a_delete_waits_for_proxies_supersedes_it() -> None:
    """The delete's backend is gone already, and its goal must not wait for the new deployment's replicas to stop."""
    loop = Loop()
    loop.command(deploy())
    loop.settle()
    loop.are_proxies_slow = True
    deleted = loop.command(DeleteDeployment(name="a"))
    loop.steps(10)
    assert loop.checkpoint.backends == {}
    assert loop.goal_status(deleted.goal_id) is GoalStatus.PENDING
    loop.command(deploy(version="v2"))
    assert loop.goal_status(deleted.goal_id) is GoalStatus.SUPERSEDED
    loop.are_proxies_slow = False
    loop.settle()
    check_converged(loop)


def test_the_version_that_serves_deployed_again_after_a_failure_is_not_answered_with_the_failure() -> None:
    loop = Loop()
    loop.command(deploy())
    loop.settle()
    before = loop.running()
    failed = loop.command(deploy(version="v2", code=BAD_CODE))
    loop.settle()
    assert loop.goal_status(failed.goal_id) is GoalStatus.FAILED
    again = loop.command(deploy())
    assert again.reply.goal_id != failed.goal_id
    loop.settle()
    assert loop.goal_status(again.goal_id) is GoalStatus.SUCCEEDED
    assert loop.running() == before, "it costs no replica"


def test_what_was_deleted_does_not_come_back_when_the_next_deploy_fails() -> None:
    loop = Loop(PureHost("host-1", cpus=8))
    loop.command(deploy(num=2, route="/old"))
    loop.settle()
    loop.command(DeleteDeployment(name="a"))
    failed = loop.command(deploy(version="v2", code=BAD_CODE, route="/new"))
    loop.settle()
    assert loop.goal_status(failed.goal_id) is GoalStatus.FAILED
    assert loop.backend().halted
    assert loop.running() == set()


def test_a_deleted_deployment_deployed_again_as_it_was_serves_again() -> None:
    loop = Loop(PureHost("host-1", cpus=8))
    loop.command(deploy(num=2, route="/a"))
    loop.settle()
    loop.command(DeleteDeployment(name="a"))
    loop.step()
    again = loop.command(deploy(num=2, route="/a"))
    loop.settle()
    assert loop.goal_status(again.goal_id) is GoalStatus.SUCCEEDED
    check_converged(loop)


def test_deleting_what_is_not_there_or_already_goes_is_a_success_without_a_change() -> None:
    loop = Loop()
    assert loop.command(DeleteDeployment(name="nobody")).reply.goal_id is None
    loop.command(deploy())
    first = loop.command(DeleteDeployment(name="a"))
    again = loop.command(DeleteDeployment(name="a"))
    assert (again.reply.goal_id, bool(again.changes)) == (first.goal_id, False)


def test_a_route_belongs_to_one_endpoint() -> None:
    loop = Loop()
    loop.command(deploy("a", route="/x"))
    with pytest.raises(Conflict, match="default/a"):
        loop.command(deploy("b", route="/x/"))
    loop.command(deploy("b", route="/x/y"))


def test_the_route_that_a_pending_goal_may_take_back_is_not_given_away() -> None:
    loop = Loop()
    loop.command(deploy("a", route="/x"))
    loop.settle()
    loop.command(deploy("a", route="/y", version="v2"))
    for route in ("/x", "/y"):
        with pytest.raises(Conflict):
            loop.command(deploy("b", route=route))
    loop.settle()
    loop.command(deploy("b", route="/x"))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": "a/b/c"}, "name"),
        ({"version": "v" * 201}, "version"),
        ({"request_id": "a b"}, "request_id"),
        ({"methods": []}, "methods"),
        ({"methods": ["GET", "get"]}, "methods[1]"),
        ({"route_prefix": "x"}, "route_prefix"),
    ],
)
def test_a_refusal_names_the_field(fields: dict[str, object], field: str) -> None:
    with pytest.raises(BadField) as refused:
        decide(Checkpoint(), msgspec.structs.replace(deploy(), **fields), 0.0)
    assert refused.value.field == field


def test_backends_and_pending_goals_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    loop.command(deploy("a"))
    monkeypatch.setattr(deciding, "NUM_BACKENDS_MAX", 1)
    with pytest.raises(LimitReached):
        loop.command(deploy("b"))
    loop.command(deploy("a", num=2))
    monkeypatch.setattr(deciding, "NUM_BACKENDS_MAX", 9)
    monkeypatch.setattr(deciding, "GOALS_PENDING_MAX", 1)
    with pytest.raises(LimitReached):
        loop.command(deploy("b"))
