"""Rollouts in the closed loop of the pure core: steps, verdicts, ends, and what people do to them."""

from __future__ import annotations

import pytest

from serve_common.api.commands import (
    DeleteDeployment,
    RolloutAction,
    Scale,
    StartRollout,
    UpdateBackendConfig,
)
from serve_common.api.views import GoalStatus
from serve_common.config.rollout import RolloutConfig
from serve_common.errors import BadField, Conflict
from serve_common.names import BackendTag, EndpointTag
from serve_common.protocol.subjects import endpoint_key
from serve_controller.core.rollouts.record import RolloutOutcome, RolloutState
from serve_controller.core.views.deployments import view_deployment
from tests.support.control_loop.closed_loop import check_converged, check_fixpoint
from tests.support.control_loop.orders import BAD_CODE, deploy
from tests.support.control_loop.rollout_world import BASELINE, CANARY, QUICK, TAG, RolloutWorld
from tests.support.control_loop.traffic import Behaviour, Traffic, model


def test_a_version_that_is_no_worse_takes_the_place_of_the_old_one() -> None:
    world = RolloutWorld()
    goal_id = world.start()
    world.run_to_step(0)
    assert world.weights() == {TAG: 0.8, CANARY: 0.1, BASELINE: 0.1}
    world.run_to_step(1)
    assert world.weights() == {CANARY: 0.5, BASELINE: 0.5}
    judged = view_deployment(world.loop.checkpoint, TAG).rollout_replicas
    assert [(each.replica_tag.partition("#")[0], each.version) for each in judged] == [
        *[(CANARY, "v2")] * len(world.loop.checkpoint.get_replicas(CANARY)),
        *[(BASELINE, "v1")] * len(world.loop.checkpoint.get_replicas(BASELINE)),
    ]
    assert len(judged) >= 2
    world.run(600, until=RolloutState.ENDED)
    assert world.rollout.outcome is RolloutOutcome.PROMOTED, world.rollout.progress
    world.loop.settle()
    assert view_deployment(world.loop.checkpoint, TAG).rollout_replicas == []
    assert world.loop.goal_status(goal_id) is GoalStatus.SUCCEEDED
    assert world.weights() == {TAG: 1.0}
    assert world.loop.backend().target.version == "v2"
    last_good = world.loop.backend().last_good
    assert last_good is not None
    assert last_good.version == "v2"
    assert set(world.loop.checkpoint.backends) == {TAG}
    assert [one.step for one in world.rollout.passed] == ["10%", "50%"]
    check_converged(world.loop)
    check_fixpoint(world.loop)


def test_a_version_that_always_fails_is_gone_after_a_few_requests() -> None:
    world = RolloutWorld(model(errors=1.0))
    goal_id = world.start()
    world.run(60, until=RolloutState.ENDED)
    assert world.rollout.outcome is RolloutOutcome.ABORTED
    assert "errors" in world.rollout.reason
    assert world.traffic.failed[CANARY] <= 120, "of 600 a second"
    world.loop.settle()
    assert world.loop.goal_status(goal_id) is GoalStatus.FAILED
    assert world.loop.goal(goal_id).error == world.rollout.reason
    assert world.weights() == {TAG: 1.0}
    assert world.loop.backend().target.version == "v1"
    assert set(world.loop.checkpoint.backends) == {TAG}


@pytest.mark.parametrize(
    ("new", "gate"),
    [
        (model(errors=0.05), "errors"),
        (model(refusals=0.2), "client_errors"),
        (model(median_s=0.08), "latency"),
        (model(slow_from=0.95, slowdown=2.0), "latency_p99"),
    ],
)
def test_a_worse_version_is_aborted_for_what_is_worse(new: Behaviour, gate: str) -> None:
    world = RolloutWorld(new)
    world.start()
    world.run(600, until=RolloutState.ENDED)
    assert world.rollout.outcome is RolloutOutcome.ABORTED, world.rollout.progress
    assert gate in world.rollout.reason


def test_times_that_hardly_vary_are_compared_too() -> None:
    steady, slower = model(spread=0.001), model(spread=0.001, median_s=0.075)
    for new, outcome in ((steady, RolloutOutcome.PROMOTED), (slower, RolloutOutcome.ABORTED)):
        world = RolloutWorld(new)
        world.traffic = Traffic(world.loop, TAG, steady, new, rate=600.0, seed=1)
        world.start()
        world.run(600, until=RolloutState.ENDED)
        assert world.rollout.outcome is outcome, world.rollout.progress


def test_a_hang_of_everything_does_not_keep_it_from_a_verdict() -> None:
    world = RolloutWorld()
    world.start()
    world.run_to_step(0)
    usual, world.traffic = (
        world.traffic,
        Traffic(world.loop, TAG, model(median_s=3.0), model(median_s=3.0), rate=600.0, seed=2),
    )
    world.run(5)
    world.traffic = usual
    world.run(120)
    assert world.rollout.step > 0, world.rollout.reason


def test_a_replica_that_stands_still_for_a_moment_condemns_no_version() -> None:
    """Its requests are slow together, which says no more than one of them does."""
    world = RolloutWorld()
    world.start(steps=("10% 60s", "50%", "100%"))
    world.run_to_step(0)
    world.run(10)
    usual, world.traffic = (
        world.traffic,
        Traffic(world.loop, TAG, model(), model(median_s=3.0), rate=600.0, seed=2),
    )
    world.run(3)
    world.traffic = usual
    world.run(90)
    assert world.rollout.outcome is None, world.rollout.reason


def test_without_requests_it_stays_where_it_is_and_says_so() -> None:
    world = RolloutWorld(rate=0.0)
    world.start()
    world.run_to_step(0)
    world.run(120)
    assert world.rollout.state is RolloutState.RUNNING
    assert world.rollout.step == 0
    assert "0 of 0" in world.rollout.reason
    assert "waits for 300 responses" in world.rollout.reason


def test_copies_harm_nobody() -> None:
    world = RolloutWorld(model(errors=1.0))
    world.start(steps=("shadow 50%", *QUICK))
    world.run(60, until=RolloutState.ENDED)
    assert world.rollout.outcome is RolloutOutcome.ABORTED
    assert world.traffic.served.keys() == {TAG}
    assert world.traffic.copied[CANARY] > 0


def test_a_version_that_does_not_start_ends_it_before_any_request() -> None:
    world = RolloutWorld()
    goal_id = world.start(code=BAD_CODE)
    world.run(120, until=RolloutState.ENDED)
    assert world.rollout.outcome is RolloutOutcome.ABORTED
    assert "does not start" in world.rollout.reason
    assert world.loop.goal_status(goal_id) is GoalStatus.FAILED
    assert CANARY not in world.traffic.served


def test_replicas_that_die_end_it() -> None:
    world = RolloutWorld(rate=20.0)
    world.start(max_replica_failures=0)
    world.run_to_step(0)
    [tag] = world.loop.replicas(CANARY)
    next(host for host in world.loop.hosts if tag in host.running()).kill(tag)
    world.run(60, until=RolloutState.ENDED)
    assert world.rollout.outcome is RolloutOutcome.ABORTED
    assert "died or fell ill" in world.rollout.reason


def test_a_lost_host_is_no_fault_of_the_version() -> None:
    world = RolloutWorld(rate=20.0)
    world.start(max_replica_failures=0)
    world.run_to_step(0)
    [host_id] = world.loop.hosts_of(CANARY)
    next(host for host in world.loop.hosts if host.host_id == host_id).is_up = False
    world.run(60)
    assert world.rollout.state is RolloutState.RUNNING
    assert world.rollout.failures == {}
    assert world.loop.routed(CANARY) != set(), "it runs elsewhere"


def test_it_waits_for_a_person_where_a_step_says_so() -> None:
    world = RolloutWorld()
    world.start(steps=("10% wait", "50%", "100%"))
    world.run(300)
    assert (world.rollout.step, world.rollout.reason) == (0, "waits for a person: `muster rollout step`")
    world.do(RolloutAction.STEP, step=1)
    world.run(5)
    assert world.rollout.step == 0, "the command was about another step"
    world.do(RolloutAction.STEP, step=0)
    world.run_to_step(1)


def test_a_paused_one_stays_and_is_still_aborted() -> None:
    world = RolloutWorld(model(errors=0.0))
    world.start()
    world.run_to_step(0)
    world.do(RolloutAction.PAUSE)
    world.run(300)
    assert (world.rollout.step, world.rollout.state) == (0, RolloutState.PAUSED)
    world.do(RolloutAction.RESUME)
    world.run_to_step(1)
    worse = RolloutWorld(model(errors=0.5))
    worse.start()
    worse.run_to_step(0)
    worse.do(RolloutAction.PAUSE)
    worse.run(60, until=RolloutState.ENDED)
    assert worse.rollout.outcome is RolloutOutcome.ABORTED


def _prepare_second_step(world: RolloutWorld) -> None:
    """Let the first step pass while proxies apply nothing, so that the second is prepared for long."""
    world.start(steps=("50%", "100%"))
    world.run_to_step(0)
    world.loop.are_proxies_slow = True
    world.do(RolloutAction.STEP)
    world.run(5)
    assert (world.rollout.step, world.rollout.is_in_force) == (1, False)
    assert world.weights() == {CANARY: 0.5, BASELINE: 0.5}


def test_it_is_judged_while_its_next_step_is_prepared() -> None:
    world = RolloutWorld(rate=100.0)
    _prepare_second_step(world)
    world.traffic = Traffic(world.loop, TAG, model(), model(errors=1.0), rate=100.0, seed=3)
    world.run(10)
    assert world.rollout.outcome is RolloutOutcome.ABORTED
    assert world.weights() == {TAG: 1.0}
    world.loop.are_proxies_slow = False
    world.run(10, until=RolloutState.ENDED)


def test_a_paused_one_does_not_begin_the_step_that_is_prepared() -> None:
    world = RolloutWorld(rate=100.0)
    _prepare_second_step(world)
    world.do(RolloutAction.PAUSE)
    world.loop.are_proxies_slow = False
    world.run(60)
    assert world.weights() == {CANARY: 0.5, BASELINE: 0.5}
    world.do(RolloutAction.RESUME)
    world.run_to_step(1)


def test_a_promotion_by_command_skips_the_other_steps() -> None:
    world = RolloutWorld(rate=10.0)
    goal_id = world.start()
    world.run_to_step(0)
    world.do(RolloutAction.PROMOTE)
    world.run(120, until=RolloutState.ENDED)
    world.loop.settle()
    assert world.loop.goal_status(goal_id) is GoalStatus.SUCCEEDED
    assert world.loop.backend().target.version == "v2"


def test_an_abort_by_command_gives_all_requests_back_in_one_change() -> None:
    world = RolloutWorld(rate=10.0)
    world.start()
    world.run_to_step(0)
    before = world.loop.bucket[endpoint_key(EndpointTag(TAG))].snapshot_id
    world.do(RolloutAction.ABORT, reason="it smells")
    world.run(10, until=RolloutState.ENDED)
    assert world.loop.bucket[endpoint_key(EndpointTag(TAG))].snapshot_id > before
    assert world.weights() == {TAG: 1.0}
    assert world.rollout.reason == "by command: it smells"
    with pytest.raises(Conflict, match="has ended"):
        world.do(RolloutAction.STEP)


def test_an_aborted_version_is_not_tried_again_by_itself() -> None:
    world = RolloutWorld(rate=10.0)
    world.start()
    world.do(RolloutAction.ABORT)
    world.run(10, until=RolloutState.ENDED)
    with pytest.raises(Conflict, match="is refused for another"):
        world.start()
    world.loop.command(
        StartRollout(name="a", version="v2", replica_config={"import_path": "good:Code"}, again=True)
    )


@pytest.mark.parametrize("how", ["deploy", "delete"])
def test_another_change_of_the_deployment_replaces_it(how: str) -> None:
    world = RolloutWorld(rate=10.0)
    goal_id = world.start()
    world.run_to_step(0)
    world.loop.command(
        deploy(version="v3", num=2, cpus=0.5) if how == "deploy" else DeleteDeployment(name="a")
    )
    world.run(20)
    assert world.loop.goal_status(goal_id) is GoalStatus.SUPERSEDED
    world.loop.settle()
    assert set(world.loop.checkpoint.backends) == ({TAG} if how == "deploy" else set())
    assert (BackendTag(TAG) in world.loop.checkpoint.rollouts) == (how == "deploy")
    if how == "deploy":
        assert world.loop.backend().target.version == "v3"
        assert world.weights() == {TAG: 1.0}


def test_it_is_scaled_with_its_deployment() -> None:
    world = RolloutWorld(rate=10.0)
    world.start()
    world.run_to_step(0)
    world.loop.command(Scale(backend_tag="a", num_replicas=4))
    world.run(5)
    world.do(RolloutAction.STEP)
    world.run_to_step(1)
    assert len(world.loop.replicas(CANARY)) == 2
    assert world.rollout.state is RolloutState.RUNNING


def test_any_leader_goes_on_with_the_evidence_that_there_is() -> None:
    world = RolloutWorld()
    world.start()
    world.run_to_step(0)
    world.run(5)
    before = world.rollout.gates[0].worse.seen
    world.loop.take_over()
    world.run(2)
    after = world.rollout.gates[0].worse.seen
    assert 0 < before.canary < after.canary
    counted = world.loop.request_counts[CANARY]
    assert counted.successes + counted.errors >= after.canary, "nothing is counted twice"


def test_a_deadline_ends_it() -> None:
    world = RolloutWorld(rate=0.0)
    world.start(deadline_s=30.0)
    world.run(60, until=RolloutState.ENDED)
    assert world.rollout.outcome is RolloutOutcome.ABORTED
    assert "the deadline of 30 s" in world.rollout.reason


def test_what_was_counted_for_the_rollout_before_says_nothing_of_the_next() -> None:
    world = RolloutWorld(model(errors=1.0))
    world.start(cool_down_s=0.0)
    world.run(60, until=RolloutState.ENDED)
    assert world.rollout.outcome is RolloutOutcome.ABORTED
    world.traffic = Traffic(world.loop, TAG, model(), model(), rate=600.0, seed=4)
    # At once: the failed canary's replicas drain yet, and its backend becomes that of the next.
    world.start(steps=("50%", "100%"))
    world.run(600, until=RolloutState.ENDED)
    assert world.rollout.outcome is RolloutOutcome.PROMOTED, world.rollout.reason


@pytest.mark.parametrize(("num", "steps"), [(1, ("50%", "100%")), (6, ("20%", "50%", "100%"))])
def test_canary_and_baseline_run_on_the_same_hosts(num: int, steps: tuple[str, ...]) -> None:
    world = RolloutWorld(num=num)
    world.start(steps=steps)
    world.run_to_step(len(steps) - 2)
    placed = [
        sorted(str(r.host_id) for r in world.loop.checkpoint.get_replicas(tag).values())
        for tag in (CANARY, BASELINE)
    ]
    assert len(placed[0]) == (num + 1) // 2
    assert placed[0] == placed[1]


def test_the_fields_of_one_rollout_are_laid_over_the_deployments_own() -> None:
    world = RolloutWorld()
    own = RolloutConfig(steps=("50%", "100%"), max_error_increase=0.05)
    world.loop.done(UpdateBackendConfig(backend_tag=TAG, config={"rollout": own}))
    command = StartRollout(name="a", version="v2", rollout_fields={"steps": ["25%", "100%"]})
    world.loop.ask(command)
    assert world.rollout.config == RolloutConfig(steps=("25%", "100%"), max_error_increase=0.05)
    world.do(RolloutAction.ABORT)
    world.run(10, until=RolloutState.ENDED)
    with pytest.raises(BadField, match=r"rollout_fields\.stepz"):
        world.loop.ask(StartRollout(name="a", version="v3", rollout_fields={"stepz": []}))
    with pytest.raises(BadField, match=r"rollout\.steps"):
        world.loop.ask(StartRollout(name="a", version="v3", rollout_fields={"steps": ["5%"]}))


def test_versions_that_were_aborted_are_refused_whatever_was_tried_since() -> None:
    world = RolloutWorld(rate=10.0)
    for version in ("v2", "v3"):
        world.loop.ask(StartRollout(name="a", version=version))
        world.do(RolloutAction.ABORT, reason=f"{version} smells")
        world.run(10, until=RolloutState.ENDED)
    for version in ("v2", "v3"):
        with pytest.raises(Conflict, match=f"is refused for another .*{version} smells"):
            world.loop.ask(StartRollout(name="a", version=version))
    world.loop.ask(StartRollout(name="a", version="v2", again=True))
    world.do(RolloutAction.ABORT)
    world.run(10, until=RolloutState.ENDED)
    world.loop.now += 3600.0
    world.loop.ask(StartRollout(name="a", version="v3"))


def test_what_would_change_nothing_or_cannot_be_changed_is_refused() -> None:
    world = RolloutWorld()
    with pytest.raises(Conflict, match="nothing of 'default/a' would change"):
        world.loop.ask(StartRollout(name="a"))
    with pytest.raises(BadField, match=r"backend_config\.num_replicas"):
        world.loop.ask(StartRollout(name="a", version="v2", backend_config={"num_replicas": 5}))


def test_a_paused_rollout_takes_no_step() -> None:
    world = RolloutWorld(rate=10.0)
    world.start()
    world.run_to_step(0)
    world.do(RolloutAction.PAUSE)
    with pytest.raises(Conflict, match="resume it first"):
        world.do(RolloutAction.STEP)


def test_a_failed_version_that_is_kept_goes_with_its_deployment() -> None:
    world = RolloutWorld(rate=10.0)
    world.start(keeps_failed=True)
    world.run_to_step(0)
    world.do(RolloutAction.ABORT)
    world.run(10, until=RolloutState.ENDED)
    assert CANARY in world.loop.checkpoint.backends
    world.loop.done(DeleteDeployment(name="a"))
    world.loop.settle()
    assert not world.loop.checkpoint.backends
