"""What the commands of the benchmarks share: arguments, signals, tables and reports.

Why both signals cancel: everything that was started is then stopped in order; also where a script has SIGINT ignored.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import signal
import sys
from collections.abc import Coroutine, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from serve_common.clock import SystemClock

PEERS_PYTHON = Path(__file__).parents[1] / ".bench-peers" / "bin" / "python"
"""Of the virtual environment that `make bench-peers` makes."""


def say(text: str) -> None:
    """Tell people how it goes, beside the report."""
    print(text, file=sys.stderr, flush=True)


def positive(text: str) -> int:
    """An argument that is at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def check_peers(python: Path) -> None:
    """Raises FileNotFoundError that says how to get Ray Serve's environment."""
    if not python.exists():
        raise FileNotFoundError(f"{python} is missing: run `make bench-peers`, or leave --peers out")


def run_command(work: Coroutine[None, None, int], failures: tuple[type[Exception], ...]) -> int:
    """The exit code of a command: that of ``work``; 2 after one of ``failures``, 130 after a signal."""

    async def until_stopped() -> int:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await work

    try:
        return asyncio.run(until_stopped())
    except failures as error:
        say(f"error: {error}")
        return 2
    except asyncio.CancelledError:
        say("stopped")
        return 130


def now_text() -> str:
    """ISO 8601, UTC."""
    return datetime.fromtimestamp(SystemClock().now(), UTC).isoformat(timespec="seconds")


def describe_machine() -> str:
    """Its class, not its name: processors, Python, system."""
    model = platform.processor() or platform.machine()
    cpu_file = Path("/proc/cpuinfo")
    if cpu_file.exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in cpu_file.read_text().splitlines()
            if "model name" in line
        ]
        model = names[0] if names else model
    return f"{os.cpu_count()} cores {model}, Python {platform.python_version()}, {platform.system()}"


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Markdown; the first row is the head, the columns ``left`` are aligned to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            f"{cell:<{width}}" if column in left else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(rows[0]), rule, *map(line, rows[1:])])


def print_report(text: str, report: msgspec.Struct, json: Path | None) -> None:
    """``text`` for people, and the whole ``report`` for programs where a file is named."""
    print(text)
    if json:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
