"""What holds for every load, however configured."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from serve_common.config.autoscaling import (
    AutoscalingConfig,
    AutoscalingQuery,
    QueryMeaning,
    check_autoscaling_config,
)
from serve_controller.core.autoscaling.demand import (
    FEWER_MAX,
    largest_wanted,
    record_wanted,
    since_fewer_than,
    with_spare,
)
from serve_controller.core.autoscaling.policy import decide_scaling, wake
from serve_controller.core.autoscaling.values import (
    LoadSample,
    ScalingDecisionKind,
    ScalingInput,
    ScalingState,
)

BEGIN = 1_700_000_000.0

delays = st.sampled_from([0.0, 1.0, 20.0, 30.0, 100.0, 600.0]) | st.floats(0, 86_400)
factors = st.none() | st.sampled_from([0.1, 0.5, 2.0]) | st.floats(0.001, 1000)
queries = st.none() | st.builds(
    AutoscalingQuery,
    promql=st.just("x"),
    target=st.floats(1e-9, 1e12),
    meaning=st.sampled_from(QueryMeaning),
)


@st.composite
def configs(draw, queries=queries):
    low = draw(st.integers(0, 30))
    config = AutoscalingConfig(
        min_replicas=low,
        max_replicas=max(low + draw(st.integers(0, 100)), 1),
        target_ongoing_requests=draw(st.sampled_from([0.001, 1.0, 2.0, 5.0]) | st.floats(0.001, 1e6)),
        metrics_interval_s=draw(st.sampled_from([1.0, 10.0, 60.0])),
        look_back_period_s=draw(st.sampled_from([1.0, 30.0, 300.0])),
        upscaling_factor=draw(factors),
        downscaling_factor=draw(factors),
        upscale_delay_s=draw(delays),
        downscale_delay_s=draw(delays),
        downscale_to_zero_delay_s=draw(st.none() | delays),
        query=draw(queries),
        panic_threshold=draw(st.sampled_from([0.0, 1.1, 2.0, 100.0])),
        panic_window_s=draw(st.floats(1, 600)),
        panic_hold_s=draw(delays),
    )
    return check_autoscaling_config(config, "autoscaling_config")


loads = st.sampled_from([0.0, 0.001, 1.0, 4.0, 40.0, 400.0]) | st.floats(0, 1e4)
anything = st.floats() | loads
looks = st.lists(
    st.tuples(
        st.none() | anything,  # seen
        st.none() | anything,  # burst
        anything,  # queued
        st.integers(0, 40),  # running
        st.none() | st.none() | st.none() | st.integers(-(10**12), 10**12),  # asked
        st.sampled_from([0.0, 1.0, 10.0, 10.0, 10.0, 300.0, 1e6, -50.0]),  # until the next look
        st.sampled_from([0.0, 2.0, 2.0, 100.0, -100.0, math.nan]),  # age
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=80, deadline=None)
@given(configs(), st.integers(0, 200), looks)
def test_whatever_is_read_the_target_is_within_limits_and_missing_data_or_requests_never_lead_to_zero(
    config, num_replicas, story
):
    state, now = ScalingState(), BEGIN
    for seen, burst, queued, running, asked, pause, age in story:
        reading = LoadSample(at=now - age, seen=seen, burst=burst, queued=queued)
        inputs = ScalingInput(
            config=config, num_replicas=num_replicas, num_running=running, policy_target=asked
        )
        decision = decide_scaling(inputs, [reading], state, now)
        assert config.min_replicas <= decision.target <= config.max_replicas
        assert len(decision.state.fewer) <= FEWER_MAX
        assert len(decision.why.splitlines()) == 1
        if num_replicas and not decision.target:
            assert decision.seen == seen
            assert max(seen, queued) <= 1e-9
        if decision.seen is None and config.min_replicas <= num_replicas <= config.max_replicas:
            assert decision.target == num_replicas
            assert decision.verdict is ScalingDecisionKind.HELD or not num_replicas
        state, num_replicas, now = decision.state, decision.target, now + pause


@given(configs(), st.integers(0, 200), st.integers(0, 10), st.integers(-5, 10**9))
def test_waking_keeps_to_the_limits_and_never_takes_any(config, num_replicas, running, waiting):
    assume(num_replicas <= config.max_replicas)
    inputs = ScalingInput(config=config, num_replicas=num_replicas, num_running=running)
    decision = wake(inputs, waiting, BEGIN, ScalingState())
    assert max(num_replicas, 1) <= decision.target <= config.max_replicas


@settings(max_examples=60, deadline=None)
@given(
    configs(queries=st.none()),
    st.integers(0, 60),
    st.lists(st.tuples(loads, st.floats(0, 2), st.floats(0, 1)), min_size=1, max_size=12),
    st.floats(0, 1000),
    st.floats(0, 1000),
)
def test_more_load_never_gives_fewer(config, num_replicas, past, more_seen, more_burst):
    state, now = ScalingState(), BEGIN
    decisions = []
    for index, (seen, burst, queued) in enumerate(past):
        is_last = index == len(past) - 1
        for extra_seen, extra_burst in ((0, 0), (more_seen, 0), (0, more_burst)) if is_last else ((0, 0),):
            reading = LoadSample(
                at=now, seen=seen + extra_seen, burst=seen * burst + extra_burst, queued=seen * queued
            )
            inputs = ScalingInput(config=config, num_replicas=num_replicas, num_running=num_replicas)
            decisions.append(decide_scaling(inputs, [reading], state, now))
        if not is_last:
            state, num_replicas, now = (
                decisions[-1].state,
                decisions[-1].target,
                now + config.metrics_interval_s,
            )
    base, with_seen, with_burst = decisions[-3:]
    assert with_seen.target >= base.target
    assert with_burst.target >= base.target


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 50), st.integers(1, 100), st.floats(0, 900), st.floats(0, 900))
def test_a_constant_load_comes_to_what_is_wanted_within_the_delay(wanted, begin, up_s, down_s):
    assume(wanted <= 10 * begin)  # one step up
    config = AutoscalingConfig(
        min_replicas=0,
        max_replicas=100,
        upscale_delay_s=up_s,
        downscale_delay_s=down_s,
        metrics_interval_s=10,
    )
    state, num_replicas, now = ScalingState(), begin, BEGIN
    while now <= BEGIN + max(up_s, down_s) + 10:
        reading = LoadSample(at=now, seen=2 * wanted, queued=0)
        inputs = ScalingInput(config=config, num_replicas=num_replicas, num_running=num_replicas)
        decision = decide_scaling(inputs, [reading], state, now)
        state, num_replicas, now = decision.state, decision.target, now + 10
    needed = math.ceil(wanted - 1e-6) if 2 * wanted > 1e-9 else 0
    needed = max(needed, 1) if 2 * wanted > 1e-9 else 0
    if begin < needed:
        assert num_replicas == needed
    else:
        assert needed <= num_replicas <= max(with_spare(wanted), needed)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(1, 60),
    st.lists(st.floats(-0.04, 0.04), min_size=10, max_size=200),
    st.sampled_from([0.0, 10.0, 30.0]),
    st.sampled_from([0.0, 10.0, 60.0]),
)
def test_noise_around_a_threshold_never_turns_it_more_than_once(threshold, begin, noise, up_s, down_s):
    assume(threshold <= 10 * begin)
    config = AutoscalingConfig(
        min_replicas=1, max_replicas=100, upscale_delay_s=up_s, downscale_delay_s=down_s, panic_threshold=0
    )
    state, num_replicas, now, moves = ScalingState(), begin, BEGIN, []
    for part in noise:
        # Peak to peak less than what is to spare, SPARE * sqrt(n).
        reading = LoadSample(at=now, seen=2 * (threshold + part * math.sqrt(threshold)))
        inputs = ScalingInput(config=config, num_replicas=num_replicas, num_running=num_replicas)
        decision = decide_scaling(inputs, [reading], state, now)
        if decision.target != num_replicas:
            moves.append(decision.target > num_replicas)
        state, num_replicas, now = decision.state, decision.target, now + 10
    assert sum(before != after for before, after in pairwise(moves)) <= 1


@given(
    st.lists(st.tuples(st.integers(0, 12), st.sampled_from([1.0, 10.0, 25.0])), min_size=1, max_size=40),
    st.sampled_from([0.0, 10.0, 30.0, 100.0]),
)
def test_the_memory_of_what_was_wanted_comes_to_the_same_as_keeping_all_of_it(wants, delay_s):
    fewer, now, all_of_it = (), BEGIN, []
    for wanted, pause in wants:
        fewer = record_wanted(fewer, wanted, now)
        all_of_it.append((now, wanted))
        # A number may go once fewer were wanted at every look of the delay, the one that began it included.
        allowed = None
        for number in range(14, 0, -1):
            first_fewer = None
            for at, then in all_of_it:
                first_fewer = None if then >= number else (at if first_fewer is None else first_fewer)
            assert since_fewer_than(fewer, number) == first_fewer
            if first_fewer is not None and now - first_fewer >= delay_s:
                allowed = number - 1
        found = largest_wanted(fewer, now, delay_s)
        assert (found if found is None else min(found, 13)) == allowed
        now += pause


@given(configs(), st.integers(0, 100), loads)
def test_a_decision_travels_as_json(config, num_replicas, seen):
    inputs = ScalingInput(config=config, num_replicas=num_replicas, num_running=num_replicas)
    decision = decide_scaling(inputs, [LoadSample(at=BEGIN, seen=seen)], ScalingState(), BEGIN)
    assert msgspec.json.decode(msgspec.json.encode(decision), type=type(decision)) == decision
