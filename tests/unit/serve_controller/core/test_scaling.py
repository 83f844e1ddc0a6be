"""Who decides on the number of replicas: the user wins over the autoscaler, in one way whichever command it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from serve_common.api.commands import (
    DeleteDeployment,
    PauseAutoscaling,
    ResumeAutoscaling,
    Rollback,
    Scale,
    UpdateBackendConfig,
)
from serve_common.api.views import GoalStatus
from serve_common.errors import BadField, Conflict, NotFound
from serve_common.names import BackendTag
from serve_common.protocol.snapshots import BackendSnapshot
from serve_controller.core.autoscaling.values import (
    ScalingDecision,
    ScalingDecisionKind,
    ScalingState,
    ScalingStatus,
)
from serve_controller.core.reconcile import reconcile
from serve_controller.core.scaling import scaling_events
from serve_controller.core.views.backends import view_autoscaling
from tests.support.control_loop.closed_loop import Loop, check_converged
from tests.support.control_loop.orders import BAD_CODE, application, create_backend, deploy, spec
from tests.support.control_loop.pure_host import PureHost

TAG = BackendTag("default/a")
ONE_TO_FIVE = {"min_replicas": 1, "max_replicas": 5}
ZERO_TO_FIVE = {"min_replicas": 0, "max_replicas": 5}


def loop_with(scaling: Mapping[str, Any] = ONE_TO_FIVE, **options: Any) -> Loop:
    loop = Loop(PureHost("host-1"), PureHost("host-2"))
    loop.done(deploy("a", autoscaling_config=dict(scaling), **options))
    return loop


def autoscale(loop: Loop, num: int, tag: BackendTag = TAG) -> None:
    """The autoscaler decides, and a plan takes it in."""
    plan = reconcile(loop.checkpoint, loop.observed, loop.epoch, loop.now, scalings={tag: num})
    loop.record(plan)
    loop.settle()


def num(loop: Loop, tag: str = "default/a") -> int:
    return loop.backend(tag).target.backend_config.num_replicas


# -- deploys -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (ONE_TO_FIVE, 1),
        ({**ONE_TO_FIVE, "initial_replicas": 3}, 3),
        ({"min_replicas": 2, "max_replicas": 5}, 2),
        (ZERO_TO_FIVE, 0),
    ],
)
def test_the_first_deploy_starts_as_many_as_are_initial_or_else_the_fewest(
    scaling: dict[str, int], expected: int
) -> None:
    loop = loop_with(scaling, num=4)
    assert num(loop) == expected
    assert len(loop.running()) == expected
    check_converged(loop)


def test_a_later_deploy_keeps_what_the_load_came_to() -> None:
    loop = loop_with()
    autoscale(loop, 4)
    loop.done(deploy("a", version="v2", num=1, autoscaling_config=ONE_TO_FIVE))
    assert num(loop) == 4
    assert len(loop.running()) == 4


ZERO_BUT_TRIED = {**ZERO_TO_FIVE, "initial_replicas": 1}


def asleep(scaling: Mapping[str, Any]) -> Loop:
    loop = loop_with(scaling)
    autoscale(loop, 0)
    assert (num(loop), len(loop.running())) == (0, 0)
    return loop


@pytest.mark.parametrize(("scaling", "expected"), [(ZERO_BUT_TRIED, 1), (ZERO_TO_FIVE, 0)])
def test_new_code_for_one_that_sleeps_begins_with_as_many_as_are_initial(
    scaling: dict[str, int], expected: int
) -> None:
    loop = asleep(scaling)
    assert not loop.command(deploy("a", autoscaling_config=scaling)).changes  # the same code
    loop.done(deploy("a", version="v2", autoscaling_config=scaling))
    assert (num(loop), len(loop.running())) == (expected, expected)
    check_converged(loop)


def test_new_code_that_cannot_run_is_told_of_although_none_ran_and_none_runs_afterwards() -> None:
    loop = asleep(ZERO_BUT_TRIED)
    bad = loop.command(deploy("a", version="v2", code=BAD_CODE, retries=1, autoscaling_config=ZERO_BUT_TRIED))
    loop.settle()
    assert loop.goal_status(bad.goal_id) is GoalStatus.FAILED
    assert (num(loop), loop.backend().target.version) == (0, "v1")
    assert not loop.running()


def test_new_code_does_not_start_what_a_user_has_set_to_none() -> None:
    loop = loop_with(ZERO_BUT_TRIED)
    loop.done(Scale(backend_tag="a", num_replicas=0))
    loop.done(deploy("a", version="v2", autoscaling_config=ZERO_BUT_TRIED))
    assert (num(loop), len(loop.running())) == (0, 0)


def test_the_same_deploy_again_is_no_change_although_the_load_moved_it() -> None:
    loop = loop_with()
    autoscale(loop, 4)
    assert not loop.command(deploy("a", autoscaling_config=ONE_TO_FIVE)).changes


def test_an_application_and_a_backend_by_itself_are_treated_alike() -> None:
    loop = Loop(PureHost("host-1"), PureHost("host-2"))
    loop.done(application(spec("x", num=3, autoscaling_config={**ONE_TO_FIVE, "initial_replicas": 2})))
    loop.done(create_backend("b", num=3, autoscaling_config={**ONE_TO_FIVE, "initial_replicas": 2}))
    assert (num(loop, "app/x"), num(loop, "default/b")) == (2, 2)
    autoscale(loop, 3, BackendTag("app/x"))
    again = application(spec("x", num=1, autoscaling_config={**ONE_TO_FIVE, "initial_replicas": 2}))
    assert not loop.command(again).changes


@pytest.mark.parametrize(("limits", "expected"), [((3, 5), 3), ((1, 2), 2), ((0, 9), 4)])
def test_new_limits_hold_at_once(limits: tuple[int, int], expected: int) -> None:
    loop = loop_with()
    autoscale(loop, 4) if expected != 3 else autoscale(loop, 1)
    given = {"min_replicas": limits[0], "max_replicas": limits[1]}
    loop.done(UpdateBackendConfig(backend_tag="a", config={"autoscaling_config": given}))
    assert num(loop) == expected
    config = loop.backend().target.backend_config.autoscaling_config
    assert config is not None
    assert (config.min_replicas, config.max_replicas) == limits
    assert config.upscale_delay_s == 30.0


def test_autoscaling_that_is_taken_away_leaves_what_there_is() -> None:
    loop = loop_with()
    autoscale(loop, 4)
    loop.done(UpdateBackendConfig(backend_tag="a", config={"autoscaling_config": None}))
    assert num(loop) == 4
    autoscale(loop, 2)
    assert num(loop) == 4, "the autoscaler has no say any more"


def test_autoscaling_that_begins_goes_on_from_what_there_is() -> None:
    loop = Loop(PureHost("host-1"))
    loop.done(deploy("a", num=3))
    loop.done(deploy("a", num=1, autoscaling_config=ONE_TO_FIVE))
    assert num(loop) == 3


def test_a_deploy_that_fails_goes_back_to_the_old_version_with_what_the_load_came_to_meanwhile() -> None:
    loop = loop_with()
    autoscale(loop, 2)
    bad = loop.command(deploy("a", version="v2", code=BAD_CODE, retries=1, autoscaling_config=ONE_TO_FIVE))
    plan = reconcile(loop.checkpoint, loop.observed, loop.epoch, loop.now, scalings={TAG: 4})
    loop.record(plan)
    loop.settle()
    assert loop.goal_status(bad.goal_id) is GoalStatus.FAILED
    assert loop.backend().target.version == "v1"
    assert (num(loop), len(loop.running())) == (4, 4)


def test_a_rollback_keeps_the_number_within_the_limits_that_come_back() -> None:
    loop = loop_with()
    loop.done(deploy("a", version="v2", autoscaling_config={"min_replicas": 1, "max_replicas": 9}))
    autoscale(loop, 7)
    loop.done(Rollback(name="a"))
    assert loop.backend().target.version == "v1"
    assert num(loop) == 5


# -- the autoscaler ----------------------------------------------------------------------------------------------------


def test_the_autoscaler_moves_within_the_limits_without_a_goal() -> None:
    loop = loop_with()
    goals = set(loop.checkpoint.goals)
    for asked, expected in ((4, 4), (50, 5), (0, 1)):
        autoscale(loop, asked)
        assert (num(loop), len(loop.running())) == (expected, expected)
    assert set(loop.checkpoint.goals) == goals
    check_converged(loop)


def test_the_autoscaler_has_no_say_about_what_is_unknown_not_autoscaled_or_going_away() -> None:
    loop = Loop(PureHost("host-1"))
    loop.done(deploy("a", num=2))
    autoscale(loop, 4)
    autoscale(loop, 4, BackendTag("default/none"))
    assert num(loop) == 2
    other = loop_with()
    other.command(DeleteDeployment(name="a"))
    before = other.checkpoint.backends[TAG]
    plan = reconcile(other.checkpoint, other.observed, other.epoch, other.now, scalings={TAG: 4})
    assert plan.checkpoint.backends[TAG].target == before.target


def test_only_what_was_scaled_to_zero_can_be_woken() -> None:
    def can_wake(loop: Loop) -> bool:
        content = loop.bucket["backends.default.a"].content
        assert isinstance(content, BackendSnapshot)
        return content.can_wake

    loop = loop_with(ZERO_TO_FIVE)
    assert can_wake(loop)
    autoscale(loop, 2)
    assert not can_wake(loop)
    loop.done(Scale(backend_tag="a", num_replicas=0))
    assert not can_wake(loop), "a user wants none"
    loop.command(ResumeAutoscaling(backend_tag="a"))
    loop.settle()
    assert can_wake(loop)


# -- users against the autoscaler --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        Scale(backend_tag="a", num_replicas=3),
        UpdateBackendConfig(backend_tag="default/a", config={"num_replicas": 3}),
    ],
)
def test_a_number_that_a_user_sets_stays_until_autoscaling_is_resumed(command: Any) -> None:
    loop = loop_with()
    loop.done(command)
    verb = "scale" if isinstance(command, Scale) else "update_backend_config"
    assert loop.backend().autoscaling_paused == verb
    autoscale(loop, 5)
    assert (num(loop), len(loop.running())) == (3, 3)
    assert not loop.command(command).changes, "the same again is no change"
    loop.command(ResumeAutoscaling(backend_tag="a"))
    autoscale(loop, 5)
    assert num(loop) == 5


def test_a_pause_outlives_a_deploy_and_a_change_of_the_limits_but_not_the_end_of_autoscaling() -> None:
    loop = loop_with()
    reply = loop.ask(PauseAutoscaling(backend_tag="a"))
    assert (reply.goal_id, reply.updating) == (None, True)
    assert not loop.command(PauseAutoscaling(backend_tag="a")).changes
    loop.done(deploy("a", version="v2", autoscaling_config=ONE_TO_FIVE))
    loop.done(UpdateBackendConfig(backend_tag="a", config={"autoscaling_config": {"max_replicas": 7}}))
    autoscale(loop, 6)
    assert num(loop) == 1
    loop.done(deploy("a", version="v3"))
    assert loop.backend().autoscaling_paused == ""


def test_a_pause_ends_with_an_autoscaling_that_failed_to_come_up() -> None:
    loop = Loop(PureHost("host-1"))
    loop.done(deploy("a", num=2))
    bad = deploy("a", version="v2", code=BAD_CODE, retries=1, autoscaling_config=ONE_TO_FIVE)
    loop.command(bad)
    failing = loop.command(Scale(backend_tag="a", num_replicas=3))
    assert loop.backend().autoscaling_paused == "scale"
    loop.settle()
    assert loop.goal_status(failing.goal_id) is GoalStatus.FAILED
    assert (num(loop), loop.backend().autoscaling_paused) == (2, "")


def test_scale_sets_the_number_of_what_is_not_autoscaled_too() -> None:
    loop = Loop(PureHost("host-1"))
    loop.done(deploy("a"))
    loop.done(Scale(backend_tag="a", num_replicas=3))
    assert (num(loop), loop.backend().autoscaling_paused) == (3, "")


@pytest.mark.parametrize(
    ("command", "error", "match"),
    [
        (
            Scale(backend_tag="a", num_replicas=6),
            BadField,
            r"^num_replicas: is 6; it must be between 1 and 5",
        ),
        (Scale(backend_tag="a", num_replicas=-1), BadField, r"^num_replicas: is -1"),
        (Scale(backend_tag="b", num_replicas=1), NotFound, "there is no backend 'b'"),
        (
            UpdateBackendConfig(backend_tag="a", config={"num_replicas": 0}),
            BadField,
            r"^config\.num_replicas: is 0",
        ),
        (
            UpdateBackendConfig(backend_tag="a", config={"autoscaling_config": {"min_replicas": 9}}),
            BadField,
            r"^config\.autoscaling_config\.min_replicas: is 9, above max_replicas 5",
        ),
        (PauseAutoscaling(backend_tag="b"), NotFound, "there is no backend 'b'"),
        (ResumeAutoscaling(backend_tag="plain"), Conflict, "has no autoscaling_config"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(command: Any, error: Any, match: str) -> None:
    loop = loop_with()
    loop.done(deploy("plain", version="v1"))
    with pytest.raises(error, match=match):
        loop.command(command)


# -- telling -----------------------------------------------------------------------------------------------------------


def decision(target: int, verdict: ScalingDecisionKind = ScalingDecisionKind.UP) -> ScalingDecision:
    return ScalingDecision(
        target=target, state=ScalingState(), verdict=verdict, seen=7.5, wanted=3.75, why="7.5 requests seen"
    )


def test_an_event_says_what_moved_and_why_and_only_what_moved() -> None:
    loop = loop_with()
    before = loop.checkpoint
    autoscale(loop, 4)
    decisions = {TAG: decision(4), BackendTag("default/gone"): decision(2)}
    (event,) = scaling_events(before, loop.checkpoint, decisions, 5.0)
    assert (event.kind, event.subject, event.state) == ("autoscaling", TAG, "up")
    assert event.message == "1 → 4 replicas: 7.5 requests seen"
    assert scaling_events(loop.checkpoint, loop.checkpoint, decisions, 5.0) == []


def test_the_view_shows_what_was_seen_or_why_nothing_is_done() -> None:
    loop = loop_with()
    status = ScalingStatus(decision=decision(4), decided_at=90.0, source="prometheus", read_at=88.0)
    (view,) = view_autoscaling(loop.checkpoint, {TAG: status}, 91.0)
    assert (view.verdict, view.seen, view.wanted, view.num_replicas) == ("up", 7.5, 3.75, 1)
    assert (view.source, view.data_age_s, view.why) == ("prometheus", 3.0, "7.5 requests seen")
    loop.command(PauseAutoscaling(backend_tag="a"))
    (view,) = view_autoscaling(loop.checkpoint, {TAG: status}, 91.0)
    assert (view.paused, view.verdict) == ("pause_autoscaling", "")
    assert "paused by pause_autoscaling" in view.why
    assert msgspec.json.encode(view)
