"""What the benchmark tells: tables for people (Markdown, to be pasted into README.md) and JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bench.console import describe_machine, now_text, table
from bench.counting import CONNECTIONS, PAIRS, CountingCost
from bench.measure import MIB, Line, ProcessLine, Sample

_HEAD = ["load", "system", "rate", "(min-max)", "p50 ms", "p99 ms", "first ms", "ratio", "errors"]
_PROCESS_HEAD = ["load", "system", "process", "CPU s", "CPU us/request", "RSS MiB", "growth MiB"]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a later comparison needs."""

    taken_at: str
    """ISO 8601, UTC."""
    machine: str
    load_before: float
    """Processes that others kept running on this machine in the minute before; figures of a busy machine are noise."""
    rounds: int
    seconds: int
    taken_s: float
    lines: list[Line]
    counting: CountingCost | None
    processes: list[ProcessLine]
    samples: list[Sample]


def make_report(
    samples: Sequence[Sample],
    lines: Sequence[Line],
    processes: Sequence[ProcessLine],
    counting: CountingCost | None = None,
    *,
    load_before: float,
    rounds: int,
    seconds: int,
    taken_s: float,
) -> Report:
    """The whole report."""
    return Report(
        taken_at=now_text(),
        machine=describe_machine(),
        load_before=load_before,
        rounds=rounds,
        seconds=seconds,
        taken_s=taken_s,
        lines=list(lines),
        counting=counting,
        processes=list(processes),
        samples=list(samples),
    )


def render(report: Report) -> str:
    """The tables, with what one needs to know to read them."""
    heading = (
        f"{report.taken_at} · {report.machine} · load before {report.load_before:.1f}\n"
        f"medians of {report.rounds} interleaved rounds of {report.seconds} s; requests by wrk -t1, keep-alive; "
        "ratios: no-op to floor B, bodies and tokens to bare aiohttp, chain to Muster\n"
    )
    tables = [table([_HEAD, *(_cells(line) for line in report.lines)], left=(0, 1))]
    if report.processes:
        shown = [line for line in report.processes if not _is_idle(line)]
        tables.append(table([_PROCESS_HEAD, *(_process_cells(line) for line in shown)], left=(0, 1, 2)))
    if report.counting is not None:
        tables.append(_counting(report.counting))
    return "\n".join([heading, "\n\n".join(tables), f"\nthe whole took {report.taken_s:.0f} s"])


def progress(sample: Sample, rounds: int) -> str:
    """One line about a run that has just ended, of so many rounds."""
    run, figures = sample.run, sample.figures
    latency = "" if figures.p50_ms is None else f"  p50 {figures.p50_ms:.2f} ms"
    first = "" if figures.first_ms is None else f"  first {figures.first_ms:.2f} ms"
    errors = f"  {sample.errors} errors" if sample.errors else ""
    return (
        f"round {run.round + 1}/{rounds}  {run.load.name:<18} {run.system.name:<19}"
        f"{figures.rate:>10,.0f} {run.load.kind.value}{latency}{first}{errors}"
    )


def _counting(cost: CountingCost) -> str:
    return (
        f"metrics: with all of them, and a scrape each second, the no-op at c={CONNECTIONS} has {cost.ratio:.3f} of "
        f"the rate without any (median of {PAIRS} pairs, {cost.ratio_min:.3f}-{cost.ratio_max:.3f}; "
        f"{cost.rate:,.0f} req/s);\n"
        f"CPU of all processes for a request: {cost.cpu_us:.1f} us with, {cost.cpu_us_without:.1f} us without"
    )


def _cells(line: Line) -> list[str]:
    return [
        line.load,
        line.system,
        f"{line.rate:,.0f} {line.unit}",
        f"{line.rate_min:,.0f}-{line.rate_max:,.0f}",
        shown(line.p50_ms),
        shown(line.p99_ms),
        shown(line.first_ms),
        shown(line.ratio),
        str(line.errors),
    ]


def _is_idle(line: ProcessLine) -> bool:
    """It has no part in this load; it is in the JSON all the same."""
    return line.cpu_s < 0.01 and line.rss_growth_bytes < MIB


def _process_cells(line: ProcessLine) -> list[str]:
    return [
        line.load,
        line.system,
        line.process,
        f"{line.cpu_s:.2f}",
        f"{line.cpu_us_per_request:,.0f}",
        f"{line.rss_bytes / MIB:.0f}",
        f"{line.rss_growth_bytes / MIB:.0f}",
    ]


def shown(value: float | None) -> str:
    """A figure in a table; a dash where there is none."""
    return "-" if value is None else f"{value:.2f}"
