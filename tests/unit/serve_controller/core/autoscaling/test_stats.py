"""Series of what replicas record for policies: what is in them, and what bounds them."""

from __future__ import annotations

import msgspec
import pytest

from serve_common.config.autoscaling import AggregationFunction, AutoscalingConfig, TimeStampedValue
from serve_controller.core.autoscaling import stats
from serve_controller.core.autoscaling.stats import StatsSeries, aggregate_stats, record_stats

CONFIG = AutoscalingConfig(max_replicas=4, look_back_period_s=30.0)


def test_a_series_has_the_values_of_the_look_back_period_of_replicas_that_run() -> None:
    series: StatsSeries = {}
    for at, value in ((0.0, 1.0), (10.0, 2.0), (40.0, 6.0)):
        recorded = {"a": {"queue": value}, "b": {"queue": -value, "cache": 0.5}}
        series = record_stats(series, recorded, ["a", "b"], CONFIG, at)
    assert series["queue"]["a"] == (TimeStampedValue(10.0, 2.0), TimeStampedValue(40.0, 6.0))
    assert aggregate_stats(series, AggregationFunction.MEAN)["queue"] == {"a": 4.0, "b": -4.0}
    assert aggregate_stats(series, AggregationFunction.MAX)["queue"] == {"a": 6.0, "b": -2.0}
    assert aggregate_stats(series, AggregationFunction.MIN)["cache"] == {"b": 0.5}
    series = record_stats(series, {}, ["a"], CONFIG, 45.0)
    assert series == {"queue": {"a": (TimeStampedValue(40.0, 6.0),)}}
    assert record_stats(series, {}, ["a"], CONFIG, 80.0) == {}


def test_what_a_policy_gets_is_bounded_however_many_replicas_record_however_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stats, "POINTS_MAX", 40)
    config = msgspec.structs.replace(CONFIG, look_back_period_s=1e6)
    series: StatsSeries = {}
    for at in range(100):
        series = record_stats(series, {"a": {"one": at}}, ["a"], config, float(at))
    assert len(series["one"]["a"]) == 40
    assert series["one"]["a"][-1] == TimeStampedValue(99.0, 99)
    many = {f"r{number}": {"one": 1.0, "two": 2.0} for number in range(10)}
    for at in range(100, 110):
        series = record_stats(series, many, list(many), config, float(at))
    assert sum(len(points) for of_name in series.values() for points in of_name.values()) == 40
