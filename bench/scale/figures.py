"""What one column of the table holds, and how it follows from what was read.

Why apart from the measuring: medians and differences are worth a test, servers are not needed for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import msgspec

from bench.scale.sizes import Size


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One change: what happened from the call until a moment after it was applied by all."""

    seconds: float
    """From the call to the goal's success, as the caller saw both."""
    wal_bytes: int
    messages: int
    """Published by the controller, answers to the caller included."""
    published_bytes: int
    goals: int
    """Of hosts; a part of what was published, as the two below."""
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
    """Of one processor, as the two below."""
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
