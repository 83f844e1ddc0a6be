"""Runs policies on traces and says what came out.

Why these figures: replica-seconds are what it costs, the share of requests that waited long is what callers feel, and
changes of direction are the flapping; a policy can be bad at each of them while the others look well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Final

import msgspec

from bench.autoscaling.backend import LONG_WAIT_S, Backend
from bench.autoscaling.knative import KnativePolicy
from bench.autoscaling.muster_policy import MusterPolicy
from bench.autoscaling.policies import Policy
from bench.autoscaling.ray_serve import RayServePolicy
from bench.autoscaling.traces import TARGET, Trace
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
    "Muster, a look each 5 s": lambda: MusterPolicy(_config(30, 600, interval_s=5)),
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


def compare(traces: Sequence[Trace]) -> list[Outcome]:
    """Every policy on every trace."""
    return [run_policy(trace, name, make()) for trace in traces for name, make in POLICIES.items()]


def count_turns(changes: Sequence[int]) -> int:
    """How often an addition follows a removal or the other way round."""
    return sum((before > 0) != (after > 0) for before, after in pairwise(changes))


def _late_share(backend: Backend, trace: Trace) -> float:
    """Those that never began waited too, if they had the time."""
    begun = len(backend.waits)
    late = sum(wait > LONG_WAIT_S for wait in backend.waits)
    late += int((trace.arrivals[begun:] < trace.length_s - LONG_WAIT_S).sum())
    return late / max(len(trace.arrivals), 1)
