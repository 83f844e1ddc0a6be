"""Reads loads from Prometheus: a handful of queries for all backends together.

The queries of most backends differ only in their tag, so one query by ``backend_tag`` serves all backends with the same
window. Only users' own queries are sent one by one.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Final, TypeVar, final

import structlog

from serve_common.config.autoscaling import AggregationFunction
from serve_common.names import BackendTag
from serve_controller.adapters.prometheus_api import (
    CONNECTED,
    HOST,
    ONGOING,
    PROXY,
    QUEUED,
    Element,
    PrometheusApi,
    PrometheusUnavailable,
    QueryRefused,
    get_count,
    get_extreme,
    get_mean,
    get_samples,
    get_sum,
    with_placeholders,
)
from serve_controller.adapters.prometheus_coverage import (
    WINDOW_INTERVALS,
    Coverage,
    CoveredQuery,
    Group,
    Process,
    Scraped,
    WindowChooser,
)
from serve_controller.core.autoscaling.values import LoadRequest, LoadSample, Targets, unmeasured

SOURCE: Final = "prometheus"

_Loads = dict[BackendTag, float]


@final
class Found:
    """The loads of all backends over the windows of one group."""

    def __init__(self, seen: _Loads, queued: _Loads, burst: _Loads | None) -> None:
        self._seen = seen
        self._queued = queued
        self._burst = burst

    def sample(self, placed: CoveredQuery, at: float) -> LoadSample:
        """The load of a backend. One without a series never had a request: all relevant processes were scraped."""
        tag = placed.request.backend_tag
        seen = self._seen.get(tag, 0.0)
        burst = None if self._burst is None else self._burst.get(tag, 0.0)
        if not math.isfinite(seen) or (burst is not None and not math.isfinite(burst)):
            return missing(at, f"Prometheus: the rate of its requests is {seen}")
        return LoadSample(
            at=at,
            seen=seen,
            burst=burst,
            queued=min(self._queued.get(tag, 0.0), seen),
            source=SOURCE,
            over_s=placed.group.window_s,
        )


@final
class Rates:
    """Queries rates, each only once per evaluation."""

    def __init__(self, api: PrometheusApi, selector: str, coverage: Coverage) -> None:
        self._api = api
        self._selector = selector
        self._coverage = coverage
        self._known: dict[str, _Loads] = {}

    async def of(self, group: Group) -> Found:
        """Query the loads over the windows of a group. Raises `PrometheusUnavailable` or `QueryRefused`."""
        ongoing = await self._loads(get_mean(ONGOING, self._selector, group.window_s))
        queued = await self._loads(get_mean(QUEUED, self._selector, group.window_s))
        seen = _sum(ongoing, queued)
        if group.aggregation is not AggregationFunction.MEAN:
            seen = await self._loads(self._extreme(group))
        burst = None
        if group.burst_s is not None:
            burst = _sum(
                await self._loads(get_mean(ONGOING, self._selector, group.burst_s)),
                await self._loads(get_mean(QUEUED, self._selector, group.burst_s)),
            )
        return Found(seen, queued, burst)

    def _extreme(self, group: Group) -> str:
        interval_s = self._coverage.interval_s or 1.0
        inner_s = WINDOW_INTERVALS * interval_s
        return get_extreme(
            group.aggregation,
            self._selector,
            # The first of the inner windows begins where the whole window does.
            window_s=max(group.window_s - inner_s, interval_s),
            inner_s=inner_s,
            step_s=max(interval_s, group.window_s / 200),
        )

    async def _loads(self, query: str) -> _Loads:
        found = self._known.get(query)
        if found is None:
            elements = await self._api.elements(query, self._coverage.reference_at)
            found = self._known[query] = {
                BackendTag(element.metric.get("backend_tag", "")): value
                for element in elements
                if (value := element.number) is not None
            }
        return found


def _sum(first: _Loads, second: _Loads) -> _Loads:
    return {tag: first.get(tag, 0.0) + second.get(tag, 0.0) for tag in first.keys() | second.keys()}


def missing(at: float, why: str) -> LoadSample:
    """A sample without a value, with the reason."""
    return LoadSample(at=at, seen=None, source=SOURCE, missing=why)


_log = structlog.get_logger(__name__)

_HORIZON_MIN_S: Final = 60.0
_HORIZON_MAX_S: Final = 300.0
"""Longest horizon in which every single scrape is read, seconds; in longer windows scrapes are counted."""
_LONG_WINDOWS_MAX: Final = 16
_UNKNOWN_INTERVAL_HORIZON_S: Final = 300.0
_LOADS_DEADLINE_S: Final = 6.0
"""Timeout of the queries for all backends together, seconds."""
_QUERIES_DEADLINE_S: Final = 6.0
"""Timeout of all users' queries of one evaluation together, seconds."""
_SLOW_S: Final = 1.0
_BACKOFF_S: Final = 5.0
"""Seconds without queries after a server failed slowly (`_SLOW_S`), because evaluations wait for one another."""
_BATCH: Final = 500
"""Backends between two turns of the event loop."""
_GROUPS_MAX: Final = 64
"""Most different windows in one evaluation; further backends get a sample without a value."""

_T = TypeVar("_T")


@final
class PrometheusSource:
    """A `LoadSource` that queries Prometheus."""

    def __init__(self, api: PrometheusApi, selector: str = "") -> None:
        """``selector``: label matchers, without braces, that select the series of this instance."""
        self._api = api
        self._selector = selector
        self._interval_s: float | None = None
        """Scrape interval learned by the latest evaluation."""
        self._logged_interval_s: float | None = None
        self._backoff_until = 0.0
        self._backoff_reason = ""

    async def read(
        self,
        requests: Sequence[LoadRequest],
        targets: Targets,  # noqa: ARG002 - of the port
        now: float,
    ) -> Mapping[BackendTag, LoadSample]:
        """Read the loads. ``targets`` are ignored: Prometheus finds them by itself."""
        if not requests:
            return {}
        samples: dict[BackendTag, LoadSample] = {}
        coverage: Coverage | None = None
        why = f"Prometheus: nothing but slow answers for {_LOADS_DEADLINE_S:g} s"
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        if started_at < self._backoff_until:
            return {request.backend_tag: missing(now, self._backoff_reason) for request in requests}
        try:
            async with asyncio.timeout(_LOADS_DEADLINE_S):
                coverage = await self._read_coverage(requests, await self._api.time())
                await self._read_loads(
                    [request for request in requests if request.config.query is None], coverage, now, samples
                )
        except TimeoutError:
            pass  # the missing samples get a reason below
        except (PrometheusUnavailable, QueryRefused) as error:
            why = f"Prometheus: {error}"
        if coverage is None and loop.time() - started_at >= _SLOW_S:
            self._backoff_until, self._backoff_reason = loop.time() + _BACKOFF_S, why
        if coverage is not None:
            queries = [request for request in requests if request.config.query is not None]
            samples |= await self._read_queries(queries, coverage, now)
        return {
            request.backend_tag: samples.get(request.backend_tag) or missing(now, why) for request in requests
        }

    async def close(self) -> None:
        """Close the connections to the server."""
        await self._api.close()

    # -- scraped processes ----------------------------------------------------------------------------------------

    async def _read_coverage(self, requests: Sequence[LoadRequest], at: float) -> Coverage:
        windows = {request.config.look_back_period_s for request in requests}
        known_s = self._interval_s
        horizon_s = max(min(max(windows) + 3 * (known_s or 0.0), _HORIZON_MAX_S), _HORIZON_MIN_S)
        horizon_s = max(horizon_s, _UNKNOWN_INTERVAL_HORIZON_S if known_s is None else 5 * known_s)
        infos = (("proxy", PROXY), ("host", HOST))
        samples = await _gather(
            self._api.elements(get_samples(info, self._selector, horizon_s), at) for _, info in infos
        )
        processes: defaultdict[Process, list[Scraped]] = defaultdict(list)
        for (kind, _), elements in zip(infos, samples, strict=True):
            for element in elements:
                process, target = _get_process(kind, element)
                processes[process].append(Scraped([time for time, _ in element.values], target))
        long_windows = sorted(window_s for window_s in windows if window_s > horizon_s)[:_LONG_WINDOWS_MAX]
        counts = {window_s: await self._count(infos, window_s, at) for window_s in long_windows}
        coverage = Coverage(at, horizon_s, processes, counts)
        self._set_interval(coverage.interval_s)
        return coverage

    async def _count(
        self, infos: Sequence[tuple[str, str]], window_s: float, at: float
    ) -> dict[Process, int]:
        found: defaultdict[Process, int] = defaultdict(int)
        for kind, info in infos:
            for element in await self._api.elements(get_count(info, self._selector, window_s), at):
                process, _ = _get_process(kind, element)
                found[process] += int(element.number or 0)
        return dict(found)

    def _set_interval(self, interval_s: float | None) -> None:
        if interval_s is None:
            return
        self._interval_s = interval_s
        logged_s = self._logged_interval_s
        if logged_s is None or not logged_s / 1.5 < interval_s < logged_s * 1.5:
            self._logged_interval_s = interval_s
            _log.info(
                "prometheus_scrape_interval",
                interval_s=round(interval_s, 3),
                shortest_window_s=round(WINDOW_INTERVALS * interval_s, 3),
            )

    # -- ongoing and waiting requests -----------------------------------------------------------------------------

    async def _read_loads(
        self,
        requests: Sequence[LoadRequest],
        coverage: Coverage,
        now: float,
        samples: dict[BackendTag, LoadSample],
    ) -> None:
        """Fill in ``samples``; samples read before it raises `PrometheusUnavailable` stay."""
        measured = await self._measured(requests, coverage)
        groups: defaultdict[Group, list[CoveredQuery]] = defaultdict(list)
        placer = WindowChooser(coverage, now)
        for number, request in enumerate(requests):
            if number % _BATCH == _BATCH - 1:
                await asyncio.sleep(0)
            placed = unmeasured(request, measured.get(request.backend_tag, 0)) or placer.place(request)
            if isinstance(placed, str):
                samples[request.backend_tag] = missing(now, placed)
            elif placed.group in groups or len(groups) < _GROUPS_MAX:
                groups[placed.group].append(placed)
            else:
                why = f"more than {_GROUPS_MAX} different look-back periods are in use"
                samples[request.backend_tag] = missing(now, why)
        rates = Rates(self._api, self._selector, coverage)
        for group, members in groups.items():
            try:
                found = await rates.of(group)
            except QueryRefused as error:
                why = f"Prometheus: {error}"
                samples |= {placed.request.backend_tag: missing(now, why) for placed in members}
                continue
            for placed in members:
                samples[placed.request.backend_tag] = found.sample(
                    placed, now - (coverage.at - placed.newest_at)
                )

    async def _measured(self, requests: Sequence[LoadRequest], coverage: Coverage) -> dict[str, int]:
        """Number of replicas of each backend on the hosts' metrics pages."""
        if not any(request.num_replicas for request in requests):
            return {}
        query = get_sum(CONNECTED, self._selector)
        elements = await self._api.elements(query, coverage.reference_at)
        return {element.metric.get("backend_tag", ""): int(element.number or 0) for element in elements}

    # -- users' queries -------------------------------------------------------------------------------------------

    async def _read_queries(
        self, requests: Sequence[LoadRequest], coverage: Coverage, now: float
    ) -> dict[BackendTag, LoadSample]:
        expressions: dict[BackendTag, str] = {}
        samples: dict[BackendTag, LoadSample] = {}
        last_break = coverage.last_break()
        for request in requests:
            look_back_s = request.config.look_back_period_s
            if last_break is not None and last_break[1] > coverage.at - look_back_s:
                samples[request.backend_tag] = missing(now, _break_text(last_break, coverage.at))
            elif request.config.query is not None:
                expressions[request.backend_tag] = with_placeholders(
                    request.config.query.promql, request.backend_tag, look_back_s
                )
        replies = await self._query_all(set(expressions.values()), coverage.reference_at)
        for tag, expression in expressions.items():
            reply = replies[expression]
            samples[tag] = (
                missing(now, reply)
                if isinstance(reply, str)
                else LoadSample(at=now, seen=reply, source=SOURCE)
            )
        return samples

    async def _query_all(self, expressions: Iterable[str], at: float) -> dict[str, float | str]:
        """The result of each expression, or why there is none."""
        replies: dict[str, float | str] = dict.fromkeys(
            expressions,
            f"Prometheus: not asked within {_QUERIES_DEADLINE_S:g} s, there are too many slow queries",
        )

        async def request(expression: str) -> None:
            try:
                replies[expression] = await self._api.number(expression, at)
            except (PrometheusUnavailable, QueryRefused) as error:
                replies[expression] = f"Prometheus: {error}"

        try:
            async with asyncio.timeout(_QUERIES_DEADLINE_S):
                await _gather(request(expression) for expression in list(replies))
        except TimeoutError:
            _log.warning("prometheus_queries_too_slow", queries=len(replies), deadline_s=_QUERIES_DEADLINE_S)
        return replies


def _get_process(kind: str, element: Element) -> tuple[Process, str]:
    labels = element.metric
    target = f"{labels.get('job', '')} {labels.get('instance', '')}".strip()
    return Process(kind, labels.get(f"{kind}_id", "")), target


def _break_text(last_break: tuple[float, float], at: float) -> str:
    started_at, ended = last_break
    if ended >= at:
        return f"Prometheus has scraped nothing for {at - started_at:.0f} s"
    return f"Prometheus scraped nothing for {ended - started_at:.0f} s until {at - ended:.0f} s ago"


async def _gather(calls: Iterable[Coroutine[None, None, _T]]) -> list[_T]:
    """Run all calls concurrently; the first error cancels the others."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(call) for call in calls]
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return [task.result() for task in running]
