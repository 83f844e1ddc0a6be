"""Token buckets and backoffs, at times that the test chooses."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_common.clock import TokenBucket, backoff_s


def test_a_bucket_allows_a_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(10, 20)
    assert [sum(bucket.take(at) for _ in range(100)) for at in (5.0, 5.0, 6.0, 1000.0)] == [20, 0, 10, 20]


@settings(max_examples=150, deadline=None)
@given(
    rate_per_s=st.floats(0.1, 100),
    burst=st.integers(1, 20),
    gaps_s=st.lists(st.sampled_from([0.0, 0.001, 0.05, 0.5, 5.0]), min_size=1, max_size=80),
)
def test_no_caller_gets_more_than_the_burst_and_the_rate_in_any_time(rate_per_s, burst, gaps_s) -> None:
    bucket = TokenBucket(rate_per_s, burst)
    now, taken = 0.0, []
    for gap_s in gaps_s:
        now += gap_s
        if bucket.take(now):
            taken.append(now)
        else:
            wait_s = bucket.wait_s(now)
            assert not copy.copy(bucket).take(now + wait_s * 0.9)
            assert copy.copy(bucket).take(now + wait_s * 1.001 + 1e-9)
    for i, start in enumerate(taken):
        for j in range(i, len(taken)):
            assert j - i + 1 <= burst + rate_per_s * (taken[j] - start) + 1e-6


def test_a_bucket_that_has_a_token_needs_no_wait() -> None:
    bucket = TokenBucket(2, 1)
    assert bucket.wait_s(7.0) == 0
    assert bucket.take(7.0)
    assert bucket.wait_s(7.0) == 0.5


def test_a_clock_that_goes_back_fills_nothing() -> None:
    bucket = TokenBucket(1, 1)
    assert [bucket.take(at) for at in (5.0, 3.0, 3.5, 4.1)] == [True, False, False, True]


@pytest.mark.parametrize(
    ("failures", "expected"), [(-1, 0.0), (0, 0.0), (1, 0.2), (2, 0.4), (3, 0.8), (9, 5.0), (10_000, 5.0)]
)
def test_waits_double_up_to_their_limit(failures: int, expected: float) -> None:
    assert backoff_s(failures, 0.2, 5.0) == pytest.approx(expected)
