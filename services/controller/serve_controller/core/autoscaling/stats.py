"""What replicas return from ``record_autoscaling_stats``: series by name and replica, bounded, and their aggregates.

Names and shapes are those of Ray Serve 2.60 (``autoscaling_state._get_raw_custom_metrics``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Final

from serve_common.config.autoscaling import AggregationFunction, AutoscalingConfig, TimeStampedValue

POINTS_MAX: Final = 10_000
"""Most values of one backend that a policy gets, which bounds the message to the replica that evaluates it."""
SERIES_POINTS_MAX: Final = 60
"""Most values of one series."""

StatsSeries = Mapping[str, Mapping[str, tuple[TimeStampedValue, ...]]]
"""By name and replica tag, the oldest value first."""


def record_stats(
    series: StatsSeries,
    stats: Mapping[str, Mapping[str, float]],
    running: Collection[str],
    config: AutoscalingConfig,
    now: float,
) -> dict[str, dict[str, tuple[TimeStampedValue, ...]]]:
    """``series`` with the values that replicas returned at ``now``, by replica tag and name.

    Values older than `look_back_period_s`, and those of replicas that no longer run, are left out.
    """
    names = sorted({*series, *(name for values in stats.values() for name in values)})
    recorded: dict[str, dict[str, tuple[TimeStampedValue, ...]]] = {}
    for name in names:
        former = series.get(name, {})
        of_name: dict[str, tuple[TimeStampedValue, ...]] = {}
        for replica in running:
            points = former.get(replica, ())
            value = stats.get(replica, {}).get(name)
            if value is not None:
                points = (*points, TimeStampedValue(now, value))
            recent = tuple(p for p in points if now - p.timestamp <= config.look_back_period_s)
            if recent:
                of_name[replica] = recent[-SERIES_POINTS_MAX:]
        if of_name:
            recorded[name] = of_name
    count = sum(map(len, recorded.values()))
    points_max = max(POINTS_MAX // max(count, 1), 1)
    return {
        name: {replica: points[-points_max:] for replica, points in of_name.items()}
        for name, of_name in recorded.items()
    }


def aggregate_stats(series: StatsSeries, function: AggregationFunction) -> dict[str, dict[str, float]]:
    """Each series as one number."""
    return {
        name: {
            replica: _aggregate([p.value for p in points], function) for replica, points in of_name.items()
        }
        for name, of_name in series.items()
    }


def _aggregate(values: list[float], function: AggregationFunction) -> float:
    match function:
        case AggregationFunction.MAX:
            return max(values)
        case AggregationFunction.MIN:
            return min(values)
        case AggregationFunction.MEAN:
            return math.fsum(values) / len(values)
