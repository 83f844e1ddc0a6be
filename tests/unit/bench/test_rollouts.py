"""What the real core makes of simulated rollouts, and that their simulation is what it claims to be."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.rollouts.__main__ import FAULTS, check_goals, get_share
from bench.rollouts.peers import (
    ENVOY_BUCKETS_S,
    ArgoMeasurement,
    histogram_quantile,
    is_argo_failed,
    run_argo,
    run_flagger,
    run_flagger_tight,
)
from bench.rollouts.runs import Decision, Fault, make_rng, run_muster
from bench.rollouts.traffic import OLD_P99_S, Version, share_within

SEEDS = range(20)
FEWER_SEEDS = range(8)
"""Of versions that are judged for minutes: a run of those takes a quarter of a second."""
BY_NAME = {fault.name: fault for fault in FAULTS}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_muster_reaches_its_goals(fault: Fault) -> None:
    is_long = fault.is_good or fault.name in {"errors +1 %", "p99 x 1.5: slowest 10 %"}
    runs = [run_muster(fault, seed) for seed in (FEWER_SEEDS if is_long else SEEDS)]
    assert check_goals(fault, runs) == []
    if fault.missing:
        assert get_share(runs, Decision.UNDECIDED) == 1
    elif fault.is_good:
        assert get_share(runs, Decision.PROMOTED) == 1
    if fault.name == "all fail":
        assert max(run.canary_requests for run in runs) <= 60, "of 300 a second"


@pytest.mark.parametrize("name", ["none", "errors +10 %", "no reports"])
def test_plans_of_everything_change_nothing(name: str) -> None:
    assert run_muster(BY_NAME[name], 1) == run_muster(BY_NAME[name], 1, is_lazy=False)


def test_the_peers_see_what_their_thresholds_let_them() -> None:
    def decide(run, name):
        return {run(BY_NAME[name], seed).decision for seed in SEEDS}

    for run in (run_argo, run_flagger, run_flagger_tight):
        assert decide(run, "none") == {Decision.PROMOTED}
        assert decide(run, "all fail") == {Decision.ABORTED}
        assert decide(run, "errors +10 %") == {Decision.ABORTED}
    assert decide(run_argo, "errors +1 %") == {Decision.PROMOTED}
    assert decide(run_flagger, "p99 x 1.5: all") == {Decision.PROMOTED}
    assert decide(run_flagger_tight, "p99 x 1.5: all") == {Decision.ABORTED}


def test_argo_aborts_after_more_failures_than_its_limit() -> None:
    failed, error = ArgoMeasurement.FAILED, ArgoMeasurement.ERROR
    assert not is_argo_failed([failed, error, failed, ArgoMeasurement.SUCCESSFUL, failed])
    assert is_argo_failed([failed, error, failed, failed, failed])
    assert not is_argo_failed([error] * 4)
    assert is_argo_failed([error] * 5)
    assert not is_argo_failed([*[error] * 4, ArgoMeasurement.SUCCESSFUL, error])


def test_a_quantile_is_linear_within_its_bucket() -> None:
    counts = [0] * (len(ENVOY_BUCKETS_S) + 1)
    counts[6], counts[7] = 90, 10  # 50 to 100 ms, 100 to 250 ms
    assert histogram_quantile(0.99, counts) == pytest.approx(0.1 + 0.15 * 0.9)
    counts[-1] = 1000
    assert histogram_quantile(0.99, counts) == ENVOY_BUCKETS_S[-1]


def test_times_have_the_distribution_of_slowed_log_normal_times() -> None:
    version = Version(slow_from_z=1.2815515655446004, slowdown=1.5)
    times = make_rng(BY_NAME["none"], 1).lognormal(math.log(0.05), 0.5, 100_000)
    slow_from_s = 0.05 * math.exp(0.5 * version.slow_from_z)
    slowed = np.where(times > slow_from_s, times * 1.5, times)
    for seconds in (0.03, 0.05, 0.09, 0.1, 0.12, 0.16, 0.24, 0.4):
        assert share_within(version, seconds) == pytest.approx(np.mean(slowed <= seconds), abs=0.006)
    assert share_within(Version(), OLD_P99_S) == pytest.approx(0.99)
    assert share_within(version, 1.5 * OLD_P99_S) == pytest.approx(0.99)
