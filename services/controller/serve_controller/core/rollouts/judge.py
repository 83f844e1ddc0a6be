"""Judges a canary by what became of its requests beside those of its baseline.

Every gate compares the probability that a request is bad: that it failed, that it was refused as wrong, that the
response to a copy differs from the caller's, that it took longer than a time near the baseline's median or 99th
percentile. A time is chosen before the requests that it judges
came, and the canary's is a little longer, so that a small difference accuses nobody.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Final

import msgspec

from serve_common.config.rollout import RolloutConfig, RolloutStep
from serve_common.protocol.reports import RequestCounts
from serve_common.routing.request_counts import BUCKETS_PER_OCTAVE, get_bucket_start_s
from serve_controller.core.rollouts.evidence import (
    RequestBlock,
    Side,
    log_evidence,
    no_evidence,
    requests_to_go,
    with_block,
)

TOLERATED_BUCKETS: Final = 2
"""A canary that is slower by less than this many buckets (19 %) is not accused."""
REQUESTS_FOR_TIMES: Final = 300
"""Requests of the old version that must have ended before times are chosen that latencies are compared at."""


_BLOCKS_MIN: Final = {Side.WORSE: 12, Side.FINE: 4}
"""Blocks that latencies need at least to be shown worse, or fine: six and two seconds. A replica that stands still for
a moment condemns no version, nor lets it pass."""
RECENT_REQUESTS: Final = 5_000.0
"""Requests that these times are chosen from: so many of the last ones."""


class GateStatus(Enum):
    """What the requests have shown."""

    PASSED = "passed"
    FAILED = "failed"
    UNKNOWN = "unknown"
    """Neither yet: the rollout stays where it is."""


class GateKind(Enum):
    """What a gate compares, and the share that it has of the probability of a false abort."""

    ERRORS = "errors"
    CLIENT_ERRORS = "client_errors"
    LATENCY_P50 = "latency_p50"
    LATENCY_P99 = "latency_p99"
    DIFFERENCES = "differences"
    """Only in shadow steps, and only where a limit is set: a new version may respond differently on purpose."""


_SHARE_OF_DIFFERENCES: Final = 0.2
"""Share of the differences where they are judged; the others then have that much less."""
_SHARES: Final = {
    GateKind.ERRORS: 0.4,
    GateKind.CLIENT_ERRORS: 0.1,
    GateKind.LATENCY_P50: 0.2,
    GateKind.LATENCY_P99: 0.3,
}
_QUANTILES: Final = {GateKind.LATENCY_P50: 0.5, GateKind.LATENCY_P99: 0.99}
_TEXTS: Final = {
    GateKind.ERRORS: "failed",
    GateKind.CLIENT_ERRORS: "were answered with a status of 400 to 499",
    GateKind.DIFFERENCES: "answers differ",
}


class Test(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a gate: the evidence against its hypothesis in the present step."""

    side: Side
    logs: tuple[float, ...]
    seen: RequestBlock = RequestBlock()
    """All requests that are part of the evidence."""
    pending: RequestBlock = RequestBlock()
    """Requests of one version that wait for some of the other."""


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """Both sides of one comparison in the present step."""

    kind: GateKind
    bucket: int | None = None
    """The bucket that has the baseline's quantile; None until it is known, and of other kinds."""
    worse: Test = Test(side=Side.WORSE, logs=no_evidence(Side.WORSE))
    fine: Test = Test(side=Side.FINE, logs=no_evidence(Side.FINE))


class GateResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a gate says now."""

    kind: GateKind
    status: GateStatus
    seen: RequestBlock
    text: str
    """The figures, for people."""


def new_gates(config: RolloutConfig | None = None, step: RolloutStep | None = None) -> tuple[Gate, ...]:
    """The gates at the beginning of a step."""
    is_compared = step is not None and step.is_shadow and _judges_differences(config)
    return tuple(Gate(kind=kind) for kind in GateKind if kind is not GateKind.DIFFERENCES or is_compared)


def _judges_differences(config: RolloutConfig | None) -> bool:
    return config is not None and config.max_difference_increase is not None


def difference(now: RequestCounts, before: RequestCounts) -> RequestCounts | None:
    """What was counted since ``before``; None where some of that has gone: a process that had counted it ended."""
    times = {bucket: count - before.times.get(bucket, 0) for bucket, count in now.times.items()}
    rest = RequestCounts(
        successes=max(now.successes - before.successes, 0),
        client_errors=max(now.client_errors - before.client_errors, 0),
        errors=max(now.errors - before.errors, 0),
        times={bucket: count for bucket, count in times.items() if count},
        compared=max(now.compared - before.compared, 0),
        different=max(now.different - before.different, 0),
    )
    is_whole = (
        now.successes >= before.successes
        and now.client_errors >= before.client_errors
        and now.errors >= before.errors
        and now.compared >= before.compared
        and now.different >= before.different
        and min(times.values(), default=0) >= 0
        and before.times.keys() <= now.times.keys()
    )
    return rest if is_whole else None


def total(parts: list[RequestCounts]) -> RequestCounts:
    """The sum of what several routers counted."""
    times: dict[int, int] = {}
    for part in parts:
        for bucket, count in part.times.items():
            times[bucket] = times.get(bucket, 0) + count
    return RequestCounts(
        successes=sum(part.successes for part in parts),
        client_errors=sum(part.client_errors for part in parts),
        errors=sum(part.errors for part in parts),
        times=times,
        compared=sum(part.compared for part in parts),
        different=sum(part.different for part in parts),
    )


def requests_in(request_counts: RequestCounts) -> int:
    """Number of requests."""
    return request_counts.successes + request_counts.client_errors + request_counts.errors


def with_times(gates: tuple[Gate, ...], recent: Mapping[int, float]) -> tuple[Gate, ...]:
    """The gates with the times that the next requests are compared at, chosen from those of the old version.

    Why anew each time: what it did first, or while something hung, is no measure for long. That is allowed as long as
    no request is judged by a time that it took part in choosing.
    """
    if sum(recent.values()) < REQUESTS_FOR_TIMES:
        return gates
    return tuple(
        msgspec.structs.replace(gate, bucket=_quantile(recent, _QUANTILES[gate.kind]))
        if gate.kind in _QUANTILES
        else gate
        for gate in gates
    )


def with_recent(recent: Mapping[int, float], *more: RequestCounts | None) -> dict[int, float]:
    """The times of the old version with newer ones; older ones count less, so that they never add up to more than
    `RECENT_REQUESTS`."""
    times = dict(recent)
    for counts in more:
        for bucket, count in ({} if counts is None else counts.times).items():
            times[bucket] = times.get(bucket, 0.0) + count
    requests = sum(times.values())
    share = min(1.0, RECENT_REQUESTS / requests) if requests else 1.0
    return {bucket: count * share for bucket, count in times.items() if count * share >= 0.01}


def _quantile(times: Mapping[int, float], share: float) -> int:
    """The bucket that has this quantile: at its end at most ``1 - share`` of the times are still to come."""
    left = sum(times.values()) * (1 - share)
    above = 0.0
    for bucket in sorted(times, reverse=True):
        above += times[bucket]
        if above > left:
            return bucket
    return 0


def with_counts(
    gates: tuple[Gate, ...], config: RolloutConfig, canary: RequestCounts, baseline: RequestCounts
) -> tuple[Gate, ...]:
    """The gates after one more block of requests."""
    return tuple(
        msgspec.structs.replace(
            gate,
            worse=_with_block(
                gate.worse,
                _block(gate, Side.WORSE, config, canary, baseline),
                _margin(gate.kind, Side.WORSE, config),
                _gain_max(gate.kind, Side.WORSE, config),
            ),
            fine=_with_block(
                gate.fine,
                _block(gate, Side.FINE, config, canary, baseline),
                _margin(gate.kind, Side.FINE, config),
                _gain_max(gate.kind, Side.FINE, config),
            ),
        )
        if gate.kind not in _QUANTILES or gate.bucket is not None
        else gate
        for gate in gates
    )


def _gain_max(kind: GateKind, side: Side, config: RolloutConfig) -> float:
    """The most that one block adds to the logarithm of the evidence."""
    if kind not in _QUANTILES:
        return math.inf  # a version that always fails is to be gone at once
    worse_at, fine_at = _thresholds(kind, config, config.false_abort_probability)
    return (worse_at if side is Side.WORSE else fine_at) / _BLOCKS_MIN[side]


def _with_block(test: Test, block: RequestBlock, margin: float, gain_max: float) -> Test:
    block = test.pending.plus(block)
    if not block.has_both:
        return msgspec.structs.replace(test, pending=block)
    return msgspec.structs.replace(
        test,
        logs=with_block(test.logs, test.side, block, margin, gain_max),
        seen=test.seen.plus(block),
        pending=RequestBlock(),
    )


def _block(
    gate: Gate, side: Side, config: RolloutConfig, canary: RequestCounts, baseline: RequestCounts
) -> RequestBlock:
    """The bad ones among the requests of both."""
    match gate.kind:
        case GateKind.ERRORS:
            return RequestBlock(requests_in(canary), canary.errors, requests_in(baseline), baseline.errors)
        case GateKind.CLIENT_ERRORS:
            return RequestBlock(
                requests_in(canary), canary.client_errors, requests_in(baseline), baseline.client_errors
            )
        case GateKind.DIFFERENCES:
            # Both of one request are compared with the same response, so they are no independent trials. If versions
            # are equal they can only be bad together more often than by chance, which makes evidence smaller.
            return RequestBlock(canary.compared, canary.different, baseline.compared, baseline.different)
        case _:
            old, new = _slow_from(gate, side, config)
            return RequestBlock(
                sum(canary.times.values()),
                _slower(canary.times, new),
                sum(baseline.times.values()),
                _slower(baseline.times, old),
            )


def _slow_from(gate: Gate, side: Side, config: RolloutConfig) -> tuple[int, int]:
    """The buckets from whose beginning on requests count as slow, of the baseline and of the canary.

    A bucket has many times, up to all of them where they hardly vary. That a canary is worse is shown beyond the
    baseline's bucket, where few of the baseline's times are; that it is fine from that bucket on, where many are.
    """
    assert gate.bucket is not None
    if side is Side.WORSE:
        return gate.bucket + 1, gate.bucket + 1 + TOLERATED_BUCKETS
    return gate.bucket, gate.bucket + _allowed_buckets(config)


def _slower(times: Mapping[int, int], bucket: int) -> int:
    return sum(count for at, count in times.items() if at >= bucket)


def _allowed_buckets(config: RolloutConfig) -> int:
    """How many buckets fit into the allowed ratio of latencies."""
    return math.floor(math.log2(config.max_latency_ratio) * BUCKETS_PER_OCTAVE)


def _margin(kind: GateKind, side: Side, config: RolloutConfig) -> float:
    """By how much the canary's rate may exceed the baseline's, in the hypothesis of this side.

    A canary is accused of any increase, but not of responding differently: that it may up to its limit.
    """
    if kind is GateKind.DIFFERENCES:
        return config.max_difference_increase or 0.0
    if side is Side.WORSE:
        return 0.0
    match kind:
        case GateKind.ERRORS:
            return config.max_error_increase
        case GateKind.CLIENT_ERRORS:
            return config.max_client_error_increase
        case _:
            return 0.0


def alpha_of_step(config: RolloutConfig, judged_steps: int, step: int) -> float:
    """The part of the probability of a false abort that a step may use.

    ``step`` counts the judged ones from 0. The first has half of it: there most faults show.
    """
    if judged_steps <= 1:
        return config.false_abort_probability
    half = config.false_abort_probability / 2
    return half if step == 0 else half / (judged_steps - 1)


def results(gates: tuple[Gate, ...], config: RolloutConfig, alpha: float) -> tuple[GateResult, ...]:
    """What the gates say; ``alpha`` is the step's part of the probability of a false abort."""
    return tuple(_result(gate, config, alpha) for gate in gates)


def requests_needed(gate: Gate, config: RolloutConfig, alpha: float) -> int | None:
    """About how many more requests of the canary a gate's status needs; None where that cannot be said."""
    worse_at, fine_at = _thresholds(gate.kind, config, alpha)
    needs = (
        requests_to_go(test.logs, test.side, test.seen, _margin(gate.kind, test.side, config), threshold)
        for test, threshold in ((gate.worse, worse_at), (gate.fine, fine_at))
    )
    return min((more for more in needs if more is not None), default=None)


def _thresholds(kind: GateKind, config: RolloutConfig, alpha: float) -> tuple[float, float]:
    """Logarithms of the evidence from which on a canary is worse, and from which on it is fine."""
    return -math.log(alpha * _share(kind, config)), -math.log(config.false_pass_probability)


def _share(kind: GateKind, config: RolloutConfig) -> float:
    if kind is GateKind.DIFFERENCES:
        return _SHARE_OF_DIFFERENCES
    return _SHARES[kind] * (1 - _SHARE_OF_DIFFERENCES if _judges_differences(config) else 1)


def _result(gate: Gate, config: RolloutConfig, alpha: float) -> GateResult:
    worse, fine = gate.worse, gate.fine
    worse_at, fine_at = _thresholds(gate.kind, config, alpha)
    if log_evidence(worse.logs, Side.WORSE) >= worse_at:
        status = GateStatus.FAILED
    elif log_evidence(fine.logs, Side.FINE) >= fine_at:
        status = GateStatus.PASSED
    else:
        status = GateStatus.UNKNOWN
    seen = worse.seen if status is GateStatus.FAILED or gate.kind not in _QUANTILES else fine.seen
    return GateResult(kind=gate.kind, status=status, seen=seen, text=_text(gate, config, status))


def _text(gate: Gate, config: RolloutConfig, status: GateStatus) -> str:
    if gate.kind not in _QUANTILES:
        block = gate.worse.seen
        what = _TEXTS[gate.kind]
        if gate.kind is GateKind.DIFFERENCES and not block.canary:
            return "no answers were compared yet"
        baseline = _figures(block.baseline_bad, block.baseline)
        return f"{_figures(block.canary_bad, block.canary)} {what}; baseline: {baseline}"
    if gate.bucket is None:
        return f"waits for {REQUESTS_FOR_TIMES} responses of the old version"
    test = gate.worse if status is GateStatus.FAILED else gate.fine
    old, new = _slow_from(gate, test.side, config)
    block = test.seen
    return (
        f"{_figures(block.canary_bad, block.canary)} took longer than {_seconds(new)}; "
        f"baseline: {_figures(block.baseline_bad, block.baseline)} longer than {_seconds(old)}"
    )


def _figures(bad: int, requests: int) -> str:
    share = f" ({bad / requests:.2%})" if requests else ""
    return f"{bad} of {requests}{share}"


def _seconds(bucket: int) -> str:
    seconds = get_bucket_start_s(bucket)
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def get_status(statuses: AbstractSet[GateStatus]) -> GateStatus:
    """What all gates come to: one that failed fails the step, and only if all passed it passes."""
    if GateStatus.FAILED in statuses:
        return GateStatus.FAILED
    return GateStatus.PASSED if statuses == {GateStatus.PASSED} else GateStatus.UNKNOWN
