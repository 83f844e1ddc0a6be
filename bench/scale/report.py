"""The table: what one column holds, how that follows from what was read, and how it is shown.

Why all parts of a size grow together: the question is what one change costs beside *other* backends, hosts and proxies,
so a backend keeps its ten replicas and everything around it grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Final

import msgspec

from bench.console import describe_machine, now_text, table

REPLICAS_PER_BACKEND: Final = 10
_SMALLEST: Final = 10


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """How much there is of everything."""

    replicas: int
    hosts: int
    proxies: int
    backends: int


def size_of(replicas: int) -> Size:
    """The size with so many replicas; raises ValueError for what does not divide evenly."""
    if replicas < _SMALLEST * REPLICAS_PER_BACKEND or replicas % REPLICAS_PER_BACKEND:
        raise ValueError(
            f"{replicas} replicas: at least 100 and a multiple of {REPLICAS_PER_BACKEND} are needed"
        )
    tenth = replicas // REPLICAS_PER_BACKEND
    return Size(replicas=replicas, hosts=tenth, proxies=tenth, backends=tenth)


def backend_name(index: int) -> str:
    """What the backend with that index is deployed as."""
    return f"b{index:05d}"


def spread(count: int, of: int) -> list[int]:
    """``count`` different indices below ``of`` (fewer where there are not so many), evenly apart."""
    count = min(count, of)
    return [position * of // count for position in range(count)]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One change: what happened from the call until a moment after it was applied by all."""

    seconds: float
    """From the call to the goal's success, as the caller saw both."""
    wal_bytes: int
    messages: int
    """Published by the controller, answers to the caller included."""
    published_bytes: int
    goals: int
    """Host goals; a part of what was published, as the two below."""
    goal_bytes: int
    snapshots: int
    snapshot_bytes: int
    proxy_reports: int
    """That the proxies sent meanwhile."""


class ChangeFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of change: medians over several backends, but for p95."""

    samples: int
    p50_ms: float
    p95_ms: float
    wal_bytes: float
    messages: float
    published_bytes: float
    goals: float
    goal_bytes: float
    snapshots: float
    snapshot_bytes: float
    proxy_reports: float


class SteadyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing changes; reports come in."""

    seconds: float
    reports_per_s: float
    cpu_us_per_report: float
    """Processor time of the whole controller process, whatever it was spent on."""
    plan_us_per_report: float | None
    """The part of it that was spent on plans, by the controller's own account."""
    cpu_share: float
    """Share of one processor, as the two below."""
    nats_cpu_share: float
    simulator_cpu_share: float
    rss_bytes: int
    simulator_late_s: float
    """How late reports left at most; much of it means that this machine, not the controller, was measured."""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """One kill, from the moment at which the process was gone."""

    reply_s: float
    """Until the first command was answered."""
    applied_s: float
    """Until what it asked for was applied by all."""


class Column(msgspec.Struct, kw_only=True):
    """Everything about one size, as far as it could be measured."""

    size: Size
    deploy_all_s: float | None = None
    scale: ChangeFigures | None = None
    user_config: ChangeFigures | None = None
    rows_per_change: float | None = None
    steady: SteadyFigures | None = None
    recoveries: list[Recovery] = []
    reports_dropped: int = 0
    goals_refused: int = 0
    problem: str = ""
    """Why something is missing; empty when nothing is."""


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def conclude(samples: Sequence[Sample]) -> ChangeFigures:
    """The figures of one kind of change; there must be a sample."""
    seconds = [sample.seconds for sample in samples]
    return ChangeFigures(
        samples=len(samples),
        p50_ms=median(seconds) * 1e3,
        p95_ms=percentile(seconds, 95) * 1e3,
        wal_bytes=median(sample.wal_bytes for sample in samples),
        messages=median(sample.messages for sample in samples),
        published_bytes=median(sample.published_bytes for sample in samples),
        goals=median(sample.goals for sample in samples),
        goal_bytes=median(sample.goal_bytes for sample in samples),
        snapshots=median(sample.snapshots for sample in samples),
        snapshot_bytes=median(sample.snapshot_bytes for sample in samples),
        proxy_reports=median(sample.proxy_reports for sample in samples),
    )


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
    """Factor of the bytes of each change, from the smallest size to the largest."""


def make_report(columns: Sequence[Column], load_before: float) -> Report:
    """The whole report."""
    return Report(
        taken_at=now_text(),
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
    growth = ", ".join(f"{name} by {factor:.2f}" for name, factor in report.growth.items())
    heading = f"{report.taken_at} · {report.machine} · load before {report.load_before:.1f}"
    ends = [f"from the smallest size to the largest grows {growth}"] if growth else []
    return "\n".join([heading, "", table(rows), "", *ends])


Cell = Callable[[Column], str]


def _of(part: str, cell: Callable[[Any], str]) -> Cell:
    """A cell of a part of the column that may be missing."""
    return lambda column: "-" if (figures := getattr(column, part)) is None else cell(figures)


def _of_steady(cell: Callable[[SteadyFigures], str]) -> Cell:
    return _of("steady", cell)


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
    ("10 → 11 replicas, ms p50 / p95", _of("scale", _times)),
    ("user_config, ms p50 / p95", _of("user_config", _times)),
    ("10 → 11: Postgres, kB of WAL", _of("scale", _wal)),
    ("user_config: Postgres, kB of WAL", _of("user_config", _wal)),
    ("rows written per change", lambda c: "-" if c.rows_per_change is None else f"{c.rows_per_change:,.1f}"),
    ("10 → 11: published, messages / kB", _of("scale", _published)),
    ("10 → 11: of it goals / snapshots, kB", _of("scale", _parts)),
    ("user_config: published, messages / kB", _of("user_config", _published)),
    ("user_config: of it goals / snapshots, kB", _of("user_config", _parts)),
    ("10 → 11: reports that proxies sent", _of("scale", lambda change: f"{change.proxy_reports:,.0f}")),
    (
        "user_config: reports that proxies sent",
        _of("user_config", lambda change: f"{change.proxy_reports:,.0f}"),
    ),
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
