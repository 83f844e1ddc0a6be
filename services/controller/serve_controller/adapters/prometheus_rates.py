"""Asks Prometheus for the mean loads of all backends, and makes readings of them."""

from __future__ import annotations

import math
from typing import Final, final

from serve_common.autoscaling import AggregationFunction
from serve_common.names import BackendTag
from serve_controller.adapters import prometheus_queries as promql
from serve_controller.adapters.prometheus_api import PrometheusApi
from serve_controller.adapters.prometheus_coverage import WINDOW_INTERVALS, Coverage
from serve_controller.adapters.prometheus_groups import Group, Placed
from serve_controller.core.autoscaling.values import Reading

SOURCE: Final = "prometheus"

_Loads = dict[BackendTag, float]


@final
class Found:
    """The loads of all backends over the windows of one group."""

    def __init__(self, seen: _Loads, queued: _Loads, burst: _Loads | None) -> None:
        self._seen = seen
        self._queued = queued
        self._burst = burst

    def reading(self, placed: Placed, at: float) -> Reading:
        """A backend without a series never had a request: everybody who could tell of one was scraped."""
        tag = placed.ask.backend_tag
        seen = self._seen.get(tag, 0.0)
        burst = None if self._burst is None else self._burst.get(tag, 0.0)
        if not math.isfinite(seen) or (burst is not None and not math.isfinite(burst)):
            return missing(at, f"Prometheus: the rate of its requests is {seen}")
        return Reading(
            at=at,
            seen=seen,
            burst=burst,
            queued=min(self._queued.get(tag, 0.0), seen),
            source=SOURCE,
            over_s=placed.group.window_s,
        )


@final
class Rates:
    """Asks for rates, each of them once in a look."""

    def __init__(self, api: PrometheusApi, selector: str, coverage: Coverage) -> None:
        self._api = api
        self._selector = selector
        self._coverage = coverage
        self._known: dict[str, _Loads] = {}

    async def of(self, group: Group) -> Found:
        """Raises `PrometheusAway` or `QueryRefused`."""
        ongoing = await self._loads(promql.mean_of(promql.ONGOING, self._selector, group.window_s))
        queued = await self._loads(promql.mean_of(promql.QUEUED, self._selector, group.window_s))
        seen = _sum(ongoing, queued)
        if group.aggregation is not AggregationFunction.MEAN:
            seen = await self._loads(self._extreme(group))
        burst = None
        if group.burst_s is not None:
            burst = _sum(
                await self._loads(promql.mean_of(promql.ONGOING, self._selector, group.burst_s)),
                await self._loads(promql.mean_of(promql.QUEUED, self._selector, group.burst_s)),
            )
        return Found(seen, queued, burst)

    def _extreme(self, group: Group) -> str:
        interval_s = self._coverage.interval_s or 1.0
        inner_s = WINDOW_INTERVALS * interval_s
        return promql.extreme_of(
            group.aggregation,
            self._selector,
            # The first of the short windows begins where the long one does.
            window_s=max(group.window_s - inner_s, interval_s),
            inner_s=inner_s,
            step_s=max(interval_s, group.window_s / 200),
        )

    async def _loads(self, query: str) -> _Loads:
        found = self._known.get(query)
        if found is None:
            elements = await self._api.elements(query, self._coverage.asked_at)
            found = self._known[query] = {
                BackendTag(element.metric.get("backend_tag", "")): value
                for element in elements
                if (value := element.number) is not None
            }
        return found


def _sum(first: _Loads, second: _Loads) -> _Loads:
    return {tag: first.get(tag, 0.0) + second.get(tag, 0.0) for tag in first.keys() | second.keys()}


def missing(at: float, why: str) -> Reading:
    """A reading that says why there is none."""
    return Reading(at=at, seen=None, source=SOURCE, missing=why)
