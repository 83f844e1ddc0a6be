"""Log lines to a standard error that is full, slow or gone: nobody who logs notices, and what is missing is told."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from serve_common.runtime.health import LoopLag
from serve_common.runtime.operations import register_process_metrics
from serve_common.telemetry import log_lines as standard_error
from serve_common.telemetry.log_lines import DISK_FULL, RefusedMessages, StandardError, dropped_lines

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
