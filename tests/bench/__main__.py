"""``make bench``: no-op requests through Muster, next to what the same parts could do at most.

Why floors in the same run: absolute figures belong to a machine and an hour; what travels is the ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from serve_common.errors import ServeError
from tests.bench.floors import FLOOR_B, running_floors
from tests.bench.measure import Line, Sample, System, conclude, measure, plan
from tests.bench.muster_stack import logs_of, running_muster
from tests.bench.report import make_report, render
from tests.bench.wrk import WrkFailed, WrkFigures, find_wrk, run_wrk

CONNECTIONS = (1, 16, 64)
MUSTER = "Muster"
BUSY_LOAD = 1.0
"""Processes that run beside us on average, above which a warning is due."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--url", help="measure this URL instead of starting a stack")
    parser.add_argument("--floors-only", action="store_true", help="measure no Muster at all")
    parser.add_argument("--rounds", type=_positive, default=3)
    parser.add_argument("--seconds", type=_positive, default=4, help="length of one run (default: 4)")
    parser.add_argument("--connections", type=_positive, nargs="+", default=CONNECTIONS, metavar="C")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured there")
    return parser.parse_args()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


async def bench(options: argparse.Namespace) -> list[Line]:
    """Start what is to be measured, measure, tell."""
    wrk = find_wrk()

    async def load(url: str, connections: int, seconds: int) -> WrkFigures:
        return await run_wrk(wrk, url, connections, seconds)

    load_before = os.getloadavg()[0]
    if load_before > BUSY_LOAD:
        _say(
            f"warning: this machine is busy (load {load_before:.1f}); trust the ratios little and the rest less"
        )
    samples: list[Sample] = []
    async with AsyncExitStack() as stack:
        # Short: Ray makes unix sockets below it, and their paths may have 107 characters.
        directory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="mb-", ignore_cleanup_errors=True))
        )
        systems = await stack.enter_async_context(running_floors(directory))
        if options.url:
            systems.append(System(name=MUSTER, url=options.url))
        elif not options.floors_only:
            _say("starting Muster …")
            url = await stack.enter_async_context(running_muster(directory / "muster"))
            systems.append(System(name=MUSTER, url=url))
        for run in plan(systems, options.connections, options.rounds):
            sample = await measure(run, options.seconds, load)
            samples.append(sample)
            _say(
                f"round {run.round + 1}/{options.rounds}  c={run.connections:<3} {run.system.name:<8} "
                f"{sample.figures.requests_per_s:>9,.0f} req/s  p50 {sample.figures.p50_ms:.2f} ms"
            )
        if any(sample.errors for sample in samples if sample.run.system.name == MUSTER):
            _say(logs_of(directory / "muster"))
        _say("stopping …")
    lines = conclude(samples, FLOOR_B)
    lines.sort(key=lambda line: line.connections)
    report = make_report(
        samples, lines, load_before=load_before, rounds=options.rounds, seconds=options.seconds
    )
    print(render(report))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return lines


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def _until_stopped(options: argparse.Namespace) -> list[Line]:
    """Both signals cancel, so that everything is stopped in order; also where a script has SIGINT ignored."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await bench(options)


def main() -> int:
    """0: measured; 1: measured, with errors; 2: could not measure; 130: stopped."""
    options = _arguments()
    try:
        lines = asyncio.run(_until_stopped(options))
    except (WrkFailed, ServeError, FileNotFoundError) as error:
        _say(f"error: {error}")
        return 2
    except asyncio.CancelledError:
        _say("stopped")
        return 130
    errors = sum(line.errors for line in lines)
    if errors:
        _say(f"error: {errors} requests failed; figures beside failures mean nothing")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
