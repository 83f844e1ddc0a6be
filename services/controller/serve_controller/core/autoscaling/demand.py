"""Replicas needed for a load, before limits; and the delays, limits and texts that all decisions share.

There are two numbers, `Demand.more` and `Demand.keep`, because a mean over a window is noisy. Near a multiple of the
target, a single threshold would be crossed in both directions again and again. So more replicas are wanted as soon as
the load exceeds the target, and fewer only when the remaining ones would have a little capacity to spare.

- Wanted replicas = seen / target: Ray Serve 2.60, ``autoscaling_policy._core_replica_queue_length_policy``. For an
  average per replica it is running * seen / target, as in Kubernetes' HorizontalPodAutoscaler (only running replicas
  are part of an average).
- Spare capacity = ``SPARE * sqrt(replicas)``. The number of ongoing requests of independent callers has a variance
  proportional to its mean (Poisson), so its noise grows with the square root. A share of the number (10 % in
  Kubernetes) would be too little for few replicas, and would keep 10 needless ones of 100.

On call, the texts are read first: all decisions use the same words and units for the load, the replicas needed for it,
and the delay that is not over.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from serve_common.config.autoscaling import AutoscalingConfig, QueryMeaning
from serve_controller.core.autoscaling.values import LoadSample, ScalingInput, ScalingState, Series


def number_text(value: float) -> str:
    """``value`` with its significant digits."""
    if value >= 1000 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2g}"


def replicas_text(count: int) -> str:
    """``count`` with its noun."""
    return "1 replica" if count == 1 else f"{count} replicas"


def requests_text(count: str) -> str:
    """``count``, as formatted by `number_text`, with its noun."""
    return f"{count} request" if count == "1" else f"{count} requests"


def format_waiting(count: int) -> str:
    """``count`` requests that wait, as text."""
    return "1 request waits" if count == 1 else f"{count} requests wait"


def format_wanted(seen: str, count: int, limited: int) -> str:
    """Text of the replicas that a load needs, and of the limit that applies."""
    load_text = f"{seen}: {replicas_text(count)} wanted"
    if limited < count:
        return f"{load_text}, max_replicas is {limited}"
    return f"{load_text}, min_replicas is {limited}" if limited > count else load_text


def format_delay(load: str, waited_s: float, delay_s: float, what: str) -> str:
    """Text of how much of a delay is over."""
    return f"{load}; waits {max(waited_s, 0.0):.0f} s of {delay_s:.0f} s before {what}"


SPARE: Final = 0.1
"""Spare capacity, in replicas times the square root of their number."""
STALE_AFTER_S: Final = 15.0
"""Age in seconds beyond which a load sample counts as missing, unless younger than three metrics intervals."""
WANTED_MAX: Final = 1e9
_NOISE: Final = 1e-6
"""Rounding error of float sums, in replicas."""
_NOTHING: Final = 1e-9
"""Requests below which the load counts as zero. One request of 1 ms in an hour is 2.8e-7."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas needed for a load."""

    seen: float
    wanted: float
    """Replicas, not rounded."""
    counted: float
    """The same without requests that wait only because replicas are still starting."""
    more: int
    """Replicas beyond which no more are needed."""
    keep: int
    """Replicas below which there would be no spare capacity."""
    burst: float | None
    """Replicas needed for the load over `panic_window_s`; None where it is not known or must not count."""
    is_idle: bool
    """Whether there was no load at all."""
    queued: float
    at: float
    load_text: str
    """The load as text for people."""


def stale_after_s(config: AutoscalingConfig) -> float:
    """Greatest age of a usable load sample, seconds."""
    return max(3 * config.metrics_interval_s, STALE_AFTER_S)


def round_up(replicas: float) -> int:
    """Round up, tolerating the rounding error of float sums."""
    return max(math.ceil(replicas - _NOISE), 0)


def with_spare(replicas: float) -> int:
    """The fewest replicas n for the load of ``replicas`` with spare capacity: n >= replicas + SPARE * sqrt(n)."""
    if replicas <= _NOISE:
        return 0
    root = (SPARE + math.sqrt(SPARE * SPARE + 4 * replicas)) / 2
    return round_up(root * root)


def read_demand(inputs: ScalingInput, series: Series, now: float, *, is_starting: bool) -> Demand | str:
    """Demand of the newest load sample; or the reason why it cannot be used, for people.

    While replicas start (``is_starting``), requests wait because of that: they justify those replicas, but no further
    ones. Only requests in replicas do.
    """
    sample = series[-1] if series else None
    problem = _get_problem(sample, inputs.config, now)
    if sample is None or sample.seen is None or problem:
        return problem or "nothing was read yet"
    seen, query = sample.seen, inputs.config.query
    burst = sample.burst
    if burst is not None and not 0 <= burst < math.inf:
        burst = None
    is_idle = _is_nothing(sample, burst, 1.0 if query is None else min(query.target, 1.0))
    found = _wanted(inputs, sample, seen)
    if isinstance(found, str):
        return found
    wanted, load_text = found
    counted = wanted
    if is_starting and inputs.policy_target is None and query is None:
        working = (seen - sample.queued) / inputs.config.target_ongoing_requests
        counted -= max(wanted - max(working, float(inputs.num_replicas)), 0.0)
    least = 0 if is_idle else 1
    keep = with_spare(wanted) if inputs.policy_target is None else round_up(wanted)
    return Demand(
        seen=seen,
        wanted=wanted,
        counted=counted,
        more=max(round_up(counted), least),
        keep=max(keep, least),
        burst=None
        if burst is None or query is not None or inputs.policy_target is not None
        else min(burst / inputs.config.target_ongoing_requests, WANTED_MAX),
        is_idle=is_idle,
        queued=sample.queued,
        at=sample.at,
        load_text=load_text,
    )


def _wanted(inputs: ScalingInput, sample: LoadSample, seen: float) -> tuple[float, str] | str:
    """Replicas needed for a load sample, and the load as text; or the reason why it cannot be used."""
    query = inputs.config.query
    if inputs.policy_target is not None:
        policy_target = float(min(max(inputs.policy_target, 0), WANTED_MAX))
        return policy_target, f"the policy function asks for {number_text(policy_target)} replicas"
    if query is None:
        over_s = inputs.config.look_back_period_s if sample.over_s is None else sample.over_s
        wanted = min(seen / inputs.config.target_ongoing_requests, WANTED_MAX)
        return wanted, f"{requests_text(number_text(seen))} seen over {number_text(round(over_s, 1))} s"
    if query.meaning is QueryMeaning.TOTAL:
        wanted = min(seen / query.target, WANTED_MAX)
        return wanted, f"the query gave {number_text(seen)} in all, target {number_text(query.target)}"
    if not inputs.num_running:
        return "an average over replicas says nothing while none is running"
    wanted = min(inputs.num_running * (seen / query.target), WANTED_MAX)
    return wanted, f"the query gave {number_text(seen)} per replica, target {number_text(query.target)}"


def _get_problem(sample: LoadSample | None, config: AutoscalingConfig, now: float) -> str:
    """Why this load sample cannot be used; empty if it can."""
    if sample is None:
        return "nothing was read yet"
    if sample.seen is None:
        return sample.missing or "the load was not read"
    if not 0 <= sample.seen < math.inf or not 0 <= sample.queued < math.inf:
        return f"{sample.seen:g} requests seen, {sample.queued:g} queued: no load can be that"
    age_s = now - sample.at
    limit_s = stale_after_s(config)
    if math.isnan(age_s) or age_s > limit_s:
        return f"the newest reading is {age_s:.0f} s old, more than {limit_s:g} s"
    if age_s < -limit_s:
        return f"the newest reading is {-age_s:.0f} s ahead of the clock here"
    return ""


def _is_nothing(sample: LoadSample, burst: float | None, unit: float) -> bool:
    nothing = _NOTHING * unit
    return (sample.seen or 0.0) <= nothing and sample.queued <= _NOTHING and (burst or 0.0) <= nothing


_LATENESS_MAX_S: Final = 1.0


def within(count: int, config: AutoscalingConfig) -> int:
    """``count`` within the limits."""
    return min(max(count, config.min_replicas), config.max_replicas)


def punctual(delay_s: float, config: AutoscalingConfig) -> float:
    """``delay_s`` less a tolerance: an evaluation that is milliseconds early must not cost a whole interval."""
    return delay_s - min(0.1 * delay_s, 0.1 * config.metrics_interval_s, _LATENESS_MAX_S)


def to_zero_delay_s(config: AutoscalingConfig) -> float:
    """Seconds for which the last replica must not have been wanted."""
    delay_s = config.downscale_to_zero_delay_s
    return config.downscale_delay_s if delay_s is None else delay_s


def grown(state: ScalingState, target: int, now: float) -> ScalingState:
    """``state`` after scaling up to ``target`` replicas.

    An evaluation with a known load, a wake-up and a change of the limits all scale up, and must leave the same state.
    """
    return msgspec.structs.replace(
        state,
        decided=target,
        up_since=None,
        down_since=None,
        zero_since=None,
        fewer=(),
        last_up_at=now,
        stabilized_at=None,
    )


Fewer = tuple[tuple[int, float], ...]
"""Entries (n, since), n falling and since rising: fewer than n, and so fewer than any number up to the n of the
preceding entry, have been wanted since then."""

FEWER_MAX: Final = 32


def record_wanted(fewer: Fewer, wanted: int, now: float) -> Fewer:
    """``fewer`` after ``wanted`` replicas were wanted at ``now``."""
    noted: list[tuple[int, float]] = []
    for than, since in fewer:
        if than <= wanted:
            if not noted or wanted + 1 < noted[-1][0]:
                noted.append((wanted + 1, since))
            break
        noted.append((than, since))
    else:
        if not noted or wanted + 1 < noted[-1][0]:
            noted.append((wanted + 1, now))
    while len(noted) > FEWER_MAX:
        # Its numbers fall to the next entry, which is younger: their delay gets longer, never shorter. The effect is
        # least where entries are closest. The first entry stays: without it nothing could be scaled down.
        del noted[min(range(1, len(noted) - 1), key=lambda index: noted[index + 1][1] - noted[index - 1][1])]
    return tuple(noted)


def since_fewer_than(fewer: Fewer, num_replicas: int) -> float | None:
    """Since when fewer than ``num_replicas`` have been wanted without a break; None when they are not."""
    for than, since in fewer:
        if than <= num_replicas:
            return since
    return None


def largest_wanted(fewer: Fewer, now: float, delay_s: float) -> int | None:
    """The largest number wanted during the last ``delay_s``; None when the record does not go back so far.

    One timer per direction would not do. A timer that restarts at every step down lets a falling load keep replicas for
    one delay per step, and the number wanted at the moment it expires may be a dip. So `Fewer` records, for every
    number of replicas, since when fewer have been wanted. This is the scale-down stabilization of Kubernetes'
    HorizontalPodAutoscaler (KEP-853, "pick the largest recommendation of the window"), without storing the window.
    """
    largest = None
    for than, since in fewer:
        if now - since < delay_s:
            break
        largest = than - 1
    return largest


def without_gap(state: ScalingState, now: float, gap_s: float) -> ScalingState:
    """``state`` without the last ``gap_s``: time in which the load was not known counts for no delay."""

    def moved(at: float | None) -> float | None:
        return None if at is None else min(at + gap_s, now)

    return msgspec.structs.replace(
        state,
        up_since=moved(state.up_since),
        fewer=tuple((than, min(since + gap_s, now)) for than, since in state.fewer),
    )
