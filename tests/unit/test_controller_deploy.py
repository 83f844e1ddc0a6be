"""`deploy` and `delete_deployment`: what is accepted and what is refused; saying it twice changes nothing more."""

from __future__ import annotations

import pytest

from serve_common.api.commands import DeleteDeployment
from serve_common.api.views import GoalStatus
from serve_common.errors import Conflict
from serve_common.names import BackendTag
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.commands import decide
from tests.simulation.closed_loop import Loop, check_converged
from tests.simulation.orders import BAD_CODE, create_endpoint, deploy
from tests.simulation.pure_host import PureHost

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
