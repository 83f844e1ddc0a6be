"""An application's ingress changes and keeps its route: nobody is ever without it, and what fails leaves it."""

from __future__ import annotations

import pytest

from serve_common.api.commands import DeleteDeployment, DeployApplication, Rollback
from serve_common.api.views import GoalStatus
from serve_common.errors import Conflict
from serve_common.protocol.snapshots import EndpointSnapshot, Snapshot
from serve_controller.core.forecast import forecast
from serve_controller.core.reconcile import PublishSnapshot
from serve_controller.core.views import view_applications
from tests.simulation.closed_loop import Loop, check_converged
from tests.simulation.orders import BAD_CODE, application, create_endpoint, deploy, spec
from tests.simulation.pure_host import PureHost

FRONT, MODEL = "app/front", "app/model"


@pytest.fixture
def loop() -> Loop:
    """An application whose route leads to ``front``."""
    loop = Loop(PureHost("host-1", cpus=16))
    loop.done(application(spec("front"), spec("model"), route="/shop"))
    return loop


def holders(bucket: dict[str, Snapshot]) -> set[str]:
    contents = [snapshot.content for snapshot in bucket.values()]
    return {c.endpoint_tag for c in contents if isinstance(c, EndpointSnapshot) and c.route == "/shop"}


def follow(loop: Loop, steps: int = 60) -> list[set[str]]:
    """Whom the route leads to after each single value that was published, as far as it changes."""
    bucket, seen = dict(loop.bucket), [holders(loop.bucket)]
    for _ in range(steps):
        for action in loop.step(0.1).actions:
            if isinstance(action, PublishSnapshot):
                bucket[action.key] = action.snapshot
                if holders(bucket) != seen[-1]:
                    seen.append(holders(bucket))
    return seen


def other_ingress(version: str = "v1", **options: str) -> DeployApplication:
    return application(
        spec("front", version=version),
        spec("model", version=version),
        ingress="model",
        route="/shop",
        **options,
    )


def test_the_route_moves_to_another_deployment_and_is_never_missing(loop: Loop) -> None:
    goal_id = loop.ask(other_ingress()).goal_id
    assert follow(loop) == [{FRONT}, {FRONT, MODEL}, {MODEL}]
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED
    (view,) = view_applications(loop.checkpoint)
    assert (view.ingress, view.route_prefix) == (MODEL, "/shop")
    assert not loop.command(other_ingress()).changes, "the same again is nothing to do"


def test_the_route_waits_until_a_new_ingress_serves_and_the_old_one_goes_after_it(loop: Loop) -> None:
    loop.hosts[0].hangs_in_starting = True
    command = application(spec("door"), spec("model"), route="/shop")
    goal_id = loop.ask(command).goal_id
    assert follow(loop, 10) == [{FRONT}]
    assert not loop.command(command).changes, "it is under way"
    (view,) = view_applications(loop.checkpoint)
    assert (view.ingress, view.route_prefix) == ("app/door", "/shop")
    loop.hosts[0].hangs_in_starting = False
    loop.hosts[0].held.clear()
    loop.hosts[0].spent.clear()
    assert follow(loop, 200) == [{FRONT}, {FRONT, "app/door"}, {"app/door"}]
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED
    assert loop.running(FRONT) == set()
    check_converged(loop)


def test_an_update_that_fails_leaves_the_route_where_it_was(loop: Loop) -> None:
    command = application(spec("door", code=BAD_CODE, retries=1), spec("model", version="v2"), route="/shop")
    goal_id = loop.ask(command).goal_id
    assert follow(loop) == [{FRONT}]
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.FAILED
    (view,) = view_applications(loop.checkpoint)
    assert (view.ingress, view.route_prefix, view.deployments) == (FRONT, "/shop", [FRONT, MODEL])
    check_converged(loop)


def test_a_failure_after_the_route_moved_brings_it_back(loop: Loop) -> None:
    loop.ask(other_ingress())
    while holders(loop.bucket) == {FRONT}:
        loop.step()
    loop.are_proxies_slow = True
    failed = loop.ask(
        application(
            spec("front"),
            spec("model", version="v3", code=BAD_CODE, retries=1),
            ingress="model",
            route="/shop",
        )
    )
    loop.steps(5)
    loop.are_proxies_slow = False
    loop.settle()
    assert loop.goal_status(failed.goal_id) is GoalStatus.FAILED
    assert holders(loop.bucket) == {FRONT}
    check_converged(loop)


def test_it_can_be_called_off_by_deploying_the_application_as_it_was(loop: Loop) -> None:
    loop.hosts[0].hangs_in_starting = True
    loop.ask(other_ingress("v2"))
    loop.steps(3)
    loop.hosts[0].hangs_in_starting = False
    goal_id = loop.ask(application(spec("front"), spec("model"), route="/shop")).goal_id
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED
    assert holders(loop.bucket) == {FRONT}


def test_meanwhile_neither_of_the_two_is_changed_by_itself(loop: Loop) -> None:
    loop.hosts[0].hangs_in_starting = True
    goal_id = loop.ask(other_ingress("v2")).goal_id
    for command in (
        deploy(FRONT, route="/shop"),
        deploy(MODEL),
        Rollback(name=MODEL, to=1),
        DeleteDeployment(name=FRONT),
    ):
        with pytest.raises(Conflict, match=f"is being moved to 'app/model' by {goal_id}"):
            loop.command(command)


def test_the_route_of_another_one_is_still_refused(loop: Loop) -> None:
    loop.done(create_endpoint("e", route="/else", **{MODEL: 1.0}))
    with pytest.raises(Conflict, match="default/e"):
        loop.command(application(spec("front"), spec("model"), ingress="model", route="/else"))
    with pytest.raises(Conflict, match=FRONT):
        loop.command(application(spec("a"), name="other", route="/shop"))


def test_deployments_that_become_an_application_hand_over_a_route_too() -> None:
    loop = Loop(PureHost("host-1", cpus=16))
    loop.done(deploy(FRONT, route="/shop"))
    loop.done(deploy(MODEL))
    loop.ask(other_ingress())
    assert follow(loop)[-1] == {MODEL}


def test_a_plan_says_when_the_route_moves(loop: Loop) -> None:
    before = loop.checkpoint
    plan = forecast(before, before.applied(loop.command(other_ingress()).changes), loop.observed, loop.now)
    assert plan.notes == ["the application app changes: its route leads to app/model once all of it runs"]
