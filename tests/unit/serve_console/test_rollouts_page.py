"""The pages of rollouts: where a rollout stands, what it needs, and what can be done."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from serve_common.api.rollout_views import GateView, PassedStepView, RolloutView
from serve_common.api.views import EventView
from serve_common.names import GoalId
from serve_console.core.rollouts_page import (
    build_detail,
    build_row,
    build_rows,
    describe_need,
    find_actions,
    find_events,
)
from serve_console.core.system import NOTHING_READ


def gate(kind: str, status: str, needed: int | None = None, *, is_external: bool = False) -> GateView:
    return GateView(
        kind=kind,
        status=status,
        text="figures",
        canary_requests=5,
        requests_needed=needed,
        is_external=is_external,
    )


def rollout(**more: Any) -> RolloutView:
    fields: dict[str, Any] = {
        "backend_tag": "default/hello", "goal_id": GoalId("g1"), "version": "v2", "state": "running", "outcome": "",
        "reason": "", "steps": ["shadow 100% 20s", "10% 5m wait", "100%"], "step": 1, "is_in_force": True,
        "in_force_at": 5.0, "gates": [], "passed": [], "replica_failures": {}, "started_at": 1.0, "decided_at": None,
        "ended_at": None,
    }  # fmt: skip
    return RolloutView(**{**fields, **more})


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (gate("errors", "unknown", 1140), "needs about 1,140 more requests"),
        (gate("latency_p50", "unknown"), "nobody can know yet"),
        (gate("review", "unknown", is_external=True), "a good response from outside"),
        (gate("errors", "passed"), "nothing more"),
        (gate("errors", "failed"), "worse than it may be"),
    ],
)
def test_a_gate_says_in_words_what_its_verdict_needs(view: GateView, expected: str) -> None:
    assert describe_need(view) == expected


def test_a_step_needs_what_its_slowest_gate_needs() -> None:
    slow = build_row(rollout(gates=[gate("errors", "unknown", 40), gate("latency_p50", "unknown", 140)]))
    unknown = build_row(rollout(gates=[gate("errors", "unknown", 40), gate("latency_p50", "unknown")]))
    outside = build_row(
        rollout(gates=[gate("errors", "passed"), gate("review", "unknown", is_external=True)])
    )

    assert slow.need == "needs about 140 more requests"
    assert unknown.need == "nobody can know yet how many requests it needs"
    assert outside.need == "waits for a response from outside"


def test_steps_say_how_long_they_last_who_lets_them_go_on_and_what_those_that_passed_compared() -> None:
    passed = [PassedStepView(step="shadow 100% 20s", passed_at=4.0, requests=1367, why="fine")]

    row = build_row(rollout(passed=passed))

    assert [(step.name, step.hint) for step in row.steps] == [
        ("shadow 100 %", "1,367 compared"),
        ("10 %", "at least 5 min, waits for a person"),
        ("100 %", ""),
    ]
    assert row.current == 1


def test_the_baseline_gets_as_many_requests_as_the_canary() -> None:
    assert build_row(rollout()).split == [("old version", 0.8), ("baseline", 0.1), ("new version", 0.1)]
    assert build_row(rollout(step=2)).split == [("new version", 1.0)]
    assert build_row(rollout(step=0)).split == [("old version", 1.0)]
    assert build_row(rollout(is_in_force=False)).split == []


def test_steps_that_cannot_be_read_are_shown_as_they_are() -> None:
    row = build_row(rollout(steps=["a new kind", "of steps"]))

    assert [step.name for step in row.steps] == ["a new kind", "of steps"]
    assert row.split == []


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ["pause", "step", "promote", "abort"]),
        ({"is_in_force": False}, ["pause", "promote", "abort"]),
        ({"state": "paused"}, ["resume", "promote", "abort"]),
        ({"state": "promoting"}, ["abort"]),
        ({"state": "closing", "outcome": "aborted"}, []),
        ({"state": "ended", "outcome": "promoted"}, []),
    ],
)
def test_only_what_makes_sense_in_a_state_can_be_done(fields: dict[str, Any], expected: list[str]) -> None:
    assert [action.action for action in find_actions(rollout(**fields))] == expected


def test_open_rollouts_come_apart_from_decided_ones_of_which_the_newest_is_first() -> None:
    views = [
        rollout(backend_tag="default/a"),
        rollout(backend_tag="default/b", state="ended", outcome="promoted", decided_at=10.0, ended_at=11.0),
        rollout(backend_tag="default/c", state="closing", outcome="aborted", decided_at=20.0, reason="slow"),
    ]
    system = msgspec.structs.replace(NOTHING_READ, rollouts={view.backend_tag: view for view in views})

    open_rows, ended = build_rows(system)

    assert [row.title for row in open_rows] == ["a"]
    assert [(row.title, row.state, row.summary) for row in ended] == [
        ("c", "aborted", "slow"), ("b", "promoted", ""),
    ]  # fmt: skip
    assert ended[1].current == 3


def test_a_step_whose_gates_have_passed_says_that_it_waits_for_a_person() -> None:
    detail = build_detail(rollout(gates=[gate("errors", "passed")]))

    assert detail.headline == "At step 2 of 3: all gates have passed; it waits for a person to let it go on."


def test_the_timeline_has_what_belongs_to_the_rollout_with_the_newest_first() -> None:
    def event(at: float, kind: str, subject: str, goal_id: str = "", state: str = "running") -> EventView:
        return EventView(at=at, kind=kind, subject=subject, message="m", state=state, goal_id=GoalId(goal_id))

    events = [
        event(-5.0, "replica", "default/hello#1"), event(2.0, "goal", "g1", "g1", "pending"),
        event(3.0, "replica", "default/hello--canary#4"), event(4.0, "replica", "default/other#1"),
        event(5.0, "rollout", "default/hello", "g1", "passed"),
    ]  # fmt: skip

    items = find_events(rollout(), events)

    assert [item.title for item in items] == ["rollout passed", "canary#4 running"]
