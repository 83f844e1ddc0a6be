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
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

from bench.console import PEERS_PYTHON, check_peers, positive, print_report, run_command, say
from bench.floors import free_port
from bench.lifecycle.muster_steps import measure_muster
from bench.lifecycle.report import Round, conclude, make_report, render
from bench.lifecycle.story import SETTLE_S, BareRound, SystemRound
from bench.muster_stack import logs_of
from muster.embedded.supervisor import last_lines
from serve_common.errors import ServeError
from serve_common.runtime import guardian
from serve_common.runtime.child_process import ChildProcess

T = TypeVar("T")

BUSY_SHARE = 0.1
"""Of all processors, used by others before a round: above it a warning is due."""
_PROGRAM_TIMEOUT_S = 400.0
_STOP_WITHIN_S = 8.0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.lifecycle", description=__doc__)
    parser.add_argument("--peers", action="store_true", help="measure Ray Serve too (`make bench-peers`)")
    parser.add_argument("--peers-python", type=Path, default=PEERS_PYTHON, metavar="FILE")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument(
        "--cpus", type=positive, default=2, help="CPUs each Ray is told; it keeps that many processes ready"
    )
    parser.add_argument("--settle-s", type=float, default=SETTLE_S, help="pause between two changes")
    parser.add_argument("--calm-within-s", type=float, default=60.0, help="wait so long for a calm machine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured there")
    return parser.parse_args()


async def bench(options: argparse.Namespace) -> int:
    """Measure all rounds and report. 0: all limits kept; 1: not all."""
    if options.peers:
        check_peers(options.peers_python)
    rounds = []
    for number in range(options.rounds):
        rounds.append(await _round(options, f"round {number + 1}/{options.rounds}"))
    lines = conclude(rounds)
    report = make_report(rounds, lines, options.cpus, options.settle_s)
    print_report(render(report), report, options.json)
    return 0 if all(line.is_kept for line in lines) else 1


async def _round(options: argparse.Namespace, name: str) -> Round:
    busy = await _calm(options.calm_within_s)
    load = os.getloadavg()[0]
    if busy > BUSY_SHARE:
        say(f"warning: others use {busy:.0%} of this machine; trust the ratios little and the rest less")
    # Short: Ray makes unix sockets below it, and their paths may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="ml-", ignore_cleanup_errors=True) as text:
        directory = Path(text)
        say(f"{name}  bare Ray …")
        bare = await _program(directory, sys.executable, "bare_ray", BareRound, options)
        say(f"{name}  Muster …")
        try:
            muster = await measure_muster(directory / "muster", options.cpus, options.settle_s)
        except (ServeError, TimeoutError):
            say(logs_of(directory / "muster"))
            raise
        serve = None
        if options.peers:
            say(f"{name}  Ray Serve …")
            port = ("--port", str(free_port()))
            serve = await _program(
                directory, str(options.peers_python), "ray_serve", SystemRound, options, *port
            )
    for measured in (muster, serve):
        if measured is not None:
            say("  ".join(f"{taken.step} {taken.done_s:.2f} s" for taken in measured.taken))
    return Round(busy_before=busy, load_before=load, bare=bare, muster=muster, serve=serve)


async def _calm(within_s: float) -> float:
    """Wait until others leave the machine alone for a second; the share of it that they last used."""
    deadline = asyncio.get_running_loop().time() + within_s
    while True:
        busy = await asyncio.to_thread(psutil.cpu_percent, 1.0) / 100.0
        if busy <= BUSY_SHARE or asyncio.get_running_loop().time() >= deadline:
            return busy


async def _program(
    directory: Path, python: str, module: str, kind: type[T], options: argparse.Namespace, *more: str
) -> T:
    result = directory / f"{module}.json"
    argv = [
        *(python, "-m", "bench.lifecycle.ray_programs", module),
        *("--temp-dir", str(directory / module), "--cpus", str(options.cpus)),
        *("--settle-s", str(options.settle_s), "--result", str(result)),
        *more,
    ]
    await run_guarded(argv, directory / f"{module}.log", timeout_s=_PROGRAM_TIMEOUT_S)
    return msgspec.json.decode(result.read_bytes(), type=kind)


class ProgramFailed(Exception):
    """It did not end well; the message has the end of its output."""


async def run_guarded(argv: Sequence[str], log_path: Path, *, timeout_s: float) -> None:
    """Run ``argv`` from the root of the checkout to its end; leaves nothing behind. Raises `ProgramFailed`.

    Why the embedded stack's guardian: Ray's processes rename themselves and leave their session; a "subreaper" above
    them still finds every one, and nothing else.
    """
    root = Path(__file__).parents[2]
    command = guardian.command(argv, stop_timeout_s=2)
    env = {**os.environ, "PYTHONPATH": str(root)}
    with log_path.open("ab") as log:
        process = await ChildProcess.start(command, env=env, cwd=root, stdout=log, stderr=log)
    try:
        async with asyncio.timeout(timeout_s):
            code = await process.ended()
    except TimeoutError:
        raise ProgramFailed(f"{argv[2]} took longer than {timeout_s:g} s\n{last_lines(log_path)}") from None
    finally:
        # The guardian kills everything below it before it ends.
        if not process.has_ended and not await process.stop((signal.SIGTERM, _STOP_WITHIN_S)):
            raise TimeoutError(f"{argv[2]} does not end")
    if code:
        raise ProgramFailed(f"{argv[2]} ended with code {code}\n{last_lines(log_path)}")


def main() -> int:
    """0: measured, all limits kept; 1: measured, not all kept; 2: could not measure; 130: stopped."""
    return run_command(bench(_arguments()), (ProgramFailed, ServeError, FileNotFoundError, TimeoutError))


if __name__ == "__main__":
    sys.exit(main())
