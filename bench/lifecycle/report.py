"""What is told: a table for people (Markdown) and JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from bench.lifecycle.figures import Line, Round
from bench.lifecycle.story import SystemRound
from bench.report import describe_machine
from serve_common.clock import SystemClock

_HEAD = [
    "change",
    "Muster s",
    "(min-max)",
    "first answer",
    "Ray Serve s",
    "first answer",
    "of Serve",
    "bare Ray s",
    "limit",
    "is",
    "kept",
]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a later comparison needs."""

    taken_at: str
    """ISO 8601, UTC."""
    machine: str
    settle_s: float
    cpus: int
    """That each Ray was told to have."""
    lines: list[Line]
    rounds: list[Round]


def make_report(rounds: Sequence[Round], lines: Sequence[Line], cpus: int, settle_s: float) -> Report:
    """The whole report."""
    taken_at = datetime.fromtimestamp(SystemClock().now(), UTC).isoformat(timespec="seconds")
    return Report(
        taken_at=taken_at,
        machine=describe_machine(),
        cpus=cpus,
        settle_s=settle_s,
        lines=list(lines),
        rounds=list(rounds),
    )


def render(report: Report) -> str:
    """The table, with what one needs to know to read it."""
    rows = [_HEAD, *(_cells(line) for line in report.lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    table = [_row(row, widths) for row in rows]
    table.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    busy = ", ".join(f"{r.busy_before:.0%} (load {r.load_before:.1f})" for r in report.rounds)
    heading = [
        f"{report.taken_at} · {report.machine}",
        f"medians of {len(report.rounds)} rounds; each system fresh and warmed up; {report.cpus} CPUs for Ray",
        f"{report.settle_s:g} s between two changes",
        "from the call until it is done: goal SUCCEEDED; serve.run or serve.delete returned",
        f"busy with others before each round: {busy}",
        _requests("Muster", [r.muster for r in report.rounds]),
    ]
    peers = [r.serve for r in report.rounds if r.serve is not None]
    if peers:
        heading.append(_requests("Ray Serve", peers))
    return "\n".join([*heading, "", *table])


def _requests(name: str, rounds: Sequence[SystemRound]) -> str:
    failed, sent = sum(r.requests_failed for r in rounds), sum(r.requests for r in rounds)
    return f"{name}: {failed} of {sent} requests failed from the first answer until the deletion"


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        f"{cell:<{width}}" if column in (0, 8) else f"{cell:>{width}}"
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "| " + " | ".join(padded) + " |"


def _cells(line: Line) -> list[str]:
    return [
        line.step,
        _seconds(line.muster_s),
        f"{line.muster_s_min:.2f}-{line.muster_s_max:.2f}",
        _seconds(line.muster_answered_s),
        _seconds(line.serve_s),
        _seconds(line.serve_answered_s),
        _seconds(line.of_serve),
        _seconds(line.bare_s),
        line.limit,
        f"{line.judged:.2f}{line.judged_unit}",
        "yes" if line.is_retained else "NO",
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
