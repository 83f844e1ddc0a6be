"""``make bench-scale``: what one change costs beside up to 10,000 replicas on 1,000 hosts behind 1,000 proxies.

Why simulated hosts and proxies: the controller is what is measured. Everything that it touches is real: NATS,
Postgres, the protocol, and its own process.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from pathlib import Path

import structlog

from bench.console import print_report, run_command, say
from bench.scale.measure import measure
from bench.scale.report import Column, Size, make_report, problems_of, render, size_of
from serve_common.errors import ServeError

_BUSY_LOAD = 1.0
"""Processes that run beside us on average, above which a warning is due."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("--sizes", type=_sizes, default=_sizes("100,1000,10000"), metavar="R,R,…")
    parser.add_argument("--seconds", type=float, default=170.0, help="limit for each size (default: 170)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured there")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="profile the controller's phases to FILE.<size>.<number>"
    )
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="work there and leave everything")
    return parser.parse_args()


def _sizes(text: str) -> list[Size]:
    try:
        return [size_of(int(part)) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


async def bench(options: argparse.Namespace) -> int:
    """Measure every size and report. 0: all is well; 1: something is missing or grows."""
    load_before = os.getloadavg()[0]
    if load_before > _BUSY_LOAD:
        say(f"warning: this machine is busy (load {load_before:.1f}); times mean little, bytes are sound")
    columns: list[Column] = []
    with tempfile.TemporaryDirectory(prefix="mbs-", ignore_cleanup_errors=True) as temporary:
        for size in options.sizes:
            say(f"{size.replicas} replicas of {size.backends} backends on {size.hosts} hosts …")
            directory = (options.keep_logs or Path(temporary)).resolve() / str(size.replicas)
            directory.mkdir(parents=True)
            profile = options.profile and options.profile.resolve().with_name(
                f"{options.profile.name}.{size.replicas}"
            )
            columns.append(await measure(size, directory, options.seconds, say, profile))
    report = make_report(columns, load_before)
    print_report(render(report), report, options.json)
    problems = problems_of(report)
    for problem in problems:
        say(f"problem: {problem}")
    return 1 if problems else 0


def main() -> int:
    """0: measured; 1: measured, but something is missing or grows; 2: could not measure; 130: stopped."""
    options = _arguments()
    # That connections end and processes are killed is the benchmark's own doing.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    return run_command(bench(options), (ServeError, OSError))


if __name__ == "__main__":
    sys.exit(main())
