"""Means from scraped counters, for any load, any times of scrapes and any restarts in between."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_common.config.autoscaling import AggregationFunction, AutoscalingConfig
from serve_common.names import BackendTag, HostId
from serve_controller.adapters.load_windows import LoadWindows, Sample
from serve_controller.core.autoscaling.values import LoadRequest

TAG = BackendTag("a/b")
WINDOW_S = 600.0

steps = st.lists(
    st.tuples(
        st.floats(0.6, 20),  # seconds until the next scrape
        st.floats(0, 50),  # requests, on average, until then
        st.booleans(),  # whether the process began anew at its end
    ),
    min_size=1,
    max_size=60,
)


def page(counter: float) -> list[Sample]:
    name = "serve_replica_ongoing_seconds_total"
    return [
        Sample("h", "serve_host_info", {"host_id": "h1"}, 1.0),
        Sample("s", name, {"backend_tag": TAG}, counter),
    ]


def ask(aggregation: AggregationFunction) -> LoadRequest:
    config = AutoscalingConfig(
        max_replicas=9, look_back_period_s=WINDOW_S, aggregation_function=aggregation, panic_window_s=5
    )
    return LoadRequest(backend_tag=TAG, config=config, proxies=frozenset(), hosts=frozenset({HostId("h1")}))


@given(began_with=st.floats(0, 1e6), steps=steps)
def test_no_load_is_lost_or_invented(began_with: float, steps: list[tuple[float, float, bool]]) -> None:
    windows = LoadWindows()
    at, counter, total = 0.0, began_with, 0.0
    windows.add("url", at, page(counter), WINDOW_S)
    for seconds, load, begins_anew in steps:
        at += seconds
        total += load * seconds
        counter += load * seconds
        windows.add("url", at, page(counter), WINDOW_S)
        if begins_anew:
            at += 0.6
            counter = 0.0
            windows.add("url", at, page(counter), WINDOW_S)
    look = windows.at(at)
    mean = look.sample(ask(AggregationFunction.MEAN), 0.0)
    highest = look.sample(ask(AggregationFunction.MAX), 0.0)
    lowest = look.sample(ask(AggregationFunction.MIN), 0.0)
    assert mean.seen is not None
    assert highest.seen is not None
    assert lowest.seen is not None
    assert mean.over_s is not None
    slack = 1e-6 * max(began_with, 1.0) + 1e-6
    if at <= WINDOW_S:
        assert mean.over_s == pytest.approx(at)
        assert mean.seen * at == pytest.approx(total, abs=slack * at)
    largest = max(load for _, load, _ in steps)
    assert 0 <= lowest.seen <= mean.seen + slack
    assert mean.seen <= highest.seen + slack
    assert highest.seen <= largest + slack
    assert mean.burst is not None
    assert mean.burst <= largest + slack
