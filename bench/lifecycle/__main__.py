"""``python -m bench.lifecycle``: how long deploy, update, scaling and delete take, beside Ray and Ray Serve.

Why fresh systems in turns: each round measures all of them within the same minutes, one at a time and none beside
another, so that the ratios hold although the machine's speed drifts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

from bench.floors import free_port
from bench.lifecycle.figures import Line, Round, conclude
from bench.lifecycle.guarded import ProgramFailed, run_guarded
from bench.lifecycle.muster_steps import measure_muster
from bench.lifecycle.report import make_report, render
from bench.lifecycle.story import SETTLE_S, BareRound, SystemRound
from bench.muster_stack import logs_of
from serve_common.errors import ServeError

PEERS_PYTHON = Path(__file__).parents[2] / ".bench-peers" / "bin" / "python"
T = TypeVar("T")

BUSY_SHARE = 0.1
"""Of all processors, used by others before a round: above it a warning is due."""
_PROGRAM_TIMEOUT_S = 400.0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.lifecycle", description=__doc__)
    parser.add_argument("--peers", action="store_true", help="measure Ray Serve too (`make bench-peers`)")
    parser.add_argument("--peers-python", type=Path, default=PEERS_PYTHON, metavar="FILE")
    parser.add_argument("--rounds", type=_positive, default=3)
    parser.add_argument(
        "--cpus", type=_positive, default=2, help="CPUs each Ray is told; it keeps that many processes ready"
    )
    parser.add_argument("--settle-s", type=float, default=SETTLE_S, help="pause between two changes")
    parser.add_argument("--calm-within-s", type=float, default=60.0, help="wait so long for a calm machine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured there")
    return parser.parse_args()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


async def bench(options: argparse.Namespace) -> list[Line]:
    """Measure all rounds, tell."""
    if options.peers and not options.peers_python.exists():
        raise FileNotFoundError(
            f"{options.peers_python} is missing: run `make bench-peers`, or leave --peers out"
        )
    rounds = []
    for number in range(options.rounds):
        rounds.append(await _round(options, f"round {number + 1}/{options.rounds}"))
    lines = conclude(rounds)
    report = make_report(rounds, lines, options.cpus, options.settle_s)
    print(render(report))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return lines


async def _round(options: argparse.Namespace, name: str) -> Round:
    busy = await _calm(options.calm_within_s)
    load = os.getloadavg()[0]
    if busy > BUSY_SHARE:
        _say(f"warning: others use {busy:.0%} of this machine; trust the ratios little and the rest less")
    # Short: Ray makes unix sockets below it, and their paths may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="ml-", ignore_cleanup_errors=True) as text:
        directory = Path(text)
        _say(f"{name}  bare Ray …")
        bare = await _program(directory, sys.executable, "bare_ray", BareRound, options)
        _say(f"{name}  Muster …")
        try:
            muster = await measure_muster(directory / "muster", options.cpus, options.settle_s)
        except (ServeError, TimeoutError):
            _say(logs_of(directory / "muster"))
            raise
        serve = None
        if options.peers:
            _say(f"{name}  Ray Serve …")
            port = ("--port", str(free_port()))
            serve = await _program(
                directory, str(options.peers_python), "ray_serve", SystemRound, options, *port
            )
    for measured in (muster, serve):
        if measured is not None:
            _say("  ".join(f"{taken.step} {taken.done_s:.2f} s" for taken in measured.taken))
    return Round(busy_before=busy, load_before=load, bare=bare, muster=muster, serve=serve)


async def _calm(within_s: float) -> float:
    """Wait until others leave the machine alone for a second; the share of it that they last used."""
    give_up_at = asyncio.get_running_loop().time() + within_s
    while True:
        busy = await asyncio.to_thread(psutil.cpu_percent, 1.0) / 100.0
        if busy <= BUSY_SHARE or asyncio.get_running_loop().time() >= give_up_at:
            return busy


async def _program(
    directory: Path, python: str, module: str, kind: type[T], options: argparse.Namespace, *more: str
) -> T:
    result = directory / f"{module}.json"
    argv = [
        *(python, "-m", f"bench.lifecycle.{module}"),
        *("--temp-dir", str(directory / module), "--cpus", str(options.cpus)),
        *("--settle-s", str(options.settle_s), "--result", str(result)),
        *more,
    ]
    await run_guarded(argv, directory / f"{module}.log", timeout_s=_PROGRAM_TIMEOUT_S)
    return msgspec.json.decode(result.read_bytes(), type=kind)


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
    """0: measured, all limits kept; 1: measured, not all kept; 2: could not measure; 130: stopped."""
    options = _arguments()
    try:
        lines = asyncio.run(_until_stopped(options))
    except (ProgramFailed, ServeError, FileNotFoundError, TimeoutError) as error:
        _say(f"error: {error}")
        return 2
    except asyncio.CancelledError:
        _say("stopped")
        return 130
    return 0 if all(line.is_retained for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
