"""Metrics of users' own code, with the names and arguments of Ray Serve's: `Counter`, `Gauge`, `Histogram`.

`definitions` says which names and tags may be, `kinds` is what users import. What they count becomes visible on the
page of the replica's host; outside of replicas it is counted in memory and nobody reads it.
"""

from __future__ import annotations

from muster.metrics.definitions import METRICS_MAX, MetricRefused
from muster.metrics.kinds import Counter, Gauge, Histogram

__all__ = ["METRICS_MAX", "Counter", "Gauge", "Histogram", "MetricRefused"]
