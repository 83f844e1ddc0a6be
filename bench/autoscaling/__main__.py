"""``python -m bench.autoscaling``: a table of what policies make of the same loads; always the same one.

Why these figures: replica-seconds are what it costs, the share of requests that waited long is what callers feel, and
changes of direction are the flapping; a policy can be bad at each of them while the others look well.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Final

import msgspec

from bench.autoscaling.policies import KnativePolicy, MusterPolicy, Policy, RayServePolicy
from bench.autoscaling.simulation import LONG_WAIT_S, SEED, TARGET, Backend, Trace, make_traces
from serve_common.config.autoscaling import AutoscalingConfig

MIN_REPLICAS: Final = 1
MAX_REPLICAS: Final = 50


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one policy made of one trace."""

    trace: str
    policy: str
    replica_seconds: float
    late_share: float
    """Of the requests, those that waited over `LONG_WAIT_S` for a place in a replica."""
    turns: int
    """How often it changed direction."""
    moves: int
    most: int
    """The largest number of replicas."""


def _config(up_s: float, down_s: float, interval_s: float = 10.0) -> AutoscalingConfig:
    return AutoscalingConfig(
        metrics_interval_s=interval_s,
        min_replicas=MIN_REPLICAS,
        max_replicas=MAX_REPLICAS,
        target_ongoing_requests=TARGET,
        upscale_delay_s=up_s,
        downscale_delay_s=down_s,
    )


def _knative(scale_down_delay_s: float) -> Callable[[], Policy]:
    return lambda: KnativePolicy(
        target=TARGET,
        min_replicas=MIN_REPLICAS,
        max_replicas=MAX_REPLICAS,
        scale_down_delay_s=scale_down_delay_s,
    )


POLICIES: Final[Mapping[str, Callable[[], Policy]]] = {
    "Muster, as delivered (30/600 s)": lambda: MusterPolicy(_config(30, 600)),
    "Muster, evaluated each 5 s": lambda: MusterPolicy(_config(30, 600, interval_s=5)),
    "Ray Serve, as delivered (30/600 s)": lambda: RayServePolicy(_config(30, 600)),
    "Knative, scale-down delay 600 s": _knative(600),
    "Knative, as delivered (0/60 s)": _knative(0),
    "Muster, 0/60 s": lambda: MusterPolicy(_config(0, 60)),
    "Ray Serve, 0/60 s": lambda: RayServePolicy(_config(0, 60)),
}


def run_policy(trace: Trace, name: str, policy: Policy) -> Outcome:
    """Let ``policy`` scale a backend through the whole of ``trace``."""
    backend = Backend(trace, trace.num_replicas)
    while backend.now < trace.length_s:
        backend.advance(backend.now + policy.tick_s)
        backend.scale(policy.tick(backend))
    return Outcome(
        trace=trace.name,
        policy=name,
        replica_seconds=backend.replica_seconds,
        late_share=_late_share(backend, trace),
        turns=count_turns([change for _, change in backend.moves]),
        moves=len(backend.moves),
        most=backend.most,
    )


def count_turns(changes: Sequence[int]) -> int:
    """How often an addition follows a removal or the other way round."""
    return sum((before > 0) != (after > 0) for before, after in pairwise(changes))


def _late_share(backend: Backend, trace: Trace) -> float:
    """Those that never began waited too, if they had the time."""
    begun = len(backend.waits)
    late = sum(wait > LONG_WAIT_S for wait in backend.waits)
    late += int((trace.arrivals[begun:] < trace.length_s - LONG_WAIT_S).sum())
    return late / max(len(trace.arrivals), 1)


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.autoscaling", description=__doc__)
    parser.add_argument("--seed", type=int, default=SEED, help="seed of arrivals and service times")
    parser.add_argument("--scale", type=float, default=1.0, help="factor that shortens every trace")
    arguments = parser.parse_args()
    traces = make_traces(arguments.seed, arguments.scale)
    outcomes = (run_policy(trace, name, make()) for trace in traces for name, make in POLICIES.items())
    about = {trace.name: trace for trace in traces}
    print("| Trace | Policy | Replica-seconds | Waited over 1 s | Turns | Moves | Most replicas |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for name, of_trace in groupby(outcomes, key=lambda outcome: outcome.trace):
        trace = about[name]
        label = f"**{name}**: {trace.about} ({len(trace.arrivals):,} requests)"
        for outcome in of_trace:
            print(
                f"| {label} | {outcome.policy} | {outcome.replica_seconds:,.0f} | {outcome.late_share:.2%} "
                f"| {outcome.turns} | {outcome.moves} | {outcome.most} |"
            )
            label = ""


if __name__ == "__main__":
    main()
