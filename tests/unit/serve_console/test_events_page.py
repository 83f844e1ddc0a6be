"""The page of events and history: what a filter lets pass, and what a change altered."""

from __future__ import annotations

import pytest

from serve_common.api.views import EventView, HistoryView
from serve_console.core.events_page import (
    HISTORY_PAGE,
    ROWS_MAX,
    EventSelection,
    build_diff,
    build_history,
    parse_filter,
    select_events,
)


def event(at: float = 0.0, kind: str = "replica", subject: str = "default/a#1", **more: str) -> EventView:
    return EventView(at=at, kind=kind, subject=subject, **{"message": "runs on host-1", **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "passes"),
    [
        (EventSelection(), True),
        (EventSelection(kind="replica", subject="default/a"), True),
        (EventSelection(subject="a"), True),
        (EventSelection(subject="default/a#1"), True),
        (EventSelection(subject="default/ab"), False),
        (EventSelection(kind="goal", subject="default/a"), False),
        (EventSelection(text="HOST-1"), True),
        (EventSelection(text="host-2"), False),
        (EventSelection(subject="g7"), True),
    ],
)
def test_a_filter_lets_pass_what_matches_all_its_fields(wanted: EventSelection, passes: bool) -> None:
    assert wanted.passes(event(goal_id="g7")) is passes


def test_a_filter_survives_its_address() -> None:
    wanted = parse_filter({"kind": "goal", "subject": " default/a&b ", "text": "x" * 500, "other": "1"})

    assert wanted == EventSelection("goal", "default/a&b", "x" * 120)
    assert wanted.query.startswith("kind=goal&subject=default%2Fa%26b&text=xxx")


def test_a_flood_shows_at_most_so_many_rows_and_leaves_the_earlier_ones_alone() -> None:
    events = [event(at) for at in range(20)] + [event(30 + number / 1000) for number in range(3000)]

    blocks = select_events(reversed(events), EventSelection())

    assert blocks.latest[0] == events[-1]
    assert blocks.count <= ROWS_MAX
    assert blocks.is_cut


def test_new_events_leave_the_earlier_part_as_it_is() -> None:
    events = [event(at) for at in range(40)]

    before = select_events(reversed(events), EventSelection())
    after = select_events(reversed([*events, event(41.0)]), EventSelection())

    assert before.earlier == after.earlier
    assert [each.at for each in after.latest[:2]] == [41.0, 39]


def change(number: int) -> HistoryView:
    return HistoryView(
        id=number, at=1.0, principal="ana", epoch=1, verb="scale", subject="default/a", goal_id=None,
        request={"num_replicas": 3}, old={"replicas": 2}, new={"replicas": 3},
    )  # fmt: skip


def test_a_full_page_of_history_leads_to_the_next() -> None:
    full = build_history([change(number) for number in range(HISTORY_PAGE + 1, 0, -1)])
    last = build_history([change(1)])

    assert (len(full.rows), full.before) == (HISTORY_PAGE, 2)
    assert last.before is None


def test_a_change_shows_the_lines_that_it_altered() -> None:
    assert build_diff({"a": 1, "b": 2}, {"a": 1, "b": 3}) == [
        " {",
        '   "a": 1,',
        '-  "b": 2',
        '+  "b": 3',
        " }",
    ]
    assert build_diff({"a": 1}, {"a": 1}) == []
    assert build_diff(None, "new") == ['+"new"']
