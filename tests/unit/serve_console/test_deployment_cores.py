"""The page of a deployment: its timeline, differences and log lines."""

from __future__ import annotations

import msgspec
import pytest

from serve_common.api.views import EventView, GoalStatus, HistoryView, RevisionView
from serve_common.config.backend import BackendConfig
from serve_common.names import GoalId
from serve_console.core.config_diff import LINES_MAX, build_diff, list_settings
from serve_console.core.deployment_page import diff_entry, diff_revisions
from serve_console.core.log_lines import LogBuffer, LogEntry, parse_entry
from serve_console.core.plain_text import clean_text
from serve_console.core.timeline import merge_timeline

NAME = "default/a"


def event(at: float, kind: str, subject: str, message: str, state: str = "", goal: str = "") -> EventView:
    return EventView(
        at=at,
        kind=kind,
        subject=subject,
        message=message,
        state=state,
        goal_id=GoalId(goal) if goal else None,
    )


def entry(number: int, at: float, verb: str, goal: str | None = "g1", **more: object) -> HistoryView:
    return HistoryView(
        id=number, at=at, principal="ana", epoch=1, verb=verb, subject=NAME,
        goal_id=None if goal is None else GoalId(goal), request=more.pop("request", {}), **more,
    )  # fmt: skip


def test_a_change_is_shown_once_with_its_author_and_the_end_of_its_goal() -> None:
    events = [
        event(10.0, "audit", NAME, "scale, claimed by ana", "scale", "g1"),
        event(10.1, "goal", "g1", "scale default/a", "pending", "g1"),
        event(12.0, "goal", "g1", "scale default/a", "succeeded", "g1"),
        event(12.0, "goal", "g9", "deploy default/b", "succeeded", "g9"),
        event(12.0, "replica", "default/ab#1", "runs on h", "running"),
    ]
    items = merge_timeline(NAME, events, [entry(1, 10.0, "scale", request={"num_replicas": 3})])
    assert [(item.title, item.text) for item in items] == [
        ("g1 succeeded", "scale default/a"),
        ("Scale to 3", "by ana"),
    ]


def test_replicas_that_say_the_same_at_once_are_one_item() -> None:
    events = [
        event(10.0 + number, "replica", f"{NAME}#{number}", "runs on h", "running") for number in range(6)
    ]
    later = event(90.0, "replica", f"{NAME}#7", "runs on h", "running")
    items = merge_timeline(NAME, [*events, later], [])
    assert [item.title for item in items] == ["Replica #7", "Replicas #0, #1, #2, #3 and 2 more"]


def test_a_timeline_is_bounded_to_the_newest() -> None:
    events = [event(float(number), "backend", NAME, f"m{number}") for number in range(500)]
    items = merge_timeline(NAME, events, [], most=10)
    assert [item.text for item in items[:2]] == ["m499", "m498"]
    assert len(items) == 10


def test_a_difference_shows_only_what_changed_with_some_lines_around() -> None:
    old = {"backend": {"num_replicas": 1, "version": "v1", "a": 1, "b": 2, "c": 3}}
    new = {"backend": {**old["backend"], "num_replicas": 4}}
    lines = build_diff(old, new)
    assert [line for line in lines if line[0] in "+-"] == ["-  num_replicas: 1", "+  num_replicas: 4"]
    assert build_diff(old, old) == []


def test_a_long_difference_is_cut_and_says_so() -> None:
    lines = build_diff({}, {str(number): number for number in range(2000)})
    assert len(lines) == LINES_MAX + 1
    assert "left out" in lines[-1]


def test_settings_that_are_not_the_default_are_marked() -> None:
    group = list_settings("Backend", BackendConfig(num_replicas=3))
    found = {setting.name: setting for setting in group.settings}
    assert (found["num_replicas"].value, found["num_replicas"].default, group.changed) == ("3", "1", 1)
    assert not found["circuit_breaker.window_s"].is_changed
    assert [setting.name for setting in group.settings if setting.is_shown] == ["num_replicas"]


def test_the_difference_of_revisions_comes_from_the_history() -> None:
    def revision(number: int, goal: str) -> RevisionView:
        return RevisionView(
            revision=number, at=1.0, goal_id=GoalId(goal), status=GoalStatus.SUCCEEDED, is_current=False,
            version="v", import_path="m:M", num_replicas=1,
        )  # fmt: skip

    first = entry(
        1, 1.0, "deploy", "g1", new={f"backend {NAME}": {"n": 1}, f"endpoint {NAME}": {"route": "/a"}}
    )
    second = entry(
        2,
        2.0,
        "scale",
        "g2",
        old={f"backend {NAME}": {"n": 1}},
        new={f"backend {NAME}": {"n": 2}, "other": 1},
    )
    revisions = [revision(3, "g3"), revision(2, "g2"), revision(1, "g1")]
    found = diff_revisions(revisions, [second, first], NAME, 1, 2)
    assert found is not None
    assert found.lines is not None
    assert [line for line in found.lines if line[0] in "+-"] == ["-  n: 1", "+  n: 2"]
    gone = diff_revisions(revisions, [second, first], NAME, 2, 3)
    assert gone is not None
    assert gone.lines is None
    assert diff_revisions(revisions, [], NAME, 1, 9) is None
    assert [line for line in diff_entry(second, NAME) if line[0] in "+-"] == ["-  n: 1", "+  n: 2"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07x", "x"),
        ("a\x00b\x08", "a\ufffdb\ufffd"),
        ("a\u202eb", "a\ufffdb"),
        ("one\r\ntwo\ttab", "one\ntwo\ttab"),
        ("x" * 30, "x" * 9 + "…"),
    ],
)
def test_text_of_users_loses_what_would_steer_a_terminal(text: str, shown: str) -> None:
    assert clean_text(text, 10 if len(text) == 30 else 100) == shown


def test_a_line_shows_its_message_fields_and_traceback() -> None:
    line = {
        "timestamp": "2026-01-01T00:00:00Z", "level": "error", "event": "log", "logger": "m", "message": "bad",
        "replica_tag": f"{NAME}#3", "request_id": "r1", "exception": "Traceback\n  x\x1b[1m", "user": 7,
    }  # fmt: skip
    found = parse_entry(line, 5.0)
    assert (found.source, found.request_id, found.level) == ("a#3", "r1", "error")
    assert found.text == "m: bad user=7\nTraceback\n  x"
    assert found.at == 1767225600.0
    assert parse_entry({"event": "print", "message": 3, "timestamp": "?"}, 5.0).at == 5.0


def test_a_flood_is_cut_to_the_newest_lines_and_what_is_left_out_is_counted() -> None:
    buffer = LogBuffer(0.0, per_s=200.0)
    lines = LogEntry(at=0.0, level="info", source="a", text="x", request_id="")
    sent = left_out = 0
    for tick in range(1, 41):
        for number in range(1250):
            buffer.add(msgspec.structs.replace(lines, at=float(tick * 10_000 + number)))
        missing, taken = buffer.take(tick / 4)
        assert not taken or taken[-1].at == tick * 10_000 + 1249
        sent, left_out = sent + len(taken), left_out + missing
    assert sent <= 200 * 11
    assert sent + left_out == 50_000


def test_few_lines_are_all_sent() -> None:
    buffer = LogBuffer(0.0, per_s=200.0)
    for number in range(150):
        buffer.add(LogEntry(at=float(number), level="info", source="a", text="x", request_id=""))
    left_out, taken = buffer.take(0.1)
    assert (left_out, len(taken)) == (0, 150)
    assert buffer.take(0.2) == (0, [])
