"""What the benchmark tells: a table for people (Markdown, to be pasted into README.md) and JSON for programs."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from serve_common.adapters.system_clock import SystemClock
from tests.bench.measure import Line, Sample

_HEAD = ["system", "c", "req/s", "(min-max)", "p50 ms", "p99 ms", "of floor B", "errors"]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a later comparison needs."""

    taken_at: str
    """ISO 8601, UTC."""
    machine: str
    load_before: float
    """Processes that others kept running on this machine in the minute before; figures of a busy machine are noise."""
    rounds: int
    seconds: int
    lines: list[Line]
    samples: list[Sample]


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


def make_report(
    samples: Sequence[Sample], lines: Sequence[Line], *, load_before: float, rounds: int, seconds: int
) -> Report:
    """The whole report."""
    taken_at = datetime.fromtimestamp(SystemClock().now(), UTC).isoformat(timespec="seconds")
    return Report(
        taken_at=taken_at,
        machine=describe_machine(),
        load_before=load_before,
        rounds=rounds,
        seconds=seconds,
        lines=list(lines),
        samples=list(samples),
    )


def render(report: Report) -> str:
    """The table, with what one needs to know to read it."""
    rows = [_HEAD, *(_cells(line) for line in report.lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = [_row(row, widths) for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    heading = (
        f"{report.taken_at} · {report.machine} · load before {report.load_before:.1f}\n"
        f"wrk -t1, keep-alive; medians of {report.rounds} interleaved rounds of {report.seconds} s\n"
    )
    return heading + "\n" + "\n".join(lines)


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        f"{cell:<{width}}" if column == 0 else f"{cell:>{width}}"
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "| " + " | ".join(padded) + " |"


def _cells(line: Line) -> list[str]:
    return [
        line.system,
        str(line.connections),
        f"{line.requests_per_s:,.0f}",
        f"{line.requests_per_s_min:,.0f}-{line.requests_per_s_max:,.0f}",
        f"{line.p50_ms:.2f}",
        f"{line.p99_ms:.2f}",
        "-" if line.ratio is None else f"{line.ratio:.2f}",
        str(line.errors),
    ]
