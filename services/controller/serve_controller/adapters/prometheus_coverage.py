"""Which processes Prometheus scraped without a break, and which backends can be queried together.

`rate()` over a window that Prometheus has only partly seen is too low, and a process that was not scraped is missing
from a sum without any sign. Neither may pass for a small load.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, final

import msgspec

from serve_common.config.autoscaling import AggregationFunction
from serve_controller.core.autoscaling.values import LoadRequest

GAP_INTERVALS: Final = 3.2
"""Scrape intervals between two scrapes beyond which there is a break; fewer mean one or two failed scrapes."""
STALE_INTERVALS: Final = 3.5
STALE_S: Final = 10.0
"""Seconds after its last scrape for which a process is fresh, if longer than `STALE_INTERVALS`."""
EDGE_INTERVALS: Final = 1.1
"""Mean sample intervals over which `rate()` extrapolates to the ends of its window (in its `extrapolatedRate`)."""
_SCRAPED_SHARE: Final = 0.8
"""Share of all scrapes with which a process counts as covered in a window longer than the horizon."""
WINDOW_INTERVALS: Final = 2.5
"""Shortest window in scrape intervals: it contains at least two scrapes."""


class Process(NamedTuple):
    """One process that loads are read from."""

    kind: str
    """``proxy`` or ``host``."""
    name: str
    """Its id."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class Scraped(msgspec.Struct, frozen=True):
    """The scrapes of one process as one of Prometheus' targets."""

    times: Sequence[float]
    """Times of the scrapes by the server's clock, rising; never empty."""
    target: str = ""
    """Job and instance, for people."""


class Window(msgspec.Struct, frozen=True):
    """A window over which some processes can be queried together."""

    length_s: float
    newest_at: float
    """The oldest among the processes' latest scrapes."""


class _Range(msgspec.Struct, frozen=True):
    """Since when a process has been scraped without a break."""

    missing: str
    """Why it is not covered; empty if it is."""
    since: float = math.inf
    newest_at: float | None = None


@final
class Coverage:
    """All scrapes of all processes over the last minutes, as of one evaluation."""

    def __init__(
        self,
        at: float,
        horizon_s: float,
        processes: Mapping[Process, Sequence[Scraped]],
        counts: Mapping[float, Mapping[Process, int]] | None = None,
    ) -> None:
        """``at`` is the server's current time; scrapes before ``at - horizon_s`` are not included.

        ``counts`` has the number of scrapes of each process in windows that are longer than the horizon.
        """
        self.at = at
        self._horizon_s = horizon_s
        self._processes = processes
        self._counts = counts or {}
        self._interval_s = infer_interval(
            scraped.times for series in processes.values() for scraped in series
        )
        self._ranges: dict[Process, _Range] = {}
        self._reference_at: float | None = None

    @property
    def interval_s(self) -> float | None:
        """The scrape interval; None if nothing was scraped twice."""
        return self._interval_s

    @property
    def reference_at(self) -> float:
        """Evaluation time of queries: at most one interval after the oldest of the latest scrapes.

        This is the current time unless a scrape is pending or failed: then rates would be too low, for they are
        extrapolated over little more than an interval.
        """
        if self._reference_at is None:
            newest = [
                found.newest_at for process in self.fresh() if (found := self._range(process)).newest_at
            ]
            self._reference_at = min([self.at, *(time + (self._interval_s or 0.0) for time in newest)])
        return self._reference_at

    def fresh(self) -> list[Process]:
        """All processes that are currently scraped."""
        return [process for process in self._processes if not self._range(process).missing]

    def last_break(self) -> tuple[float, float] | None:
        """Start and end of the latest break in which nothing at all was scraped; None for none."""
        interval_s = self._interval_s
        if interval_s is None:
            return None
        times = sorted(
            time for series in self._processes.values() for scraped in series for time in scraped.times
        )
        found: tuple[float, float] | None = None
        for before, after in zip(times, [*times[1:], self.at], strict=True):
            if after - before > GAP_INTERVALS * interval_s:
                found = (before, after)
        return found

    def window(
        self, wanted_s: float, expected: Iterable[Process], started_at: Mapping[str, float]
    ) -> Window | str:
        """The longest window up to ``wanted_s`` in which all of ``expected`` are covered; or why there is none.

        It is longer if two scrapes would not fit. ``started_at`` has the start times by name, by the server's clock,
        where known: a process had no load before its start, so it need not have been scraped then.
        """
        interval_s = self._interval_s
        newest_at = self.at
        since = -math.inf
        counted: list[Process] = []
        for process in expected:
            found = self._range(process)
            is_young = self._is_young(started_at.get(process.name), found.since)
            if found.missing and not (is_young and found.newest_at is None):
                return found.missing
            if not is_young:
                since = max(since, found.since)
                counted.append(process)
            if found.newest_at is not None:
                newest_at = min(newest_at, found.newest_at)
        if interval_s is None:
            return "Prometheus has not scraped any proxy or host twice so far"
        length_s = max(wanted_s, WINDOW_INTERVALS * interval_s)
        seen_s = self.reference_at - since + EDGE_INTERVALS * interval_s
        if seen_s >= self._horizon_s and length_s > self._horizon_s:
            counts = self._counts.get(wanted_s, {})
            fewest = min((counts.get(process, 0) for process in counted), default=math.inf)
            seen_s = max(fewest * interval_s / _SCRAPED_SHARE, self._horizon_s)
            since = self.reference_at - min(length_s, fewest * interval_s)
        if seen_s < length_s:
            length_s = math.ceil((self.reference_at - since) / interval_s) * interval_s
        for process in counted:
            if self._count(process, self.reference_at - length_s) < 2:
                return f"{process} was scraped only once in the last {length_s:.0f} s"
        return Window(length_s, newest_at)

    def _is_young(self, started_at: float | None, first_at: float) -> bool:
        """Whether the process was scraped from its start on, or has just started."""
        if started_at is None:
            return False
        slack_s = 2 * (self._interval_s or 0.0) + 5.0
        return min(first_at, self.at) - started_at <= slack_s

    def _range(self, process: Process) -> _Range:
        found = self._ranges.get(process)
        if found is None:
            found = self._ranges[process] = self._find_range(process)
        return found

    def _find_range(self, process: Process) -> _Range:
        series = self._processes.get(process)
        if not series:
            return _Range(f"{process} was not scraped by Prometheus")
        interval_s = self._interval_s or 0.0
        times = sorted(time for scraped in series for time in scraped.times)
        newest_at = times[-1]
        if self.at - newest_at > max(STALE_S, STALE_INTERVALS * interval_s):
            return _Range(f"{process} was not scraped for {self.at - newest_at:.0f} s", math.inf, newest_at)
        twice = self._scraped_twice(series)
        if twice:
            why = f"{process} is scraped twice, as {twice}; MUSTER_PROMETHEUS_SELECTOR can choose one"
            return _Range(why, math.inf, newest_at)
        since = newest_at
        for time in reversed(times):
            if since - time > GAP_INTERVALS * interval_s:
                break
            since = time
        return _Range("", since, newest_at)

    def _scraped_twice(self, series: Sequence[Scraped]) -> str:
        """The targets of a process if two are currently scraped; a moved process has an old one, which is not."""
        recent = self.at - STALE_INTERVALS * (self._interval_s or STALE_S)
        present = [scraped.target for scraped in series if _count_since(scraped.times, recent) >= 2]
        return " and ".join(sorted(present)) if len(present) > 1 else ""

    def _count(self, process: Process, since: float) -> int:
        return max(
            bisect_right(scraped.times, self.reference_at) - bisect_left(scraped.times, since)
            for scraped in self._processes[process]
        )


def infer_interval(series: Iterable[Sequence[float]]) -> float | None:
    """The scrape interval in seconds, of the slowest among ``series``; None if none has two samples.

    That of each is the lower median of its gaps, so that failed scrapes and breaks do not count.
    """
    slowest: float | None = None
    for times in series:
        gaps = sorted(after - before for before, after in pairwise(times))
        if gaps:
            slowest = max(slowest or 0.0, gaps[(len(gaps) - 1) // 2])
    return slowest


def _count_since(times: Sequence[float], since: float) -> int:
    return len(times) - bisect_left(times, since)


_INTERVAL_MAX_S: Final = 120.0
"""Longest usable scrape interval, seconds: with more, windows would have to be longer than five minutes."""


class Group(NamedTuple):
    """Parameters of one set of queries, shared by all backends with the same windows.

    Prometheus answers one query about ten thousand backends as fast as one about ten.
    """

    window_s: float
    burst_s: float | None
    aggregation: AggregationFunction


class CoveredQuery(NamedTuple):
    """A load request and the windows to query for it."""

    request: LoadRequest
    group: Group
    newest_at: float


@final
class WindowChooser:
    """Finds the windows of each load request; requests that expect the same processes share the result."""

    def __init__(self, coverage: Coverage, now: float) -> None:
        self._coverage = coverage
        self._now = now
        self._known: dict[tuple[object, ...], Window | str] = {}

    def place(self, request: LoadRequest) -> CoveredQuery | str:
        interval_s = self._coverage.interval_s
        if interval_s is not None and interval_s > _INTERVAL_MAX_S:
            return f"Prometheus scrapes every {interval_s:.0f} s, more than {_INTERVAL_MAX_S:.0f} s"
        seen = self._window(request, request.config.look_back_period_s)
        if isinstance(seen, str):
            return seen
        burst = self._window(request, request.config.panic_window_s) if request.config.panic_threshold else ""
        burst_s = burst.length_s if isinstance(burst, Window) else None
        return CoveredQuery(
            request, Group(seen.length_s, burst_s, request.config.aggregation_function), seen.newest_at
        )

    def _window(self, request: LoadRequest, wanted_s: float) -> Window | str:
        key = (wanted_s, request.proxies, request.hosts)
        found = self._known.get(key)
        if found is None:
            expected = [Process("proxy", name) for name in request.proxies]
            expected += [Process("host", name) for name in request.hosts]
            expected = expected or self._coverage.fresh()
            ahead_s = self._coverage.at - self._now
            started_at = {name: at + ahead_s for name, at in request.started_at.items()}
            found = self._known[key] = self._coverage.window(wanted_s, expected, started_at)
        return found
