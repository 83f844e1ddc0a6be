"""``python -m bench.rollouts``: what judges of rollouts make of good and bad versions; the same table for a seed.

Exit codes: 0 when Muster reaches its goals, 1 when it misses one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import numpy as np

from bench.rollouts.peers import run_argo, run_flagger, run_flagger_tight
from bench.rollouts.runs import LIMIT_S, Decision, Fault, Missing, Run, run_muster
from bench.rollouts.traffic import ERRORS, Version

_Z_P90: Final = 1.2815515655446004

FAULTS: Final = (
    Fault(name="none", is_good=True),
    Fault(name="errors +1 %", new=Version(errors=ERRORS + 0.01)),
    Fault(name="errors +10 %", new=Version(errors=ERRORS + 0.1)),
    Fault(name="p99 x 1.5: slowest 10 %", new=Version(slow_from_z=_Z_P90, slowdown=1.5)),
    Fault(name="p99 x 1.5: all", new=Version(slow_from_z=-10.0, slowdown=1.5)),
    Fault(name="all fail", new=Version(errors=1.0)),
    Fault(name="no requests", missing=Missing.REQUESTS, is_good=True),
    Fault(name="no reports", missing=Missing.REPORTS, is_good=True),
)
JUDGES: Final[Mapping[str, Callable[[Fault, int], Run]]] = {
    "Muster": run_muster,
    "Argo Rollouts": run_argo,
    "Flagger, p99 at most 500 ms": run_flagger,
    "Flagger, p99 at most 240 ms": run_flagger_tight,
}
ABORTED_MIN: Final = 0.95
"""Share of rollouts of a bad version that must be aborted."""
FALSE_ABORTED_MAX: Final = 0.01
"""Share of rollouts of a good version that may be aborted."""


def get_share(runs: list[Run], decision: Decision) -> float:
    """Share of the runs that ended so."""
    return sum(run.decision is decision for run in runs) / len(runs)


def check_goals(fault: Fault, runs: list[Run]) -> list[str]:
    """What Muster's runs under one fault miss of its goals."""
    missed = []
    aborted, promoted = get_share(runs, Decision.ABORTED), get_share(runs, Decision.PROMOTED)
    if fault.missing and promoted:
        missed.append(f"{fault.name}: {promoted:.1%} were promoted on missing data")
    if fault.is_good and aborted > FALSE_ABORTED_MAX:
        missed.append(f"{fault.name}: {aborted:.1%} were aborted; at most {FALSE_ABORTED_MAX:.0%}")
    if not fault.is_good and aborted < ABORTED_MIN:
        missed.append(f"{fault.name}: {aborted:.1%} were aborted; at least {ABORTED_MIN:.0%}")
    return missed


def format_row(label: str, judge: str, runs: list[Run]) -> str:
    """One row of the table."""
    median, p95 = np.percentile([run.canary_requests for run in runs], [50, 95])
    seconds = float(np.median([run.seconds for run in runs]))
    shares = " | ".join(f"{get_share(runs, decision):.1%}" for decision in Decision)
    return f"| {label} | {judge} | {shares} | {median:,.0f} | {p95:,.0f} | {seconds:,.0f} s |"


def main() -> int:
    """Simulate and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.rollouts", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="rollouts for each fault and each judge")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--fault", default="", help="only faults whose name contains this")
    arguments = parser.parse_args()
    started_at = time.perf_counter()
    seeds = range(arguments.seed, arguments.seed + arguments.seeds)
    missed = []
    print(
        "| New version | Judge | Aborted | Promoted | Undecided | Canary requests, median | 95th percentile "
        "| Decided after, median |\n|---|---|---:|---:|---:|---:|---:|---:|"
    )
    with multiprocessing.Pool(arguments.processes) as pool:
        for fault in FAULTS:
            if arguments.fault not in fault.name:
                continue
            label = f"**{fault.name}**"
            for judge, run in JUDGES.items():
                runs = pool.map(partial(run, fault), seeds, chunksize=25)
                print(format_row(label, judge, runs), flush=True)
                label = ""
                if judge == "Muster":
                    missed += check_goals(fault, runs)
    print(
        f"\n{arguments.seeds:,} seeds from {arguments.seed}, undecided after {LIMIT_S / 3600:g} h, "
        f"{time.perf_counter() - started_at:.0f} s"
    )
    print("\n".join(f"Missed: {text}" for text in missed) or "Muster reaches its goals.")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
