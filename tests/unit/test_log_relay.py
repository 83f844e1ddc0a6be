"""Log lines on their way out: bounded, counted when too many, never in the way of who logs."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from serve_common.protocol.logs import LogFilter, RecallLogs
from serve_common.protocol.subjects import Subjects
from serve_common.telemetry.log_forwarder import (
    PIECE_BYTES_MAX,
    LogForwarder,
    TokenBucket,
    pieces,
    recalled,
)
from serve_common.telemetry.log_lines import TEXT_LENGTH_MAX, cut, encode_line, encode_text_line, user_fields


class FixedClock:
    def __init__(self) -> None:
        self.at = 1_700_000_000.0

    def now(self) -> float:
        return self.at


class Outlet:
    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.is_away = False
        self.came = threading.Event()

    def publish(self, piece: bytes, lines: int) -> bool:
        if self.is_away:
            return False
        assert piece.count(b"\n") == lines
        self.pieces.append(piece)
        self.came.set()
        return True

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for piece in self.pieces for line in piece.splitlines()]


def numbered(count: int) -> Iterator[bytes]:
    return (encode_line({"n": number}) for number in range(count))


def test_what_is_offered_is_written_and_published_by_a_thread_of_its_own() -> None:
    written: list[bytes] = []
    outlet = Outlet()
    relay = LogForwarder(written.append, {}, FixedClock())
    relay.use(outlet)
    relay.offer(b'{"n": 1}\n')
    assert outlet.came.wait(30)
    assert (written, outlet.pieces) == ([b'{"n": 1}\n'], [b'{"n": 1}\n'])


def test_lines_wait_for_an_outlet_and_for_one_that_is_away_and_the_oldest_give_way() -> None:
    clock, outlet = FixedClock(), Outlet()
    relay = LogForwarder(None, {"service": "s"}, clock)
    for line in numbered(5):
        relay.offer(line)
    relay.flush()
    outlet.is_away = True
    relay.use(outlet)
    for _ in range(4):  # more than may wait, none too fast
        clock.at += 10
        for line in numbered(400):
            relay.offer(line)
        relay.flush()
    outlet.is_away = False
    clock.at += 10
    relay.flush()
    *lines, told = outlet.lines
    assert len(lines) == 1000
    assert (told["event"], told["count"], told["service"]) == ("log_lines_dropped", 605, "s")


def test_a_flood_is_written_whole_but_published_in_part_and_its_bytes_are_bounded() -> None:
    clock, outlet = FixedClock(), Outlet()
    written: list[bytes] = []
    relay = LogForwarder(written.append, {}, clock)
    relay.use(outlet)
    with relay._round:  # as long as nothing can be carried out
        for line in numbered(50_000):
            relay.offer(b" " * 100 + line)
        clock.at += 1
    relay.flush()
    out = [json.loads(line) for line in b"".join(written).splitlines()]
    assert len(out) < 45_000
    assert out[-1]["event"] == "log_lines_dropped"
    assert out[-1]["count"] + len(out) - 1 == 50_000
    assert all(len(piece) <= PIECE_BYTES_MAX for piece in written)
    assert len(outlet.lines) == 1000
    clock.at += 1
    relay.flush()
    assert outlet.lines[-1]["event"] == "log_lines_dropped"
    assert len(relay.recent()) == 200


def test_a_forked_copy_writes_its_own_lines_and_not_its_parents() -> None:
    reading, writing = os.pipe()
    relay = LogForwarder(lambda piece: void(os.write(writing, piece)), {}, FixedClock())
    with relay._lock:
        relay._waiting.append(b"the parent's\n")
    child = os.fork()
    if child == 0:
        relay.offer(b"the child's\n")
        relay.flush()
        os._exit(0 if relay.is_in_forked_child else 1)
    assert os.waitpid(child, 0)[1] == 0
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        assert file.read() == b"the child's\n"


def void(_: object) -> None:
    return None


def test_a_rate_allows_a_burst_and_then_so_many_a_second() -> None:
    rate = TokenBucket(10, 20)
    assert [sum(rate.take(at) for _ in range(100)) for at in (5.0, 5.0, 6.0, 1000.0)] == [20, 0, 10, 20]


def test_pieces_hold_whole_lines_in_order() -> None:
    lines = [b"x" * 30_000 + b"\n"] * 5
    assert [count for _, count in pieces(lines)] == [2, 2, 1]
    assert b"".join(piece for piece, _ in pieces(lines)) == b"".join(lines)
    assert pieces([]) == []


class Rude:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "value",
    [object(), Rude(), {1: object()}, {(1, 2): 3}, "\ud800", float("nan"), b"bytes", "x" * 10**6, [Rude()]],
)
def test_a_line_can_be_made_of_anything(value: object) -> None:
    line = encode_line({"event": "e", "value": value})
    assert json.loads(line)["event"] == "e"
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert len(line) < PIECE_BYTES_MAX


def test_texts_are_cut_and_say_by_how_much() -> None:
    assert cut("short") == "short"
    assert cut("x" * (TEXT_LENGTH_MAX + 7)).endswith("… (7 more characters)")
    assert json.loads(encode_text_line("y" * 100_000))["event"] == "long_log_line"


def test_fields_of_the_user_take_nobodys_place() -> None:
    assert user_fields({"level": 3, "user": "u"}, {"level"}) == {"extra_level": 3, "user": "u"}
    assert len(user_fields({str(n): n for n in range(100)}, set())) == 65


def test_recalled_lines_are_those_asked_for_the_newest_of_them() -> None:
    lines = [
        encode_line({"n": n, "level": ("info", "error")[n % 2], "backend_tag": "shop/digits"})
        for n in range(10)
    ]

    def ask(token: str = "t1", limit: int = 3, **wanted: Any) -> list[tuple[str, list[int]]]:
        asked = RecallLogs(token=token, limit=limit, filter=LogFilter(**wanted))
        return [
            (subject, [json.loads(line)["n"] for line in piece.splitlines()])
            for subject, piece in recalled(msgspec.json.encode(asked), "replica", lines, Subjects())
        ]

    assert ask() == [("serve.log.recalled.t1.replica", [7, 8, 9])]
    assert ask(level="warning") == [("serve.log.recalled.t1.replica", [5, 7, 9])]
    assert ask(backend_tag="shop/other") == ask(limit=0) == ask(kinds=("proxy",)) == []


def test_subjects_of_logs_name_their_process_and_can_be_followed() -> None:
    subjects = Subjects("serve")
    assert subjects.log("replica", "shop/digits#3") == "serve.log.replica.shop.digits.3"
    assert subjects.logs() == "serve.log.>"
    assert subjects.logs("replica", "shop/digits") == "serve.log.replica.shop.digits.>"
    assert subjects.parse_log_kind("serve.log.proxy.p1") == "proxy"
    assert subjects.parse_log_kind(subjects.recalled_log("t", "host")) == "recalled"
