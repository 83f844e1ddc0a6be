"""The access log: what a line says, how long it may get, and that a log which nobody takes harms no request."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from serve_common.config.backend import HttpOptions
from serve_common.dispatch.calls import RequestSpec
from serve_common.names import BackendTag, EndpointTag, ReplicaTag
from serve_common.protocol.frames import RequestKind
from serve_common.routing.route_table import TrafficSplit
from serve_common.telemetry.trace_context import ALWAYS, Sampler
from serve_proxy.adapters import access_writer
from serve_proxy.adapters.access_writer import AccessWriter
from serve_proxy.core.access_line import LINE_BYTES_MAX, AccessLine, AccessLines
from serve_proxy.core.headers import read_request_headers
from serve_proxy.core.problems import Problem
from serve_proxy.http.requests import HttpRequests
from serve_proxy.shell.request_observers import AccessLog, RequestTraces
from tests.support.recorded_spans import RecordedSpans

IDS = {"service": "proxy", "proxy_id": "p1"}
AT = 1_700_000_000.25
TAG = BackendTag("default/a")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def line_of(**fields: Any) -> AccessLine:
    known = {
        "kind": "http",
        "method": "GET",
        "path": "/a",
        "status": 200,
        "bytes_in": 0,
        "bytes_out": 2,
        "duration_ms": 1.5,
        "request_id": "r1",
    }
    return AccessLine(**{**known, **fields})


def encoded(line: AccessLine) -> dict[str, Any]:
    whole = AccessLines(IDS).encode(line, AT)
    assert whole.endswith(b"}\n")
    assert whole.count(b"\n") == 1
    assert len(whole) <= LINE_BYTES_MAX
    told: dict[str, Any] = json.loads(whole)
    return told


# -- the line ---------------------------------------------------------------------------------------------------------


def test_a_line_says_what_is_known_and_bears_the_ids_of_its_process() -> None:
    assert encoded(line_of(endpoint_tag="default/a", attempts=2)) == {
        "event": "request",
        "kind": "http",
        "method": "GET",
        "path": "/a",
        "status": 200,
        "bytes_in": 0,
        "bytes_out": 2,
        "duration_ms": 1.5,
        "request_id": "r1",
        "endpoint_tag": "default/a",
        "attempts": 2,
        **IDS,
        "level": "info",
        "timestamp": "2023-11-14T22:13:20.250000Z",
    }


@pytest.mark.parametrize("text", ['"},{"', "a\r\nb", "\\", "\x00\x1b[2J", "grüß", "\ud800"])
def test_no_text_breaks_out_of_its_line(text: str) -> None:
    told = encoded(line_of(path=text, request_id=text, client=text))
    assert told["status"] == 200
    assert told["path"] == text.replace("\ud800", "?")


@pytest.mark.parametrize("character", ["x", '"', "\x01", "\U0001f600", "\udfff"])
def test_whatever_is_in_it_a_line_can_be_written_in_one_piece(character: str) -> None:
    texts = {name: character * 5000 for name, kind in AccessLine.__annotations__.items() if kind == "str"}
    assert encoded(line_of(**texts))["event"] == "request"


# -- what becomes of a request ----------------------------------------------------------------------------------------


class Rig:
    """An access log whose lines are kept."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self.lines: list[AccessLine] = []
        self.spans = None if sampler is None else RecordedSpans(sampler)
        traces = None if self.spans is None else RequestTraces(self.spans.tracer)
        self.log = AccessLog(self.lines.append, traces)

    def begin(self, path: str = "/a/b", **headers: str):
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        self.read = read_request_headers(raw, 2)
        body = SimpleNamespace(total_bytes=7)
        self.log.start(self.read, "GET", path, "http", "r1", peer="10.0.0.1:5", body=body)
        assert self.read.observer is not None
        return self.read.observer

    def ask(self, kind: RequestKind = RequestKind.HTTP, **fields: Any) -> RequestSpec:
        endpoint: Any = SimpleNamespace(tag=EndpointTag("default/e"), split=TrafficSplit({TAG: 1.0}))
        known = {"method": "GET", "path": "/a/b", "route": "/a", "query": "", "headers": [], "body": b""}
        return RequestSpec(
            **{**known, **fields},
            endpoint=endpoint,
            kind=kind,
            request_id="r1",
            traceparent=self.read.traceparent,
            is_repeatable=True,
            deadline=1.0,
        )

    @property
    def line(self) -> dict[str, Any]:
        (line,) = self.lines
        told: dict[str, Any] = msgspec.to_builtins(line)
        assert told.pop("duration_ms") >= 0
        return told


def test_a_request_that_was_sent_twice_names_the_replica_that_answered() -> None:
    rig = Rig()
    followed = rig.begin(x_forwarded_for="192.0.2.7, 10.0.0.9", traceparent=PARENT)
    followed.on_request(rig.ask())
    assert followed.attempt_started(ReplicaTag("default/b#1"), may_queue=False) == PARENT
    followed.attempt_failed("busy", "no room")
    followed.attempt_ended(0)
    followed.attempt_started(ReplicaTag("default/b#2"), may_queue=False)
    followed.attempt_ended(200)
    followed.ended(200, None, 11)
    followed.ended(499)
    assert rig.line == {
        "kind": "http",
        "method": "GET",
        "path": "/a/b",
        "status": 200,
        "bytes_in": 7,
        "bytes_out": 11,
        "request_id": "r1",
        "endpoint_tag": "default/e",
        "backend_tag": "default/b",
        "replica_tag": "default/b#2",
        "attempts": 2,
        "client": "192.0.2.7:0",
    }


def test_a_request_that_was_refused_says_why_and_which_backend_it_was_for() -> None:
    rig = Rig()
    followed = rig.begin()
    followed.on_request(rig.ask())
    followed.ended(503, Problem(status=503, code="queue_full", message="5 wait"), 20)
    line = rig.line
    assert (line["status"], line["error"], line["backend_tag"]) == (503, "queue_full", TAG)
    assert "replica_tag" not in line
    assert line["client"] == "10.0.0.1:5"


def test_what_a_client_chooses_is_bounded_before_it_waits_to_be_written() -> None:
    rig = Rig()
    rig.begin(path="/" + "x" * 100_000).ended(404)
    assert len(rig.lines[0].path) < 500
    rig.log.refused("M" * 9000, "/" + "y" * 9000, "r1", "", Problem(status=400, code="c", message=""))
    assert len(msgspec.json.encode(rig.lines[1])) < 1000


def test_a_stream_that_broke_off_says_how_far_it_came_and_why() -> None:
    rig = Rig()
    followed = rig.begin()
    followed.on_request(rig.ask())
    answer = SimpleNamespace(written_bytes=0, failure="")
    followed.sends(answer, is_stream=True)
    answer.written_bytes, answer.failure = 3000, "replica_died"
    followed.ended(499)
    assert (rig.line["kind"], rig.line["bytes_out"], rig.line["error"]) == ("stream", 3000, "replica_died")


@pytest.mark.parametrize(("code", "told"), [(1000, 1000), (0, 1006)])
def test_a_socket_says_what_went_both_ways_and_how_it_ended(code: int, told: int) -> None:
    rig = Rig()
    followed = rig.begin()
    followed.on_request(rig.ask(kind=RequestKind.WEBSOCKET))
    socket = SimpleNamespace(
        received_messages=2,
        received_message_bytes=20,
        sent_messages=3,
        sent_message_bytes=30,
        last_code=code,
        failure="",
    )
    followed.talks(socket)
    followed.ended(101)
    line = rig.line
    assert (line["kind"], line["status"], line["close_code"]) == ("websocket", 101, told)
    assert (line["messages_in"], line["bytes_in"]) == (2, 20)
    assert (line["messages_out"], line["bytes_out"]) == (3, 30)


@pytest.mark.parametrize("is_sampled", [True, False])
def test_a_traced_request_is_followed_by_both_and_one_that_is_not_sampled_only_logged(
    is_sampled: bool,
) -> None:
    rig = Rig(ALWAYS)
    followed = rig.begin(traceparent=PARENT if is_sampled else PARENT[:-1] + "0")
    followed.on_request(rig.ask())
    followed.waits("replica")
    sent_along = followed.attempt_started(ReplicaTag("default/b#1"), may_queue=True)
    followed.attempt_ended(200)
    followed.ended(200)
    assert rig.line.get("trace_id") == (PARENT.split("-")[1] if is_sampled else None)
    assert rig.spans is not None
    assert rig.spans.names == (["queue", "attempt default/b", "GET /a"] if is_sampled else [])
    assert sent_along.endswith("-01" if is_sampled else "-00")


async def test_nobody_follows_requests_unless_the_option_says_so() -> None:
    lines: list[AccessLine] = []
    requests = HttpRequests(
        SimpleNamespace(memory=None), HttpOptions(), new_request_id=str, log_request=lines.append
    )
    assert requests.observer is None
    requests.use(HttpOptions(access_log=True), ())
    assert isinstance(requests.observer, AccessLog)
    requests.use(HttpOptions(), ())
    assert requests.observer is None
    await requests.close(1.0)


# -- writing ----------------------------------------------------------------------------------------------------------


class Gate:
    """What the writer writes to: takes pieces while it is open."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_open.set()
        self.is_tried = threading.Event()
        self.refused = 0
        self.pieces: list[bytes] = []
        self.error: OSError | None = None
        self._changed = threading.Condition()

    def __call__(self, piece: bytes) -> None:
        self.is_tried.set()
        assert self.is_open.wait(10)
        with self._changed:
            self._changed.notify_all()
            if self.error is not None:
                self.refused += 1
                raise self.error
            self.pieces.append(piece)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for piece in self.pieces for line in piece.splitlines()]

    def until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, 10)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def writer(gate: Gate) -> Iterator[AccessWriter]:
    writer = AccessWriter(IDS, SimpleNamespace(now=lambda: AT), gate)
    yield writer
    gate.is_open.set()
    writer.close(10)


def test_lines_are_written_many_at_once_in_order_and_none_is_torn(gate: Gate, writer: AccessWriter) -> None:
    for number in range(1000):
        writer.add(line_of(request_id=str(number)))
    writer.close(10)
    assert [line["request_id"] for line in gate.lines] == [str(number) for number in range(1000)]
    assert all(piece.endswith(b"}\n") and len(piece) <= LINE_BYTES_MAX for piece in gate.pieces)
    assert len(gate.pieces) < 200


def test_a_log_that_nobody_takes_holds_up_nobody_and_says_how_many_lines_are_missing(
    gate: Gate, writer: AccessWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_writer, "WAITING_LINES_MAX", 10)
    gate.is_open.clear()
    writer.add(line_of())
    assert gate.is_tried.wait(10)
    for _ in range(25):
        writer.add(line_of())
    gate.is_open.set()
    gate.until(lambda: any(line["event"] == "log_lines_dropped" for line in gate.lines))
    writer.close(10)
    assert [line["event"] for line in gate.lines].count("request") == 11
    (dropped,) = [line for line in gate.lines if line["event"] == "log_lines_dropped"]
    assert (dropped["count"], dropped["log"], dropped["proxy_id"]) == (15, "access", "p1")


def test_lines_that_cannot_be_written_are_told_of_once_that_is_possible(
    gate: Gate, writer: AccessWriter
) -> None:
    gate.error = OSError("the disk is full")
    writer.add(line_of())
    gate.until(lambda: gate.refused == 2)  # the line, and what tells that it is missing
    gate.error = None
    writer.add(line_of())
    writer.close(10)
    assert [line["event"] for line in gate.lines] == ["request", "log_lines_dropped"]
    assert gate.lines[1]["count"] == 1


def test_a_writer_that_had_nothing_to_write_closes_at_once(writer: AccessWriter) -> None:
    writer.close(0)
    assert writer._thread is None
