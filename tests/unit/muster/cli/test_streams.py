"""Commands that go on: what they listen to, what they show of it, and how they end."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
from typer.testing import Result

from muster.client.rates import compute_rates, quantile
from muster.client.requests import FeedMessage, StackAddress
from serve_common.api.views import (
    AutoscalingView,
    BackendLoad,
    EndpointLoad,
    EventView,
    LoadView,
    StatusView,
)
from serve_common.config.backend import BackendConfig
from serve_common.errors import BusUnavailable
from serve_common.names import GoalId
from serve_common.protocol.reports import ReplayRecentLogs
from serve_common.protocol.subjects import Subjects

SUBJECTS = Subjects()
Run = Callable[..., Result]


def log_line(message: str, second: int = 0, **fields: Any) -> dict[str, Any]:
    line = {
        "timestamp": f"2026-01-01T10:00:{second:02}.123456Z",
        "level": "info",
        "event": "log",
        "logger": "app",
        "message": message,
        "replica_tag": "default/digits#1",
        "backend_tag": "default/digits",
    }
    return {**line, **fields}


def said(subject: str, *lines: dict[str, Any]) -> FeedMessage:
    return FeedMessage(subject, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


REPLICA = SUBJECTS.log("replica", "default/digits#1")


class PlayedFeed:
    """Says what a test put there; then the person at the terminal presses Ctrl-C."""

    def __init__(self) -> None:
        self.subjects: list[str] = []
        self.recalls: list[ReplayRecentLogs] = []
        self.remembered: list[FeedMessage] = []
        self.later: list[FeedMessage] = []
        self.failure: Exception | None = None
        self._asked: list[FeedMessage] = []

    @asynccontextmanager
    async def listen(self, _address: StackAddress, subjects: Sequence[str]) -> AsyncIterator[PlayedFeed]:
        if self.failure is not None:
            raise self.failure
        self.subjects = list(subjects)
        yield self

    async def publish(self, subject: str, payload: bytes) -> None:
        assert subject == SUBJECTS.log_replay
        recall = msgspec.json.decode(payload, type=ReplayRecentLogs)
        self.recalls.append(recall)
        for heard in self.remembered:
            kind = SUBJECTS.parse_log_kind(heard.subject)
            self._asked.append(FeedMessage(SUBJECTS.recalled_log(recall.token, kind), heard.payload))

    async def receive(self, within_s: float | None = None) -> FeedMessage | None:
        if self._asked:
            return self._asked.pop(0)
        if within_s is not None:
            return None
        if not self.later:
            raise KeyboardInterrupt
        return self.later.pop(0)


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> PlayedFeed:
    monkeypatch.setattr("muster.cli.logs._REPLAY_S", 0.02)
    return PlayedFeed()


@pytest.fixture
def run(muster: Run, feed: PlayedFeed) -> Run:
    return partial(muster, listen=feed.listen)


def test_logs_of_a_deployment_begin_with_what_is_remembered_in_order_and_follow(
    run: Run, feed: PlayedFeed
) -> None:
    feed.remembered = [
        said(REPLICA, log_line("third", 3), log_line("first", 1)),
        said(SUBJECTS.log("replica", "default/digits#2"), log_line("second", 2, request_id="r1")),
    ]
    feed.later = [
        said(REPLICA, log_line("now", 4, level="error", exception="Traceback\n  ValueError: no\n")),
        said(REPLICA, log_line("of another", 5, backend_tag="default/other")),
        said(SUBJECTS.recalled_log("x", "replica"), log_line("for another asker", 6)),
    ]
    result = run("logs", "digits", "--tail", "2")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "10:00:02.123 INFO     digits#1 app: second request_id=r1",
        "10:00:03.123 INFO     digits#1 app: third",
        "10:00:04.123 ERROR    digits#1 app: now",
        "    Traceback",
        "      ValueError: no",
    ]
    [recall] = feed.recalls
    assert recall.limit == 2
    assert feed.subjects == [
        "serve.log.replica.default.digits.>",
        f"serve.log.recalled.{recall.token}.*",
    ]


def test_logs_can_be_narrowed_and_come_as_lines_of_json(run: Run, feed: PlayedFeed) -> None:
    service = {"timestamp": "2026-01-01T10:00:00Z", "event": "bus_lost", "proxy_id": "p1"}
    feed.later = [
        said(SUBJECTS.log("proxy", "p1"), {**service, "level": "warning"}, {**service, "level": "info"}),
        said(REPLICA, log_line("not a proxy", level="error")),
    ]
    result = run("logs", "--service", "proxy", "--level", "warning", "--tail", "0", "--json")
    assert [json.loads(line)["level"] for line in result.stdout.splitlines()] == ["warning"]
    assert feed.subjects[:-1] == ["serve.log.proxy.>"]
    assert feed.recalls == []
    feed.later = [said(REPLICA, log_line("a", request_id="r1"), log_line("b", request_id="r2"))]
    assert run("logs", "--request-id", "r2", "--tail", "0").stdout.split()[-2:] == ["b", "request_id=r2"]
    assert feed.subjects[:-1] == [
        f"serve.log.{kind}.>" for kind in ("controller", "proxy", "host", "replica")
    ]


def test_lines_of_a_deployment_that_wants_json_are_shown_as_they_are(run: Run, feed: PlayedFeed) -> None:
    feed.later = [said(REPLICA, log_line("as text"), log_line("as JSON", encoding="JSON", lineno=7))]
    text, line = run("logs", "digits", "--tail", "0").stdout.splitlines()
    assert text.endswith("app: as text")
    assert (json.loads(line)["message"], json.loads(line)["lineno"]) == ("as JSON", 7)


def test_logs_end_by_themselves_when_told_and_show_no_control_characters(run: Run, feed: PlayedFeed) -> None:
    feed.remembered = [
        said(SUBJECTS.log("host", "h1"), {"event": "ray_ready", "host_id": "h1", "level": "info", "cpus": 4}),
        said(REPLICA, log_line("\x1b[2Jgone?", host_id="h1"), log_line("elsewhere", host_id="h2")),
        FeedMessage(REPLICA, b"no json\n"),
    ]
    feed.later = [said(REPLICA, log_line("later"))]
    lines = run("logs", "--no-follow", "--host", "h1").stdout.splitlines()
    assert sorted(lines) == [
        "-            INFO     h1 ray_ready cpus=4",
        "10:00:00.123 INFO     digits#1 app: �[2Jgone?",
    ]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("logs", "--service", "nats"), "--service: 'nats' is none of controller"),
        (("logs", "--level", "loud"), "--level: 'loud' is none of debug"),
    ],
)
def test_what_logs_cannot_mean_is_refused(run: Run, arguments: tuple[str, ...], complaint: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr


def test_a_stack_that_is_away_has_its_exit_code(run: Run, feed: PlayedFeed) -> None:
    feed.failure = BusUnavailable("NATS does not answer")
    assert run("logs").exit_code == 3


def test_events_follow_after_those_that_were(run: Run, controller: Any, feed: PlayedFeed) -> None:
    old = EventView(at=0.0, kind="replica", subject="default/digits#1", message="it runs", state="running")
    new = EventView(at=9.0, kind="replica", subject="default/digits#2", message="", state="starting")
    begun = EventView(at=9.0, kind="backend", subject="default/digits", message="", goal_id=GoalId("g7"))
    goal = EventView(
        at=9.0, kind="goal", subject="g7", message="it broke", state="failed", goal_id=GoalId("g7")
    )
    other = msgspec.structs.replace(goal, subject="g8", goal_id=GoalId("g8"))
    controller.answers["get_events"] = [old]
    feed.later = [
        FeedMessage(SUBJECTS.event("replica", "default/digits#1"), msgspec.json.encode(old)),
        FeedMessage(SUBJECTS.event("replica", "default/digits#2"), msgspec.json.encode(new)),
        FeedMessage(SUBJECTS.event("goal", "g8"), msgspec.json.encode(other)),
        FeedMessage(SUBJECTS.event("backend", "default/digits"), msgspec.json.encode(begun)),
        FeedMessage(SUBJECTS.event("goal", "g7"), msgspec.json.encode(goal)),
        FeedMessage(SUBJECTS.event("replica", "default/digits#2"), b"unreadable"),
    ]
    result = run("events", "digits", "--follow", "--json")
    assert result.exit_code == 0, result.output
    shown = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(each["subject"], each["state"]) for each in shown] == [
        ("default/digits#1", "running"),
        ("default/digits#2", "starting"),
        ("default/digits", ""),
        ("g7", "failed"),
    ]
    assert feed.subjects == ["serve.event.>"]
    feed.later = []
    assert "replica     digits#1 running it runs" in run("events", "-f").stdout


def load(at: float, requests: float, errors: float, buckets: dict[str, float]) -> LoadView:
    return LoadView(
        at=at,
        endpoints=[
            EndpointLoad(
                endpoint_tag="default/digits", requests=requests, errors=errors, seconds_buckets=buckets
            )
        ],
        backends=[BackendLoad(backend_tag="default/digits", in_flight=3, queued=2)],
        unreachable=["http://10.0.0.9:9102/metrics"],
    )


def test_top_shows_what_happened_between_two_looks(run: Run, controller: Any) -> None:
    looks = iter(
        [
            load(100.0, 1000, 10, {"0.1": 900, "1": 1000, "+Inf": 1000}),
            load(102.0, 1200, 20, {"0.1": 1000, "1": 1200, "+Inf": 1200}),
        ]
    )
    controller.answers["get_load"] = lambda _request: next(looks)
    controller.answers["get_autoscaling"] = [
        AutoscalingView(
            backend_tag="default/digits", verdict="up", num_replicas=4, min_replicas=1, max_replicas=9
        )
    ]
    result = run("top", "--once", "--interval-s", "0.2")
    assert result.exit_code == 0, result.output
    [row] = [line for line in result.stdout.splitlines() if line.startswith("digits ")]
    assert row.split() == ["digits", "100.0", "5.0", "100", "ms", "982", "ms", "2", "3", "1/4", "up"]
    assert "do not answer: http://10.0.0.9:9102/metrics" in result.stdout


def test_rows_know_what_they_do_not_know() -> None:
    status = StatusView(
        controller_id="c", epoch=1, store_available=True, snapshot_id=1, deployments=[], hosts=[], proxies=[]
    )
    before, after = load(1.0, 50, 0, {"1": 50, "+Inf": 50}), load(2.0, 5, 0, {"1": 5, "+Inf": 5})
    [row] = compute_rates(before, after, status, [])
    assert (row.requests_per_s, row.p99_s, row.running) == (5.0, 0.99, None)
    [same] = compute_rates(after, msgspec.structs.replace(after, at=3.0), status, [])
    assert (same.requests_per_s, same.p50_s) == (0.0, None)
    assert BackendConfig().num_replicas == 1


@pytest.mark.parametrize(
    ("q", "buckets", "expected"),
    [
        (0.5, {}, None),
        (0.5, {1.0: 0.0, float("inf"): 0.0}, None),
        (0.5, {1.0: 10.0, 2.0: 10.0, float("inf"): 10.0}, 0.5),
        (0.99, {1.0: 0.0, 2.0: 100.0, float("inf"): 100.0}, 1.99),
        (0.99, {1.0: 50.0, 2.0: 50.0, float("inf"): 100.0}, 2.0),
    ],
)
def test_a_quantile_is_as_prometheus_has_it(
    q: float, buckets: dict[float, float], expected: float | None
) -> None:
    assert quantile(q, buckets) == (None if expected is None else pytest.approx(expected))
