"""Deploys of deployments whose configuration has `rollout`: each new version is rolled out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from serve_common.api.commands import (
    ControlRollout,
    CreateEndpoint,
    DeleteDeployment,
    Deploy,
    Rollback,
    RolloutAction,
    Scale,
    SetEndpointOptions,
    StartRollout,
    UpdateBackendConfig,
)
from serve_common.api.views import GoalStatus
from serve_common.config.rollout import RolloutConfig
from serve_common.errors import BadField, Conflict
from serve_common.names import BackendTag, EndpointTag
from serve_controller.core.commands import decide
from serve_controller.core.forecast import forecast
from serve_controller.core.objects import EndpointRecord, ObjectChanges
from serve_controller.core.rollouts.record import Rollout, RolloutOutcome, RolloutState
from tests.support.control_loop.closed_loop import Loop, check_converged, check_fixpoint
from tests.support.control_loop.orders import BAD_CODE, create_backend, deploy
from tests.support.control_loop.pure_host import PureHost
from tests.support.control_loop.traffic import Behaviour, Traffic, model

TAG = BackendTag("default/a")
CANARY, BASELINE = BackendTag("default/a--canary"), BackendTag("default/a--baseline")
STEPS = {"steps": ["25%", "100%"]}
WAITS = {"steps": ["25% wait", "100%"]}


def rolled(version: str | None = "v2", *, rollout: dict[str, Any] | None = STEPS, **options: Any) -> Deploy:
    """A deploy whose configuration has `rollout`."""
    return deploy(version=version, rollout=rollout, cpus=0.5, **{"num": 2, **options})


class World:
    """A deployment with two replicas under load, whose configuration has `rollout`."""

    def __init__(self, new: Behaviour | None = None, *, rollout: dict[str, Any] = STEPS) -> None:
        self.loop = Loop(PureHost("host-1", 8.0), PureHost("host-2", 8.0))
        self.loop.done(rolled("v1", rollout=rollout))
        self.traffic = Traffic(self.loop, TAG, model(), new or model(), rate=600.0, seed=1)

    @property
    def rollout(self) -> Rollout:
        return self.loop.checkpoint.rollouts[TAG]

    @property
    def config(self) -> Any:
        return self.loop.backend().target.backend_config

    @property
    def endpoint(self) -> EndpointRecord:
        return self.loop.checkpoint.endpoints[EndpointTag(TAG)]

    def run(self, seconds: float, *, until: RolloutState | None = None) -> None:
        """Time under load."""
        for _ in range(round(seconds * 4)):
            self.traffic.flow(0.25)
            self.loop.step(0.25)
            if until is not None and self.rollout.state is until:
                return

    def end(self, goal_id: str | None) -> GoalStatus:
        """How the rollout's goal ends."""
        self.run(300, until=RolloutState.ENDED)
        self.loop.settle()
        check_converged(self.loop)
        check_fixpoint(self.loop)
        return self.loop.goal_status(goal_id)


def test_a_deploy_of_another_version_is_a_rollout_whose_goal_succeeds_with_it() -> None:
    world = World()
    reply = world.loop.ask(rolled("v2"))
    assert reply.updating
    assert reply.goal_id == world.rollout.goal_id
    assert world.loop.backend().target.version == "v1"
    assert world.loop.checkpoint.backends[CANARY].target.version == "v2"
    assert world.loop.checkpoint.backends[CANARY].target.backend_config.rollout is None
    assert world.end(reply.goal_id) is GoalStatus.SUCCEEDED
    assert world.loop.backend().target.version == "v2"
    assert world.config == rolled("v2").backend_config
    assert world.rollout.outcome is RolloutOutcome.PROMOTED
    assert set(world.loop.checkpoint.backends) == {TAG}
    assert world.loop.ask(rolled("v2")).updating is False


def test_a_version_that_is_worse_fails_its_deploy_and_is_refused_for_a_while() -> None:
    world = World(model(errors=1.0))
    goal_id = world.loop.ask(rolled("v2", num=5, route="/new")).goal_id
    assert world.end(goal_id) is GoalStatus.FAILED
    assert "errors" in world.loop.goal(goal_id).error
    assert world.loop.backend().target.version == "v1"
    assert (world.config.num_replicas, world.endpoint.target.route) == (2, None)
    with pytest.raises(Conflict, match=r"was aborted .* is refused for another .*--no-rollout"):
        world.loop.ask(rolled("v2"))
    with pytest.raises(Conflict, match="was aborted"):
        world.loop.ask(rolled("v2", num=7, rollout=WAITS))  # other steps and numbers make no other version
    world.loop.ask(rolled("v3"))
    world.loop.ask(msgspec.structs.replace(rolled("v2"), skips_rollout=True))


@pytest.mark.parametrize(
    "command",
    [
        rolled("v1", num=4),
        rolled("v1", max_queued_requests=7),
        rolled("v1", rollout=WAITS),
        rolled("v2", rollout=None),
        msgspec.structs.replace(rolled("v2"), skips_rollout=True),
        msgspec.structs.replace(rolled("v1"), route_prefix="/other"),
        Scale(backend_tag="a", num_replicas=3),
        UpdateBackendConfig(backend_tag="a", config={"user_config": 1, "rollout": None}),
        UpdateBackendConfig(backend_tag="a", config={"user_config": 1}, skips_rollout=True),
        UpdateBackendConfig(backend_tag="a", config={"max_queued_requests": 7}),
    ],
)
def test_what_makes_no_other_version_or_skips_the_rollout_is_done_at_once(command: Any) -> None:
    world = World()
    world.loop.done(command)
    assert TAG not in world.loop.checkpoint.rollouts


def test_a_first_deploy_and_one_onto_what_never_worked_are_no_rollouts() -> None:
    loop = Loop()
    loop.ask(rolled("v1", code=BAD_CODE))
    loop.settle()
    assert loop.backend().halted
    loop.done(rolled("v2"))
    assert not loop.checkpoint.rollouts


def test_a_version_that_has_yet_to_work_is_nothing_to_compare_with() -> None:
    world = World()
    update = world.loop.ask(msgspec.structs.replace(rolled("v2"), skips_rollout=True))
    with pytest.raises(Conflict, match=f"is being changed by {update.goal_id}"):
        world.loop.ask(rolled("v3"))
    world.loop.done(rolled("v1"))  # back to the version that last worked: at once
    assert not world.loop.checkpoint.rollouts


def test_a_rollback_is_no_rollout() -> None:
    world = World()
    world.loop.done(msgspec.structs.replace(rolled("v2"), skips_rollout=True))
    world.loop.done(Rollback(name="a"))
    assert world.loop.backend().target.version == "v1"
    assert not world.loop.checkpoint.rollouts


def test_the_same_deploy_again_is_the_same_rollout() -> None:
    world = World(rollout=WAITS)
    first = world.loop.ask(rolled("v2", rollout=WAITS))
    world.run(5)
    again = world.loop.command(rolled("v2", rollout=WAITS))
    assert (again.reply.goal_id, bool(again.changes)) == (first.goal_id, False)  # type: ignore[union-attr]
    more = world.loop.ask(rolled("v2", rollout=WAITS, num=3))
    assert (more.goal_id, more.updating) == (first.goal_id, True)
    assert world.rollout.is_in_force, "it goes on"
    world.loop.command(ControlRollout(name="a", action=RolloutAction.PROMOTE))
    assert world.end(first.goal_id) is GoalStatus.SUCCEEDED
    assert world.config.num_replicas == 3


def test_a_retry_is_answered_with_the_rollout_that_it_started() -> None:
    world = World()
    first = world.loop.ask(rolled("v2", request_id="r1"))
    assert world.end(first.goal_id) is GoalStatus.SUCCEEDED
    world.loop.ask(rolled("v3"))
    assert world.loop.ask(rolled("v2", request_id="r1")).goal_id == first.goal_id


def test_unversioned_code_is_another_version_each_time() -> None:
    world = World(rollout=WAITS)
    first = world.loop.ask(rolled(None, rollout=WAITS))
    second = world.loop.ask(rolled(None, rollout=WAITS))
    assert first.goal_id != second.goal_id
    assert world.loop.goal_status(first.goal_id) is GoalStatus.SUPERSEDED


def test_another_version_replaces_the_rollout_and_is_judged_by_its_own_requests() -> None:
    world = World(model(errors=0.3), rollout=WAITS)
    first = world.loop.ask(rolled("bad", rollout=WAITS)).goal_id
    for _ in range(400):
        world.run(0.25)
        if world.rollout.is_in_force and world.loop.request_counts[CANARY].errors:
            break
    world.traffic = Traffic(world.loop, TAG, model(), model(), rate=600.0, seed=2)
    second = world.loop.ask(rolled("v3")).goal_id
    assert world.loop.goal_status(first) is GoalStatus.SUPERSEDED
    assert not world.rollout.has_backends
    assert world.loop.checkpoint.backends[CANARY].target.version == "bad", "it may still get requests"
    world.run(5)
    assert world.loop.checkpoint.backends[CANARY].target.version == "v3"
    assert world.end(second) is GoalStatus.SUCCEEDED, world.rollout.progress
    assert world.loop.backend().target.version == "v3"


def test_the_version_that_runs_ends_the_rollout() -> None:
    world = World(rollout=WAITS)
    first = world.loop.ask(rolled("v2", rollout=WAITS)).goal_id
    world.run(20)
    before = world.loop.running()
    world.loop.done(rolled("v1", rollout=WAITS))
    assert world.loop.goal_status(first) is GoalStatus.SUPERSEDED
    assert world.rollout.outcome is RolloutOutcome.SUPERSEDED
    assert set(world.loop.checkpoint.backends) == {TAG}
    assert world.loop.running() <= before, "and no replica is started"


def test_a_rollout_that_a_person_started_goes_on_when_the_version_that_runs_is_deployed_again() -> None:
    world = World(rollout=WAITS)
    world.loop.ask(StartRollout(name="a", version="v2"))
    assert world.rollout.steps[0].waits, "steps are those of the deployment"
    assert not world.loop.command(rolled("v1", rollout=WAITS)).changes
    assert world.rollout.state is RolloutState.RUNNING


def test_what_else_a_deploy_changes_follows_when_it_is_promoted() -> None:
    world = World(rollout=WAITS)
    command = rolled("v2", rollout=WAITS, num=4, max_queued_requests=7, route="/new")
    goal_id = world.loop.ask(command).goal_id
    world.run(20)
    assert (world.config.num_replicas, world.config.max_queued_requests) == (2, 1000)
    assert world.endpoint.target.route is None
    world.loop.command(ControlRollout(name="a", action=RolloutAction.PROMOTE))
    assert world.end(goal_id) is GoalStatus.SUCCEEDED
    assert world.config == command.backend_config
    endpoint = world.endpoint
    assert endpoint.target.route == "/new"
    assert endpoint.last_good == endpoint.target
    assert not world.loop.command(command).changes


def test_what_was_set_since_by_other_commands_stays() -> None:
    world = World(rollout=WAITS)
    goal_id = world.loop.ask(rolled("v2", rollout=WAITS, num=4, route="/new")).goal_id
    world.run(20)
    world.loop.ask(Scale(backend_tag="a", num_replicas=3))
    world.loop.ask(SetEndpointOptions(endpoint="a", options={"relative_slo_ms": 50}))
    world.loop.command(ControlRollout(name="a", action=RolloutAction.PROMOTE))
    assert world.end(goal_id) is GoalStatus.SUCCEEDED
    assert world.config.num_replicas == 3
    target = world.endpoint.target
    assert (target.route, target.options.relative_slo_ms) == ("/new", 50)


def test_a_route_that_another_endpoint_took_meanwhile_aborts_it() -> None:
    world = World(rollout=WAITS)
    goal_id = world.loop.ask(rolled("v2", rollout=WAITS, route="/new")).goal_id
    world.loop.ask(CreateEndpoint(endpoint="e", traffic={TAG: 1.0}, route="/new"))
    world.run(20)
    world.loop.command(ControlRollout(name="a", action=RolloutAction.PROMOTE))
    assert world.end(goal_id) is GoalStatus.FAILED
    assert "its route /new belongs to the endpoint default/e by now" in world.loop.goal(goal_id).error


@pytest.mark.parametrize("how", ["deploy", "update"])
def test_a_configuration_that_replicas_apply_is_rolled_out_and_then_applied_in_place(how: str) -> None:
    world = World()
    update = UpdateBackendConfig(backend_tag="a", config={"user_config": "new"})
    goal_id = world.loop.ask(rolled("v1", config="new") if how == "deploy" else update).goal_id
    before = world.loop.running()
    assert world.loop.checkpoint.backends[CANARY].target.backend_config.user_config == "new"
    assert world.config.user_config is None
    assert world.end(goal_id) is GoalStatus.SUCCEEDED
    assert world.config.user_config == "new"
    assert world.loop.running() == before, "their code stays"


def test_deleting_it_while_its_rollout_waits_for_the_one_before_leaves_nothing() -> None:
    world = World(rollout=WAITS)
    world.loop.ask(rolled("v2", rollout=WAITS))
    world.run(20)
    goal_id = world.loop.ask(rolled("v3")).goal_id
    world.loop.done(DeleteDeployment(name="a"))
    assert world.loop.goal_status(goal_id) is GoalStatus.SUPERSEDED
    assert not world.loop.checkpoint.backends
    assert not world.loop.checkpoint.rollouts


def test_aborting_it_while_it_waits_for_the_one_before() -> None:
    world = World(rollout=WAITS)
    world.loop.ask(rolled("v2", rollout={**WAITS, "keeps_failed": True}))
    world.run(20)
    goal_id = world.loop.ask(rolled("v3", rollout={**STEPS, "keeps_failed": True})).goal_id
    world.loop.command(ControlRollout(name="a", action=RolloutAction.ABORT))
    assert world.end(goal_id) is GoalStatus.FAILED
    assert set(world.loop.checkpoint.backends) == {TAG}, "its version never ran"


def test_another_version_is_refused_while_one_is_promoted_and_an_earlier_one_is_not() -> None:
    world = World()
    goal_id = world.loop.ask(rolled("v2")).goal_id
    world.run(300, until=RolloutState.PROMOTING)
    assert world.loop.ask(rolled("v2")).goal_id == goal_id
    with pytest.raises(Conflict, match=f"is being promoted to another version by {goal_id}"):
        world.loop.ask(rolled("v3"))
    world.loop.done(rolled("v1"))
    assert world.loop.goal_status(goal_id) is GoalStatus.FAILED
    assert world.loop.backend().target.version == "v1"


def test_an_aborted_promotion_takes_all_of_the_deploy_back() -> None:
    world = World()
    goal_id = world.loop.ask(rolled("v2", num=3, route="/new")).goal_id
    world.run(300, until=RolloutState.PROMOTING)
    assert world.endpoint.target.route == "/new"
    world.loop.command(ControlRollout(name="a", action=RolloutAction.ABORT))
    assert world.end(goal_id) is GoalStatus.FAILED
    assert world.loop.backend().target.version == "v1"
    assert (world.config.num_replicas, world.endpoint.target.route) == (2, None)


def test_an_aborted_promotion_of_a_configuration_goes_back_to_the_one_before() -> None:
    world = World()
    goal_id = world.loop.ask(rolled("v1", config="new")).goal_id
    world.run(300, until=RolloutState.PROMOTING)
    world.loop.command(ControlRollout(name="a", action=RolloutAction.ABORT))
    assert world.end(goal_id) is GoalStatus.FAILED
    assert world.config.user_config is None


def test_autoscaling_is_paused_by_each_rollout_and_goes_on_after_the_last() -> None:
    scaling = {"min_replicas": 1, "max_replicas": 4}
    world = World(rollout=WAITS)
    world.loop.done(rolled("v1", rollout=WAITS, autoscaling_config=scaling))
    world.loop.ask(rolled("v2", rollout=WAITS, autoscaling_config=scaling))
    world.run(10)
    goal_id = world.loop.ask(rolled("v3", autoscaling_config=scaling)).goal_id
    assert world.loop.backend().autoscaling is None
    assert world.end(goal_id) is GoalStatus.SUCCEEDED
    assert world.loop.backend().autoscaling is not None
    assert world.config.num_replicas == 2


def test_a_plan_tells_the_rollout_with_its_steps() -> None:
    world = World()
    before = world.loop.checkpoint
    after = before.applied(decide(before, rolled("v2", num=3), world.loop.now).changes)
    view = forecast(before, after, world.loop.observed, world.loop.now)
    assert view.updating
    assert (
        "a rollout of default/a starts: its requests go to version v2 by the steps 25%, 100%, and its replicas are "
        "replaced at the end"
    ) in view.notes
    assert {replica.backend_tag for replica in view.replicas} == {CANARY, BASELINE}


def test_what_can_have_no_rollout_is_refused_with_the_field() -> None:
    loop = Loop()
    with pytest.raises(BadField, match=r"backend_config\.rollout\.steps"):
        loop.ask(rolled(rollout={"steps": ["50%"]}))
    with pytest.raises(msgspec.ValidationError, match=r"unknown field `step` - at `\$\.rollout`"):
        rolled(rollout={"step": []})
    with pytest.raises(BadField, match=r"backend_config\.rollout: is for deployments"):
        loop.ask(create_backend(rollout=STEPS))
    loop.done(create_backend())
    with pytest.raises(BadField, match=r"config\.rollout: is for deployments"):
        loop.ask(UpdateBackendConfig(backend_tag="b", config={"rollout": STEPS}))
    with pytest.raises(BadField, match=r"config\.rollout.*unknown field `step`"):
        loop.ask(UpdateBackendConfig(backend_tag="b", config={"rollout": {"step": []}}))
    with pytest.raises(BadField, match="name: is too long"):
        loop.ask(rolled(name="a" * 60))


def test_fields_of_rollout_are_changed_by_themselves() -> None:
    world = World()
    world.loop.done(UpdateBackendConfig(backend_tag="a", config={"rollout": {"max_latency_ratio": 3.0}}))
    assert world.config.rollout == RolloutConfig(steps=("25%", "100%"), max_latency_ratio=3.0)


def test_a_canary_stays_what_it_is_as_long_as_a_proxy_may_send_to_it() -> None:
    world = World(rollout=WAITS)
    world.loop.ask(rolled("v2", rollout=WAITS))
    world.run(20)
    assert world.rollout.is_in_force
    world.loop.are_proxies_slow = True
    world.loop.ask(rolled("v3", rollout=WAITS))
    world.run(20)
    canary = world.loop.checkpoint.backends[CANARY]
    assert (canary.target.version, canary.deleting) == ("v2", False)
    world.loop.are_proxies_slow = False
    world.run(20)
    assert world.loop.checkpoint.backends[CANARY].target.version == "v3"


def test_an_old_version_that_no_longer_starts_is_nothing_to_compare_with() -> None:
    world = World()
    goal_id = world.loop.ask(rolled("v2")).goal_id
    baseline = world.loop.checkpoint.backends[BASELINE]
    broken = msgspec.structs.replace(baseline, start_failures=3, last_error="no such model")
    world.loop.checkpoint = world.loop.checkpoint.applied(ObjectChanges(puts=(broken,)))
    assert world.end(goal_id) is GoalStatus.FAILED
    assert world.loop.goal(goal_id).error == (
        "default/a--baseline does not start (the old version is broken: deploy without a rollout): no such model"
    )
    world.loop.done(msgspec.structs.replace(rolled("v2"), skips_rollout=True))
