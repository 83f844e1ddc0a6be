"""``make bench``: requests, bodies, streams and calls through Muster, next to what the same parts could do at most.

Why floors in the same run: absolute figures belong to a machine and an hour; what travels is the ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from bench.console import PEERS_PYTHON, positive, print_report, run_command, say
from bench.counting import CountingCost, measure_counting
from bench.floors import running_floors
from bench.generators import Generators
from bench.measure import (
    MUSTER,
    MUSTER_BODIES,
    NOOP_CONNECTIONS,
    OTHER_LOADS,
    PROCESSES_SHOWN_FOR,
    Load,
    Sample,
    Served,
    System,
    conclude,
    conclude_processes,
    measure,
    noop_loads,
    plan,
)
from bench.meters import Meter, suspended
from bench.muster_stack import logs_of, running_muster
from bench.peers.ray_serve import running_ray_serve
from bench.report import make_report, progress, render
from bench.wrk import WrkFailed, find_wrk
from muster.embedded import StackFailed
from serve_common.errors import ServeError

BUSY_LOAD = 1.0
"""Processes that run beside us on average, above which a warning is due."""

SETTLE_S = 1.5
"""Seconds after a run in which those that stood still catch up."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--url", help="measure the no-op at this URL instead of starting a stack")
    parser.add_argument("--floors-only", action="store_true", help="measure no Muster at all")
    parser.add_argument("--peers", action="store_true", help="measure Ray Serve too (`make bench-peers`)")
    parser.add_argument("--peers-python", type=Path, default=PEERS_PYTHON, metavar="FILE")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--seconds", type=positive, default=3, help="length of one run (default: 3)")
    parser.add_argument(
        "--connections", type=positive, nargs="+", default=NOOP_CONNECTIONS, metavar="C", help="of the no-op"
    )
    parser.add_argument("--only", metavar="TEXT", help="only loads whose name has this in it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured there")
    return parser.parse_args()


async def bench(options: argparse.Namespace) -> int:
    """Start what is to be measured, measure, report. 0: measured; 1: measured, with errors."""
    began = time.monotonic()
    wrk = find_wrk()
    loads = [
        load for load in noop_loads(options.connections) + OTHER_LOADS if (options.only or "") in load.name
    ]
    load_before = os.getloadavg()[0]
    if load_before > BUSY_LOAD:
        say(
            f"warning: this machine is busy (load {load_before:.1f}); trust the ratios little and the rest less"
        )
    async with AsyncExitStack() as stack:
        # Short: Ray makes unix sockets below it, and their paths may have 107 characters.
        directory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="mb-", ignore_cleanup_errors=True))
        )
        systems = await _started(stack, directory, options)
        generators = Generators(wrk, directory)
        samples = await _measured(systems, loads, generators, options)
        counting = await _counting(systems, generators, options)
        if any(sample.errors for sample in samples if sample.run.system.name == MUSTER):
            say(logs_of(directory / "muster"))
        say("stopping …")
    lines = conclude(samples)
    report = make_report(
        samples,
        lines,
        conclude_processes(samples, PROCESSES_SHOWN_FOR),
        counting,
        load_before=load_before,
        rounds=options.rounds,
        seconds=options.seconds,
        taken_s=time.monotonic() - began,
    )
    print_report(render(report), report, options.json)
    errors = sum(line.errors for line in lines if line.system in (MUSTER, MUSTER_BODIES) or not options.peers)
    if errors:
        say(f"error: {errors} requests failed; figures beside failures mean nothing")
    return 1 if errors else 0


async def _started(stack: AsyncExitStack, directory: Path, options: argparse.Namespace) -> list[System]:
    systems = await stack.enter_async_context(running_floors(directory))
    if options.url:
        systems.append(System(name=MUSTER, urls={Served.NOOP.value: options.url}))
    elif not options.floors_only:
        say("starting Muster …")
        systems.append(await stack.enter_async_context(running_muster(directory / "muster")))
        systems.append(
            await stack.enter_async_context(running_muster(directory / "bodies", sends_small_over_nats=True))
        )
    if options.peers:
        say("starting Ray Serve …")
        systems += await stack.enter_async_context(running_ray_serve(directory, options.peers_python))
    return systems


async def _measured(
    systems: list[System], loads: list[Load], generators: Generators, options: argparse.Namespace
) -> list[Sample]:
    meters = {system.name: Meter.of_stack(system.stack_id) for system in systems if system.stack_id}
    stack_ids = {system.stack_id for system in systems if system.stack_id}
    samples = []
    for run in plan(systems, loads, options.rounds):
        with suspended(stack_ids - {run.system.stack_id}):
            sample = await measure(run, options.seconds, generators.run, meters.get(run.system.name))
        samples.append(sample)
        say(progress(sample, options.rounds))
        await asyncio.sleep(SETTLE_S)
    return samples


async def _counting(
    systems: list[System], generators: Generators, options: argparse.Namespace
) -> CountingCost | None:
    """None where it was not asked for, or cannot be measured."""
    if (options.only or "") not in "metrics":
        return None
    for system in systems:
        if Served.UNCOUNTED.value in system.urls:
            say("measuring what metrics cost …")
            return await measure_counting(system, generators.run, system.metrics_urls)
    return None


def main() -> int:
    """0: measured; 1: measured, with errors; 2: could not measure; 130: stopped."""
    return run_command(bench(_arguments()), (WrkFailed, StackFailed, ServeError, FileNotFoundError))


if __name__ == "__main__":
    sys.exit(main())
