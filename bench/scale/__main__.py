"""``make bench-scale``: what one change costs beside up to 10,000 replicas on 1,000 hosts behind 1,000 proxies.

Why simulated hosts and proxies: the controller is what is measured. Everything that it touches is real: NATS,
Postgres, the protocol, and its own process.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path

import msgspec
import structlog

from bench.scale.figures import Column
from bench.scale.measure import measure
from bench.scale.report import make_report, problems_of, render
from bench.scale.sizes import Size, size_of
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


async def bench(options: argparse.Namespace) -> list[str]:
    """Measure every size, tell, and return what is wrong."""
    load_before = os.getloadavg()[0]
    if load_before > _BUSY_LOAD:
        _say(f"warning: this machine is busy (load {load_before:.1f}); times mean little, bytes are sound")
    columns: list[Column] = []
    with tempfile.TemporaryDirectory(prefix="mbs-", ignore_cleanup_errors=True) as temporary:
        for size in options.sizes:
            _say(f"{size.replicas} replicas of {size.backends} backends on {size.hosts} hosts …")
            directory = (options.keep_logs or Path(temporary)).resolve() / str(size.replicas)
            directory.mkdir(parents=True)
            profile = options.profile and options.profile.resolve().with_name(
                f"{options.profile.name}.{size.replicas}"
            )
            columns.append(await measure(size, directory, options.seconds, _say, profile))
    report = make_report(columns, load_before)
    print(render(report))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return problems_of(report)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def _until_stopped(options: argparse.Namespace) -> list[str]:
    """Both signals cancel, so that everything is stopped in order; also where a script has SIGINT ignored."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await bench(options)


def main() -> int:
    """0: measured; 1: measured, but something is missing or grows; 2: could not measure; 130: stopped."""
    options = _arguments()
    # That connections end and processes are killed is the benchmark's own doing.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    try:
        problems = asyncio.run(_until_stopped(options))
    except (ServeError, OSError) as error:
        _say(f"error: {error}")
        return 2
    except asyncio.CancelledError:
        _say("stopped")
        return 130
    for problem in problems:
        _say(f"problem: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
