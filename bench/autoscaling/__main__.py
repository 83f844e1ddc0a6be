"""``python -m bench.autoscaling``: a table of what policies make of the same loads; always the same one."""

from __future__ import annotations

import argparse
from itertools import groupby

from bench.autoscaling.comparison import compare
from bench.autoscaling.traces import SEED, make_traces


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.autoscaling", description=__doc__)
    parser.add_argument("--seed", type=int, default=SEED, help="of arrivals and service times")
    parser.add_argument("--scale", type=float, default=1.0, help="shortens every trace, for a quick look")
    arguments = parser.parse_args()
    traces = make_traces(arguments.seed, arguments.scale)
    about = {trace.name: trace for trace in traces}
    print("| Trace | Policy | Replica-seconds | Waited over 1 s | Turns | Moves | Most replicas |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for name, outcomes in groupby(compare(traces), key=lambda outcome: outcome.trace):
        trace = about[name]
        label = f"**{name}**: {trace.about} ({len(trace.arrivals):,} requests)"
        for outcome in outcomes:
            print(
                f"| {label} | {outcome.policy} | {outcome.replica_seconds:,.0f} | {outcome.late_share:.2%} "
                f"| {outcome.turns} | {outcome.moves} | {outcome.most} |"
            )
            label = ""


if __name__ == "__main__":
    main()
