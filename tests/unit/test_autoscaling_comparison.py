"""The simulation that policies are compared in: that it is right, and what must hold in it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bench.autoscaling.backend import ONGOING_MAX, START_S, Backend
from tests.bench.autoscaling.comparison import (
    MAX_REPLICAS,
    MIN_REPLICAS,
    POLICIES,
    compare,
    count_turns,
    run_policy,
)
from tests.bench.autoscaling.traces import TARGET, Trace, make_traces

MUSTERS = [name for name in POLICIES if name.startswith("Muster")]


def trace_of(arrivals, service_s, length_s=60.0):
    services = np.full(len(arrivals), service_s)
    return Trace(
        name="",
        about="",
        length_s=length_s,
        num_replicas=1,
        arrivals=np.array(arrivals, float),
        services=services,
    )


def test_requests_beyond_what_replicas_take_wait_in_their_order():
    backend = Backend(trace_of([0.0] * 7 + [0.5], 1.0), 1)
    backend.advance(0.75)
    counters = backend.counters()
    assert (counters.ongoing, counters.queued) == (ONGOING_MAX, 3)
    assert counters.ongoing_s == pytest.approx(5 * 0.75)
    assert counters.queued_s == pytest.approx(2 * 0.75 + 0.25)
    backend.advance(10)
    assert backend.waits == pytest.approx([0] * 5 + [1, 1, 0.5])
    assert backend.counters().ongoing_s == pytest.approx(8)
    assert backend.counters().queued_s == pytest.approx(2.5)


def test_new_replicas_take_requests_after_their_start_and_cost_from_the_decision_on():
    backend = Backend(trace_of([0.0] * 10, 100.0), 1)
    backend.advance(1)
    backend.scale(2)
    backend.advance(10)
    assert backend.waits == pytest.approx([0] * 5 + [1 + START_S] * 5)
    assert backend.replica_seconds == pytest.approx(1 + 2 * 9)


def test_a_replica_that_leaves_finishes_what_it_has_and_takes_nothing_more():
    backend = Backend(trace_of([0.0] * 10 + [1.0], 2.0), 2)
    backend.advance(0.5)
    backend.scale(1)
    backend.advance(10)
    assert backend.waits == pytest.approx([0] * 10 + [1.0])
    assert backend.counters().ongoing_s == pytest.approx(22)


def test_turns_are_changes_of_direction():
    assert count_turns([1, 2, -1, -1, 3]) == 2
    assert count_turns([]) == 0


def test_the_same_seed_gives_the_same_table():
    assert compare(make_traces(3, scale=0.02)) == compare(make_traces(3, scale=0.02))


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
