"""What the benchmark tells: a table with a row for each figure and a column for each size, and JSON for programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Final

import msgspec

from bench.report import describe_machine
from bench.scale.figures import ChangeFigures, Column, SteadyFigures
from serve_common.clock import SystemClock

GROWTH_MAX: Final = 1.5
"""Bytes of one change at the largest size over those at the smallest; more means that they depend on the others."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a later comparison needs."""

    taken_at: str
    """ISO 8601, UTC."""
    machine: str
    load_before: float
    columns: list[Column]
    growth: dict[str, float]
    """Of bytes for each change, from the smallest size to the largest."""


def make_report(columns: Sequence[Column], load_before: float) -> Report:
    """The whole report."""
    return Report(
        taken_at=datetime.fromtimestamp(SystemClock().now(), UTC).isoformat(timespec="seconds"),
        machine=describe_machine(),
        load_before=load_before,
        columns=list(columns),
        growth=growth_of(columns),
    )


def growth_of(columns: Sequence[Column]) -> dict[str, float]:
    """How much more each kind of byte is at the largest size than at the smallest; empty with less than two."""
    growth: dict[str, float] = {}
    for kind in ("scale", "user_config"):
        figures = [change for column in columns if (change := getattr(column, kind)) is not None]
        if len(figures) < 2:
            continue
        for name in ("wal_bytes", "published_bytes"):
            growth[f"{kind}.{name}"] = getattr(figures[-1], name) / max(getattr(figures[0], name), 1)
    return growth


def problems_of(report: Report) -> list[str]:
    """Why the table is not what was hoped for: what is missing, what grows, what cannot be trusted."""
    problems = [f"{c.size.replicas} replicas: {c.problem}" for c in report.columns if c.problem]
    problems += [
        f"{c.size.replicas} replicas: {c.reports_dropped} reports were not sent"
        for c in report.columns
        if c.reports_dropped
    ]
    problems += [
        f"{name} grows by the factor {factor:.2f}"
        for name, factor in report.growth.items()
        if factor > GROWTH_MAX
    ]
    return problems


def render(report: Report) -> str:
    """The table, with what one needs to know to read it."""
    rows = [["", *(f"{column.size.replicas:,}" for column in report.columns)]]
    rows += [[name, *(cell(column) for column in report.columns)] for name, cell in _ROWS]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = [_line(row, widths) for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    growth = ", ".join(f"{name} by {factor:.2f}" for name, factor in report.growth.items())
    heading = f"{report.taken_at} · {report.machine} · load before {report.load_before:.1f}"
    ends = [f"from the smallest size to the largest grows {growth}"] if growth else []
    return "\n".join([heading, "", *lines, "", *ends])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        f"{cell:<{width}}" if place == 0 else f"{cell:>{width}}"
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "| " + " | ".join(padded) + " |"


Cell = Callable[[Column], str]


def _of_scale(cell: Callable[[ChangeFigures], str]) -> Cell:
    return lambda column: "-" if column.scale is None else cell(column.scale)


def _of_config(cell: Callable[[ChangeFigures], str]) -> Cell:
    return lambda column: "-" if column.user_config is None else cell(column.user_config)


def _of_steady(cell: Callable[[SteadyFigures], str]) -> Cell:
    return lambda column: "-" if column.steady is None else cell(column.steady)


def _times(change: ChangeFigures) -> str:
    return f"{change.p50_ms:,.0f} / {change.p95_ms:,.0f}"


def _wal(change: ChangeFigures) -> str:
    return f"{change.wal_bytes / 1e3:,.1f}"


def _published(change: ChangeFigures) -> str:
    return f"{change.messages:,.0f} / {change.published_bytes / 1e3:,.1f}"


def _parts(change: ChangeFigures) -> str:
    return f"{change.goal_bytes / 1e3:,.1f} / {change.snapshot_bytes / 1e3:,.1f}"


def _recovery(name: str) -> Cell:
    return lambda column: (
        f"{median(getattr(one, name) for one in column.recoveries):,.2f}" if column.recoveries else "-"
    )


_ROWS: Final[tuple[tuple[str, Cell], ...]] = (
    ("hosts, proxies, backends (each)", lambda column: f"{column.size.hosts:,}"),
    ("deploy everything, s", lambda c: "-" if c.deploy_all_s is None else f"{c.deploy_all_s:,.1f}"),
    ("10 → 11 replicas, ms p50 / p95", _of_scale(_times)),
    ("user_config, ms p50 / p95", _of_config(_times)),
    ("10 → 11: Postgres, kB of WAL", _of_scale(_wal)),
    ("user_config: Postgres, kB of WAL", _of_config(_wal)),
    ("rows written per change", lambda c: "-" if c.rows_per_change is None else f"{c.rows_per_change:,.1f}"),
    ("10 → 11: published, messages / kB", _of_scale(_published)),
    ("10 → 11: of it goals / snapshots, kB", _of_scale(_parts)),
    ("user_config: published, messages / kB", _of_config(_published)),
    ("user_config: of it goals / snapshots, kB", _of_config(_parts)),
    ("10 → 11: reports that proxies sent", _of_scale(lambda change: f"{change.proxy_reports:,.0f}")),
    ("user_config: reports that proxies sent", _of_config(lambda change: f"{change.proxy_reports:,.0f}")),
    ("reports/s, nothing changing", _of_steady(lambda steady: f"{steady.reports_per_s:,.0f}")),
    ("controller CPU per report, µs", _of_steady(lambda steady: f"{steady.cpu_us_per_report:,.0f}")),
    (
        "time in plans per report, µs",
        _of_steady(lambda s: "-" if s.plan_us_per_report is None else f"{s.plan_us_per_report:,.0f}"),
    ),
    ("controller CPU, % of a processor", _of_steady(lambda steady: f"{steady.cpu_share * 100:,.0f}")),
    ("controller RSS, MB", _of_steady(lambda steady: f"{steady.rss_bytes / 1e6:,.0f}")),
    ("killed: first answer after, s", _recovery("reply_s")),
    ("killed: change applied by all after, s", _recovery("applied_s")),
    ("nats-server CPU, %", _of_steady(lambda steady: f"{steady.nats_cpu_share * 100:,.0f}")),
    ("simulator CPU, %", _of_steady(lambda steady: f"{steady.simulator_cpu_share * 100:,.0f}")),
    ("simulator late by at most, ms", _of_steady(lambda steady: f"{steady.simulator_late_s * 1e3:,.0f}")),
)
