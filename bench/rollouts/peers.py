"""The analyses of Argo Rollouts and Flagger as their documents show them, on the same requests.

Neither has a default: without an analysis that somebody writes, both promote whatever starts. What is compared is the
first example of each one's documents, which is what most people begin with. The steps of traffic are Muster's (5 %,
25 %, 50 %), so that the analyses are compared and not the steps.

Written after reading, at the time of this comparison:

- argoproj/argo-rollouts ``docs/features/analysis.md`` ("Background Analysis"): success rate by ``irate`` of the
  requests that are no 5xx, at least 0.95, each 5 minutes, ``failureLimit: 3``; pauses of 10 minutes between weights.
  There the analysis begins at the third step; here with the first, which is kinder. ``analysis/analysis.go``
  (``assessMetricFailureInconclusiveOrError``): it fails once there are *more* failed measurements than the limit, or
  more than 4 consecutive ones with an error (``utils/defaults/defaults.go``), such as a query without any series.
  ``utils/evaluate/evaluate.go``: what does not meet the condition is a failure, and so is NaN.
- fluxcd/flagger ``docs/gitbook/usage/metrics.md`` (``request-success-rate`` at least 99, ``request-duration``, the p99,
  at most 500 ms, both over 1 minute) and ``docs/gitbook/tutorials/istio-progressive-delivery.md`` (interval 1 minute,
  threshold 5); ``pkg/controller/scheduler.go``: failed checks add up over the whole rollout, and each keeps the weight
  as it is; ``pkg/controller/scheduler_metrics.go``: a query without values is a failed check,
  and so is NaN since its pull request 1095 of 2022 (before, NaN passed);
  ``pkg/metrics/observers/istio.go``: the p99 is a ``histogram_quantile`` of Envoy's buckets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from functools import cache
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.rollouts.runs import LIMIT_S, STOP_WITHIN_S, Decision, Fault, Missing, Run, make_rng
from bench.rollouts.traffic import OLD_P99_S, RATE, Version, share_between

WEIGHTS: Final = (0.05, 0.25, 0.5)
"""Shares of the requests before all of them."""
ARGO_SUCCESS_MIN: Final = 0.95
ARGO_INTERVAL_S: Final = 300.0
ARGO_PAUSE_S: Final = 600.0
ARGO_FAILURE_LIMIT: Final = 3
ARGO_CONSECUTIVE_ERROR_LIMIT: Final = 4
SCRAPE_S: Final = 15.0
"""Seconds between Prometheus' scrapes: what ``irate`` looks back, as it takes the last two samples."""
FLAGGER_SUCCESS_MIN: Final = 0.99
FLAGGER_INTERVAL_S: Final = 60.0
FLAGGER_THRESHOLD: Final = 5
FLAGGER_DURATION_MAX_S: Final = 0.5
"""As its documents show it: three times the old version's p99 here."""
FLAGGER_DURATION_TIGHT_S: Final = 1.5 * OLD_P99_S
"""As somebody would set it who knows the old version well."""
ENVOY_BUCKETS_S: Final = tuple(
    ms / 1000
    for ms in (0.5, 1, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000, 300_000)
)


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """What Prometheus knows of the canary's requests over some seconds."""

    requests: int
    failures: int
    times: tuple[int, ...]
    """Numbers of the requests that did not fail by `ENVOY_BUCKETS_S`, and of longer ones."""
    has_series: bool = True

    @property
    def success_rate(self) -> float:
        """Share of the requests that did not fail; NaN without any."""
        return 1 - self.failures / self.requests if self.requests else math.nan


class ArgoMeasurement(Enum):
    """What Argo makes of one query."""

    SUCCESSFUL = "successful"
    FAILED = "failed"
    ERROR = "error"


def measure_argo(window: Window) -> ArgoMeasurement:
    """``result[0] >= 0.95``: false for NaN, an error without a result."""
    if not window.has_series:
        return ArgoMeasurement.ERROR
    is_met = window.success_rate >= ARGO_SUCCESS_MIN
    return ArgoMeasurement.SUCCESSFUL if is_met else ArgoMeasurement.FAILED


def is_argo_failed(measurements: Sequence[ArgoMeasurement]) -> bool:
    """Whether an analysis with these measurements aborts the rollout."""
    errors = 0
    for measurement in reversed(measurements):
        if measurement is not ArgoMeasurement.ERROR:
            break
        errors += 1
    failed = sum(measurement is ArgoMeasurement.FAILED for measurement in measurements)
    return failed > ARGO_FAILURE_LIMIT or errors > ARGO_CONSECUTIVE_ERROR_LIMIT


def is_flagger_check_passed(window: Window, duration_max_s: float) -> bool:
    """Whether both metrics are within their ranges; without values they are not."""
    if not window.has_series or window.requests == 0 or window.success_rate < FLAGGER_SUCCESS_MIN:
        return False
    return sum(window.times) > 0 and histogram_quantile(0.99, window.times) <= duration_max_s


def histogram_quantile(share: float, counts: Sequence[int]) -> float:
    """Prometheus' function: linear within a bucket of `ENVOY_BUCKETS_S`; the last bound beyond it."""
    rank, below = share * sum(counts), 0
    for at, count in enumerate(counts[:-1]):
        if below + count >= rank:
            start = ENVOY_BUCKETS_S[at - 1] if at else 0.0
            return start + (ENVOY_BUCKETS_S[at] - start) * (rank - below) / count
        below += count
    return ENVOY_BUCKETS_S[-1]


@cache
def _envoy_shares(version: Version) -> NDArray[np.float64]:
    return share_between(version, ENVOY_BUCKETS_S)


class _Canary:
    """The canary's requests in one run, and what is known of them."""

    def __init__(self, fault: Fault, seed: int) -> None:
        self._fault, self._rng = fault, make_rng(fault, seed)
        self._stop_s = self._rng.uniform(0, STOP_WITHIN_S) if fault.missing else LIMIT_S
        self._requests = 0.0
        """Their expected number so far."""

    def serve(self, weight: float, start_s: float, end_s: float) -> None:
        """Requests at this weight between two times."""
        if self._fault.missing is Missing.REQUESTS:
            end_s = min(end_s, max(self._stop_s, start_s))
        self._requests += RATE * weight * (end_s - start_s)

    def query(self, weight: float, start_s: float, end_s: float) -> Window:
        """What is known of the time between both."""
        known_s = max(min(end_s, self._stop_s) - start_s, 0.0)
        number = int(self._rng.poisson(RATE * weight * known_s))
        failures = int(self._rng.binomial(number, self._fault.new.errors))
        times = self._rng.multinomial(number - failures, _envoy_shares(self._fault.new))
        has_series = self._fault.missing is not Missing.REPORTS or known_s > 0
        return Window(
            requests=number,
            failures=failures,
            times=tuple(times.tolist()),
            has_series=has_series and end_s > 0,
        )

    def end(self, decision: Decision, seconds: float) -> Run:
        return Run(decision=decision, canary_requests=int(self._rng.poisson(self._requests)), seconds=seconds)


def run_argo(fault: Fault, seed: int) -> Run:
    """A rollout with Argo's background analysis."""
    canary, measurements, now = _Canary(fault, seed), list[ArgoMeasurement](), 0.0
    weight = 0.0
    for weight in WEIGHTS:
        for _ in range(round(ARGO_PAUSE_S / ARGO_INTERVAL_S)):
            # The first measurement is due at once, before the canary has any request.
            measurements.append(measure_argo(canary.query(weight, max(now - SCRAPE_S, 0.0), now)))
            if is_argo_failed(measurements):
                return canary.end(Decision.ABORTED, now)
            canary.serve(weight, now, now + ARGO_INTERVAL_S)
            now += ARGO_INTERVAL_S
    return canary.end(Decision.PROMOTED, now)


def run_flagger(fault: Fault, seed: int, duration_max_s: float = FLAGGER_DURATION_MAX_S) -> Run:
    """A rollout with Flagger's metrics analysis."""
    canary, now, failed_checks, step = _Canary(fault, seed), 0.0, 0, 0
    while now < LIMIT_S:
        canary.serve(WEIGHTS[step], now, now + FLAGGER_INTERVAL_S)
        now += FLAGGER_INTERVAL_S
        if failed_checks >= FLAGGER_THRESHOLD:
            return canary.end(Decision.ABORTED, now)
        window = canary.query(WEIGHTS[step], now - FLAGGER_INTERVAL_S, now)
        if not is_flagger_check_passed(window, duration_max_s):
            failed_checks += 1
        elif step == len(WEIGHTS) - 1:
            return canary.end(Decision.PROMOTED, now)
        else:
            step += 1
    return canary.end(Decision.UNDECIDED, now)


def run_flagger_tight(fault: Fault, seed: int) -> Run:
    """The same with a limit of 1.5 times the old version's p99."""
    return run_flagger(fault, seed, FLAGGER_DURATION_TIGHT_S)
