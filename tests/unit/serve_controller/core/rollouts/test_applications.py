"""Applications whose deployments have `rollout`: changed ones are rolled out, and succeed or go back together."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from serve_common.api.commands import (
    ControlRollout,
    DeleteApplication,
    DeployApplication,
    RolloutAction,
    Scale,
)
from serve_common.api.views import GoalStatus
from serve_common.errors import BadField, Conflict
from serve_common.names import BackendTag
from serve_controller.core.rollouts.record import Rollout, RolloutOutcome
from tests.support.control_loop.closed_loop import Loop, check_converged, check_fixpoint
from tests.support.control_loop.orders import BAD_CODE, GOOD_CODE, deploy, spec
from tests.support.control_loop.pure_host import PureHost
from tests.support.control_loop.traffic import Behaviour, Traffic, model

WEB, MODEL = BackendTag("shop/web"), BackendTag("shop/model")
STEPS = {"steps": ["50%", "100%"]}
WAITS = {"steps": ["50% wait", "100%"]}


def shop(
    web: str, model_: str, *, code: str = GOOD_CODE, route: str | None = None, **options: Any
) -> DeployApplication:
    """An application of two deployments in those versions; ``options`` are of the first."""
    fields = {"rollout": STEPS, **options}
    return DeployApplication(
        name="shop",
        ingress="web",
        route_prefix=route,
        deployments=[
            spec("web", version=web, cpus=0.5, **fields),
            spec("model", version=model_, cpus=0.5, code=code, rollout=fields["rollout"]),
        ],
    )


class World:
    """The application in version v1, with load on both deployments."""

    def __init__(self, new: Behaviour | None = None, *, rollout: dict[str, Any] = STEPS) -> None:
        self.loop = Loop(PureHost("host-1", 8.0), PureHost("host-2", 8.0))
        self.loop.done(shop("v1", "v1", rollout=rollout))
        self.traffic = [
            Traffic(self.loop, WEB, model(), model(), rate=600.0, seed=1),
            Traffic(self.loop, MODEL, model(), new or model(), rate=600.0, seed=2),
        ]

    def rollout(self, tag: BackendTag) -> Rollout:
        return self.loop.checkpoint.rollouts[tag]

    def versions(self) -> tuple[str | None, str | None]:
        return self.loop.backend(WEB).target.version, self.loop.backend(MODEL).target.version

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds * 4)):
            for traffic in self.traffic:
                traffic.flow(0.25)
            self.loop.step(0.25)

    def end(self, goal_id: str | None) -> GoalStatus:
        """How the goal ends."""
        for _ in range(300):
            self.run(1)
            if self.loop.goal_status(goal_id) is not GoalStatus.PENDING:
                break
        self.loop.settle()
        check_converged(self.loop)
        check_fixpoint(self.loop)
        return self.loop.goal_status(goal_id)


def test_each_changed_deployment_is_rolled_out_and_the_goal_waits_for_all() -> None:
    world = World()
    goal_id = world.loop.ask(shop("v2", "v2")).goal_id
    assert {world.rollout(tag).goal_id for tag in (WEB, MODEL)} == {goal_id}
    assert world.versions() == ("v1", "v1")
    assert world.loop.ask(shop("v2", "v2")).goal_id == goal_id
    assert not world.loop.command(shop("v2", "v2")).changes
    world.loop.step(1)
    assert "step 1 of 2" in world.loop.waiting_for(goal_id)
    assert world.end(goal_id) is GoalStatus.SUCCEEDED
    assert world.versions() == ("v2", "v2")
    for tag in (WEB, MODEL):
        last_good = world.loop.backend(tag).last_good
        assert last_good is not None
        assert last_good.version == "v2"
    assert set(world.loop.checkpoint.backends) == {WEB, MODEL}
    assert not world.loop.command(shop("v2", "v2")).changes


def test_what_is_the_same_is_not_rolled_out() -> None:
    world = World()
    goal_id = world.loop.ask(shop("v2", "v1", num=2, route="/shop")).goal_id
    assert set(world.loop.checkpoint.rollouts) == {WEB}
    assert world.end(goal_id) is GoalStatus.SUCCEEDED
    assert world.versions() == ("v2", "v1")
    assert world.loop.backend(WEB).target.backend_config.num_replicas == 2
    assert not world.loop.command(shop("v2", "v1", num=2, route="/shop")).changes


def test_one_that_is_worse_takes_all_back() -> None:
    world = World(model(errors=0.5))
    goal_id = world.loop.ask(shop("v2", "v2")).goal_id
    assert world.end(goal_id) is GoalStatus.FAILED
    assert world.loop.goal(goal_id).error.startswith("shop/model: errors")
    assert world.versions() == ("v1", "v1")
    assert world.rollout(MODEL).outcome is RolloutOutcome.ABORTED
    assert world.rollout(WEB).outcome is not RolloutOutcome.ABORTED
    assert set(world.loop.checkpoint.backends) == {WEB, MODEL}
    with pytest.raises(Conflict, match=r"was aborted"):
        world.loop.ask(shop("v2", "v2"))
    again = world.loop.ask(shop("v2", "v3")).goal_id
    world.traffic[1] = Traffic(world.loop, MODEL, model(), model(), rate=600.0, seed=3)
    assert world.end(again) is GoalStatus.SUCCEEDED, "what was undone with it was not at fault"


def test_one_that_was_promoted_goes_back_when_another_one_is_aborted() -> None:
    world = World(rollout=STEPS)
    command = shop("v2", "v2")
    [web, other] = command.deployments
    waits = msgspec.structs.replace(
        other.backend_config, rollout=shop("v2", "v2", rollout=WAITS).deployments[1].backend_config.rollout
    )
    command = msgspec.structs.replace(
        command, deployments=[web, msgspec.structs.replace(other, backend_config=waits)]
    )
    goal_id = world.loop.ask(command).goal_id
    for _ in range(300):
        world.run(1)
        if not world.rollout(WEB).is_active:
            break
    assert world.versions() == ("v2", "v1")
    world.loop.command(ControlRollout(name=MODEL, action=RolloutAction.ABORT, reason="odd"))
    assert world.end(goal_id) is GoalStatus.FAILED
    assert world.versions() == ("v1", "v1")
    assert world.rollout(WEB).outcome is RolloutOutcome.SUPERSEDED
    assert world.rollout(WEB).reason == f"every step passed; then: undone with {MODEL}, which failed"


def test_the_rest_that_fails_to_start_ends_the_rollouts() -> None:
    world = World(rollout=WAITS)
    command = shop("v2", "v2", code=BAD_CODE, rollout=WAITS)
    [web, other] = command.deployments
    plain = msgspec.structs.replace(
        other, backend_config=msgspec.structs.replace(other.backend_config, rollout=None)
    )
    goal_id = world.loop.ask(msgspec.structs.replace(command, deployments=[web, plain])).goal_id
    assert set(world.loop.checkpoint.rollouts) == {WEB}
    assert world.end(goal_id) is GoalStatus.FAILED
    assert world.rollout(WEB).outcome is RolloutOutcome.SUPERSEDED
    assert world.rollout(WEB).reason.startswith("undone with its application")
    assert world.versions() == ("v1", "v1")
    assert set(world.loop.checkpoint.backends) == {WEB, MODEL}


def test_a_later_deploy_goes_on_with_what_it_leaves_the_same() -> None:
    world = World(rollout=WAITS)
    first = world.loop.ask(shop("v2", "v2", rollout=WAITS)).goal_id
    world.run(20)
    started_at = world.rollout(WEB).started_at
    second = world.loop.ask(shop("v2", "v3", rollout=WAITS)).goal_id
    assert world.loop.goal_status(first) is GoalStatus.SUPERSEDED
    assert world.rollout(WEB).started_at == started_at
    assert world.rollout(MODEL).candidate.version == "v3"
    assert {world.rollout(tag).goal_id for tag in (WEB, MODEL)} == {second}
    third = world.loop.ask(shop("v2", "v1", rollout=WAITS)).goal_id
    world.run(5)
    assert world.rollout(MODEL).outcome is RolloutOutcome.SUPERSEDED
    world.loop.command(ControlRollout(name=WEB, action=RolloutAction.PROMOTE))
    assert world.end(third) is GoalStatus.SUCCEEDED
    assert world.versions() == ("v2", "v1")


def test_a_deploy_takes_over_the_rollout_of_a_deployment_by_itself() -> None:
    world = World(rollout=WAITS)
    part = deploy("shop/web", version="v2", cpus=0.5, rollout=WAITS)
    alone = world.loop.ask(part).goal_id
    goal_id = world.loop.ask(shop("v2", "v1", rollout=WAITS)).goal_id
    assert world.loop.goal_status(alone) is GoalStatus.SUPERSEDED
    assert world.rollout(WEB).goal_id == goal_id
    with pytest.raises(Conflict, match=f"the application 'shop' is being deployed by {goal_id}"):
        world.loop.ask(msgspec.structs.replace(part, version="v3"))
    world.loop.command(ControlRollout(name=WEB, action=RolloutAction.PROMOTE))
    assert world.end(goal_id) is GoalStatus.SUCCEEDED


def test_a_change_of_one_deployment_meanwhile_keeps_the_rollouts() -> None:
    world = World(rollout=WAITS)
    first = world.loop.ask(shop("v2", "v2", rollout=WAITS)).goal_id
    world.run(5)
    second = world.loop.ask(Scale(backend_tag=MODEL, num_replicas=2)).goal_id
    assert world.loop.goal_status(first) is GoalStatus.SUPERSEDED
    assert {world.rollout(tag).goal_id for tag in (WEB, MODEL)} == {second}
    for tag in (WEB, MODEL):
        world.loop.command(ControlRollout(name=tag, action=RolloutAction.PROMOTE))
    assert world.end(second) is GoalStatus.SUCCEEDED
    assert world.versions() == ("v2", "v2")
    assert world.loop.backend(MODEL).target.backend_config.num_replicas == 2


def test_one_that_is_left_out_is_deleted_with_its_rollout() -> None:
    world = World(rollout=WAITS)
    world.loop.ask(shop("v2", "v2", rollout=WAITS))
    world.run(5)
    command = shop("v2", "v2", rollout=WAITS)
    goal_id = world.loop.ask(msgspec.structs.replace(command, deployments=command.deployments[:1])).goal_id
    world.run(5)
    world.loop.command(ControlRollout(name=WEB, action=RolloutAction.PROMOTE))
    assert world.end(goal_id) is GoalStatus.SUCCEEDED
    assert set(world.loop.checkpoint.backends) == {WEB}


def test_it_is_deleted_with_its_rollouts() -> None:
    world = World(rollout=WAITS)
    world.loop.ask(shop("v2", "v2", rollout=WAITS))
    world.run(5)
    world.loop.done(DeleteApplication(name="shop"))
    assert not world.loop.checkpoint.backends
    assert not world.loop.checkpoint.rollouts


def test_a_deploy_can_skip_all_rollouts() -> None:
    world = World()
    world.loop.done(msgspec.structs.replace(shop("v2", "v2"), skips_rollout=True))
    assert not world.loop.checkpoint.rollouts


def test_another_ingress_of_a_route_is_refused_with_a_new_version() -> None:
    world = World()
    world.loop.done(shop("v1", "v1", route="/shop"))
    moved = msgspec.structs.replace(shop("v2", "v1", route="/shop"), ingress="model")
    with pytest.raises(Conflict, match="route_prefix: '/shop' moves to"):
        world.loop.ask(moved)


def test_a_name_that_can_have_no_rollout_is_refused_with_its_place() -> None:
    command = DeployApplication(name="shop", ingress="a" * 60, deployments=[spec("a" * 60, rollout=STEPS)])
    with pytest.raises(BadField, match=r"deployments\[0\]\.name: is too long"):
        Loop().ask(command)
