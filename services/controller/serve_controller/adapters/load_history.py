"""What was scraped of one service lately.

Why cumulated values: between any two scrapes of a counter of seconds lies the exact mean number of requests, so old
scrapes may be thinned out and windows of any length read from what is left.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Final, NamedTuple, final

from immutables import Map, MapMutation

from serve_common.names import BackendTag
from serve_controller.adapters.load_page import Sample
from serve_controller.adapters.prometheus_coverage import Process
from serve_controller.adapters.prometheus_queries import CONNECTED, HOST, ONGOING, PROXY, QUEUED

_SPACING: Final = 16.0
"""Of two scrapes that are closer than this part of their age one is forgotten."""
_ROUNDING: Final = 0.999
"""A counter that fell to more than this part of itself was rounded; one that fell to less began anew."""

_FORGET_S: Final = 120.0
"""A series that is missing on its page for so long is forgotten."""

_Seconds = tuple[float, float]
"""Of one backend at one target, added up since its first scrape here: worked on, and waited."""
_NOTHING: Final = (0.0, 0.0)
_EMPTY: Final[Map[BackendTag, _Seconds]] = Map()


class Point(NamedTuple):
    """One scrape of one target."""

    at: float
    seconds: Map[BackendTag, _Seconds]


class Between(NamedTuple):
    """A moment between two scrapes of a target."""

    before: Map[BackendTag, _Seconds]
    after: Map[BackendTag, _Seconds]
    share: float

    def value(self, tag: BackendTag) -> _Seconds:
        low = self.before.get(tag, _NOTHING)
        high = self.after.get(tag, _NOTHING)
        if low is high:
            return low
        share = self.share
        return low[0] + (high[0] - low[0]) * share, low[1] + (high[1] - low[1]) * share


@final
class TargetHistory:
    """The scrapes of one target."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.since: dict[Process, float] = {}
        """Who is on its page, since when without a break."""
        self.measured: dict[BackendTag, int] = {}
        """Replicas of each backend on its page."""
        self.failure = ""
        """Why the latest scrape failed; empty when it did not."""
        self._counters: dict[str, tuple[float, float]] = {}
        """The value of each series and when it was seen last."""
        self._tags: dict[BackendTag, float] = {}
        """When each backend was on its page last."""
        self._tidied_at = float("-inf")

    def add(self, at: float, samples: Iterable[Sample], keep_s: float) -> None:
        """Take in the page of a scrape; those older than ``keep_s`` are forgotten."""
        processes: set[Process] = set()
        counted: list[Sample] = []
        measured: dict[BackendTag, int] = {}
        for sample in samples:
            if sample.name == PROXY:
                processes.add(Process("proxy", sample.labels.get("proxy_id", "")))
            elif sample.name == HOST:
                processes.add(Process("host", sample.labels.get("host_id", "")))
            elif sample.name in (ONGOING, QUEUED):
                counted.append(sample)
            elif sample.name == CONNECTED:
                tag = BackendTag(sample.labels.get("backend_tag", ""))
                measured[tag] = measured.get(tag, 0) + int(sample.value)
        if processes.isdisjoint(self.since):
            self._counters = {}  # somebody else has this address now
        # A series that appears together with its process was perhaps only left out before: it says nothing yet.
        begins_at_zero = bool(self.points) and processes <= self.since.keys()
        self._append(Point(at, self._added(at, counted, begins_at_zero=begins_at_zero)), keep_s)
        self.since = {process: self.since.get(process, at) for process in processes}
        self.measured = measured
        self.failure = ""

    def _added(
        self, at: float, counted: Iterable[Sample], *, begins_at_zero: bool
    ) -> Map[BackendTag, _Seconds]:
        seconds = (self.points[-1].seconds if self.points else _EMPTY).mutate()
        if at - self._tidied_at > _FORGET_S:
            self._tidy(at, seconds)
        counters = self._counters
        for sample in counted:
            value = sample.value
            tag = BackendTag(sample.labels.get("backend_tag", ""))
            self._tags[tag] = at
            known, _ = counters.get(sample.series, (0.0 if begins_at_zero else value, at))
            counters[sample.series] = (max(value, known) if value > known * _ROUNDING else value, at)
            grown = _grown(known, value)
            if grown:
                ongoing, queued = seconds.get(tag, _NOTHING)
                seconds[tag] = (
                    (ongoing, queued + grown) if sample.name == QUEUED else (ongoing + grown, queued)
                )
        return seconds.finish()

    def _tidy(self, at: float, seconds: MapMutation[BackendTag, _Seconds]) -> None:
        """Forget series that are gone, and backends of which all are."""
        self._tidied_at = at
        self._counters = {
            series: known for series, known in self._counters.items() if known[1] > at - _FORGET_S
        }
        for tag in [tag for tag, seen_at in self._tags.items() if seen_at <= at - _FORGET_S]:
            del self._tags[tag]
            seconds.pop(tag, None)

    def _append(self, newest: Point, keep_s: float) -> None:
        at = newest.at
        points = [*self.points, newest]
        kept: list[Point] = []
        for index, point in enumerate(points):
            is_last = index >= len(points) - 2
            if not is_last and points[index + 1].at < at - keep_s:
                continue
            if not is_last and kept and point.at - kept[-1].at < (at - point.at) / _SPACING:
                continue
            kept.append(point)
        self.points = kept

    @property
    def newest_at(self) -> float:
        """When it was scraped last; minus infinity when it never was."""
        return self.points[-1].at if self.points else float("-inf")

    def at(self, moment: float) -> Between:
        """The moment's place among the scrapes; before the first and after the last of them nothing changes."""
        points = self.points
        index = bisect_right(points, moment, key=_time_of)
        before = points[max(index - 1, 0)]
        after = points[min(index, len(points) - 1)]
        length_s = after.at - before.at
        return Between(
            before.seconds, after.seconds, (moment - before.at) / length_s if length_s > 0 else 0.0
        )


def _grown(known: float, value: float) -> float:
    if value >= known:
        return value - known
    return 0.0 if value > known * _ROUNDING else value


def _time_of(point: Point) -> float:
    return point.at
