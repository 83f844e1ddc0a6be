"""What the autoscaling policies must keep to on simulated loads."""

from __future__ import annotations

import pytest

from bench.autoscaling.__main__ import (
    MAX_REPLICAS,
    MIN_REPLICAS,
    POLICIES,
    run_policy,
)
from bench.autoscaling.simulation import TARGET, make_traces

MUSTERS = [name for name in POLICIES if name.startswith("Muster")]


@pytest.mark.parametrize("name", MUSTERS)
def test_noise_at_a_threshold_does_not_make_it_flap(name):
    (trace,) = make_traces(1, scale=0.2, only="threshold")
    outcome = run_policy(trace, name, POLICIES[name]())
    assert outcome.turns <= 1
    assert outcome.most <= 11


@pytest.mark.parametrize("name", MUSTERS)
def test_a_step_is_followed_within_limits_without_flapping(name):
    (trace,) = make_traces(1, scale=0.15, only="step")
    outcome = run_policy(trace, name, POLICIES[name]())
    assert MIN_REPLICAS <= outcome.most <= MAX_REPLICAS
    assert outcome.most >= 14
    assert outcome.turns <= 1
    assert outcome.late_share < 0.1
    # What callers need is their work divided by the target; more than thrice that would be waste.
    assert outcome.replica_seconds < 3 * trace.services.sum() / TARGET
