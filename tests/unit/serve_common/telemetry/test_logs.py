"""Log lines to a standard error that is full, slow or gone: nobody who logs notices, and what is missing is told."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from serve_common.errors import BusUnavailable
from serve_common.protocol.reports import LogFilter, ReplayRecentLogs
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.health import LoopLag
from serve_common.runtime.operations import register_process_metrics
from serve_common.telemetry import log_lines as standard_error
from serve_common.telemetry.log_forwarder import (
    PIECE_BYTES_MAX,
    LogForwarder,
    NatsLogSink,
    pieces,
    recalled,
)
from serve_common.telemetry.log_lines import (
    DISK_FULL,
    TEXT_LENGTH_MAX,
    RefusedMessages,
    StandardError,
    cut,
    dropped_lines,
    encode_line,
    encode_text_line,
    user_fields,
)

CLOCK = SimpleNamespace(now=lambda: 1_700_000_000.0)


@pytest.fixture
def descriptor() -> Iterator[int]:
    """A device on which there is never any room."""
    opened = os.open("/dev/full", os.O_WRONLY)
    yield opened
    os.close(opened)


def put_in_place(descriptor: int, path: Path) -> None:
    """What ``descriptor`` writes goes to a file with room from now on."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, descriptor)
    os.close(file)


def test_lines_that_a_full_disk_did_not_take_are_counted_and_told_once_there_is_room(
    descriptor: int, tmp_path: Path
) -> None:
    log, before = StandardError({"service": "s"}, CLOCK, descriptor), dropped_lines.by_reason()[DISK_FULL]
    log.write(b"1\n2\n")
    log.write(b"3\n")
    with pytest.raises(OSError, match="No space left"):
        log.put(b"4\n")

    put_in_place(descriptor, tmp_path / "log")
    log.write(b"5\n")
    log.write(b"6\n")

    told, *lines = (tmp_path / "log").read_bytes().splitlines()
    assert lines == [b"5", b"6"]
    fields = json.loads(told)
    assert (fields["event"], fields["count"], fields["service"]) == ("log_lines_dropped", 3, "s")
    assert fields["reason"] == "No space left on device"
    assert dropped_lines.by_reason()[DISK_FULL] == before + 3
    registry = CollectorRegistry()
    register_process_metrics(registry, LoopLag(), {}, RefusedMessages(lambda: 0.0))
    expected = f'serve_log_lines_dropped_total{{reason="disk_full"}} {before + 3:.1f}'
    assert expected in generate_latest(registry).decode().splitlines()


def test_a_line_that_a_full_disk_cut_off_is_ended_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    room, written = [4], [b""]

    def write(_number: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        piece = bytes(data[: room[0]])
        room[0] -= len(piece)
        written[0] += piece
        return len(piece)

    monkeypatch.setattr(standard_error.os, "write", write)
    log = StandardError({}, CLOCK)
    log.write(b"abc\n")
    room[0] = 2
    log.write(b"def\nghi\n")
    room[0] = 1000
    log.write(b"jkl\n")

    first, torn, told, last = written[0].splitlines()
    assert (first, torn, last) == (b"abc", b"de", b"jkl")
    assert json.loads(told)["count"] == 2


def test_standard_error_gets_all_of_a_piece_also_when_it_takes_it_bit_by_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[bytes] = []

    def write(number: int, data: bytes) -> int:
        assert number == 2
        if len(taken) == 1 and not refusals:
            refusals.append(1)
            raise BlockingIOError
        taken.append(data[:3])
        return len(taken[-1])

    refusals: list[int] = []
    monkeypatch.setattr(standard_error.os, "write", write)
    monkeypatch.setattr(
        standard_error.select,
        "poll",
        lambda: SimpleNamespace(register=lambda *_: None, poll=lambda _: [(2, 4)]),
    )
    StandardError({}, CLOCK).put(b"0123456789\n")
    assert (b"".join(taken), refusals) == (b"0123456789\n", [1])


_SERVICE = """
import logging, sys, time
import structlog
from serve_common.telemetry.logs import configure_logs
relay = configure_logs("s")
for number in range(100):
    structlog.get_logger().error("said", number=number)
    logging.getLogger("library").error("said too")
relay.flush()
print("goes on")
"""


def test_a_service_goes_on_while_its_log_is_on_a_full_disk() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", _SERVICE], stdout=subprocess.PIPE, stderr=full, timeout=60, check=False
        )

    assert (done.returncode, done.stdout) == (0, b"goes on\n")


def test_nobody_who_logs_waits_for_a_reader_that_does_not_read() -> None:
    reading, writing = os.pipe()
    lines = "range(2000)"
    code = _SERVICE.replace("range(100)", lines).replace("relay.flush()\n", "")
    code += "sys.stdout.flush(); import os; os._exit(0)"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=writing, timeout=60, check=False
        )
    finally:
        os.close(reading)
        os.close(writing)

    assert (done.returncode, done.stdout) == (0, b"goes on\n")


# Log lines on their way out: bounded, counted when too many, never in the way of who logs.


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


async def test_lines_before_a_close_are_published_and_none_after_it() -> None:
    forwarder, sent = LogForwarder(None, {}, FixedClock()), []

    async def send(subject: str, piece: bytes) -> None:
        sent.append((subject, piece))

    sink = NatsLogSink(forwarder, Subjects(), "host", "h1", lambda: [b'{"n": 0}\n'])
    sink.open(lambda: True, send)
    forwarder.offer(b'{"n": 1}\n')
    await sink.close()
    forwarder.offer(b'{"n": 2}\n')
    forwarder.flush()
    await sink.replay_recent(msgspec.json.encode(ReplayRecentLogs(token="t")))
    assert sent == [("serve.log.host.h1", b'{"n": 1}\n')]


async def test_lines_that_a_connection_does_not_take_are_counted_and_own_and_others_recalled() -> None:
    forwarder, sent = LogForwarder(None, {}, FixedClock()), []
    refuses = True

    async def send(subject: str, piece: bytes) -> None:
        if refuses:
            raise BusUnavailable("gone")
        sent.append((subject, piece))

    sink = NatsLogSink(forwarder, Subjects(), "host", "h1", lambda: [b'{"n": 0}\n'])
    sink.open(lambda: True, send)
    forwarder.offer(b'{"n": 1}\n')
    forwarder.flush()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert forwarder._unpublished == 1
    refuses = False
    await sink.replay_recent(b"no question")
    await sink.replay_recent(msgspec.json.encode(ReplayRecentLogs(token="t")))
    recalled_lines = {line for subject, piece in sent if ".t." in subject for line in piece.splitlines()}
    assert recalled_lines == {b'{"n": 0}', b'{"n": 1}'}
    await sink.close()


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
        asked = ReplayRecentLogs(token=token, limit=limit, filter=LogFilter(**wanted))
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
