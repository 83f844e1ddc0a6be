"""When goals end: not before every live proxy knows, exactly once, and remembered within bounds."""

from __future__ import annotations

import pytest

from serve_common.names import BackendTag, GoalId
from serve_common.wires.commands import DeleteDeployment
from serve_common.wires.views import GoalStatus
from serve_controller.core import goals
from serve_controller.core.checkpoint import Checkpoint, Draft
from serve_controller.core.goals import end_goal, forget_finished, number_of, waits_for
from serve_controller.core.objects import Goal, GoalKind
from serve_controller.core.observed import PROXY_LOST_AFTER_S, observe_bucket
from tests.simulation.closed_loop import BAD_CODE, Loop, deploy


def waiting_for(loop: Loop, goal_id: str | None) -> str:
    goal = next(g for g in loop.checkpoint.goals.values() if g.goal_id == goal_id)
    return waits_for(Draft(loop.checkpoint), loop.observed, goal)


def test_a_goal_waits_until_every_live_proxy_has_applied_the_snapshot() -> None:
    loop = Loop(proxies=2)
    loop.steps(2)
    loop.are_proxies_slow = True
    goal_id = loop.command(deploy()).goal_id
    loop.steps(20)
    assert loop.goal_status(goal_id) is GoalStatus.PENDING
    assert waiting_for(loop, goal_id).startswith("2 proxies have not applied snapshot")
    loop.proxies["proxy-1"] = 10**6
    loop.step()
    assert waiting_for(loop, goal_id).startswith("1 proxies")
    loop.are_proxies_slow = False
    loop.settle()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED


def test_a_goal_does_not_wait_for_a_lost_proxy() -> None:
    loop = Loop(proxies=1)
    loop.steps(2)
    loop.proxies.clear()
    goal_id = loop.command(deploy()).goal_id
    loop.steps(5)
    assert loop.goal_status(goal_id) is GoalStatus.PENDING
    loop.step(PROXY_LOST_AFTER_S)
    loop.step()
    assert loop.goal_status(goal_id) is GoalStatus.SUCCEEDED


def test_a_goal_waits_for_a_bucket_of_which_nothing_is_known() -> None:
    loop = Loop()
    goal_id = loop.command(deploy(num=0)).goal_id
    loop.observed = observe_bucket(loop.observed, None)
    assert waiting_for(loop, goal_id) == "waits for the bucket of snapshots"


def test_a_delete_waits_for_the_last_replica() -> None:
    loop = Loop()
    loop.command(deploy(num=2))
    loop.settle()
    for host in loop.hosts:
        host.is_deaf = True
    goal_id = loop.command(DeleteDeployment(name="a")).goal_id
    loop.steps(3)
    assert waiting_for(loop, goal_id) == "2 replicas still stop"


def test_a_failed_goal_tells_the_users_error_and_its_end_is_bounded() -> None:
    loop = Loop()
    goal_id = loop.command(deploy(code=BAD_CODE)).goal_id
    loop.steps(40, 0.2)
    goal = loop.checkpoint.goals[GoalId(goal_id)]
    assert (goal.status, goal.error) == (GoalStatus.FAILED, "RuntimeError: no")
    draft = Draft(Checkpoint())
    pending = Goal(
        goal_id=GoalId("g1"),
        kind=GoalKind.DEPLOY,
        backend_tag=BackendTag("default/a"),
        status=GoalStatus.PENDING,
        created_at=0.0,
    )
    end_goal(draft, pending, GoalStatus.FAILED, 1.0, "x" * 100_000 + "end")
    ended = draft.goals[GoalId("g1")]
    assert len(ended.error) == goals.ERROR_LENGTH_MAX
    assert ended.error.endswith("end")
    with pytest.raises(AssertionError):
        end_goal(draft, ended, GoalStatus.SUCCEEDED, 2.0)


def test_finished_goals_are_forgotten_by_number_and_age_and_a_backends_newest_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(goals, "FINISHED_KEPT_MAX", 3)
    loop = Loop()
    for number in range(8):
        loop.command(deploy(num=number % 2))
        loop.settle()
    assert len(loop.checkpoint.goals) == 4
    assert loop.backend().goal_id in loop.checkpoint.goals
    draft = Draft(loop.checkpoint)
    forget_finished(draft, loop.now + 3 * goals.FINISHED_KEPT_S)
    assert set(draft.goals) == {loop.backend().goal_id}


@pytest.mark.parametrize(
    ("goal_id", "number"),
    [("g1", 1), ("g123", 123), ("g", 0), ("1", 0), ("", 0), ("g-1", 0), ("g²", 0), ("g" + "9" * 400, 0)],
)
def test_the_number_of_a_goal_is_read_from_its_id(goal_id: str, number: int) -> None:
    assert number_of(GoalId(goal_id)) == number
