"""Recent scrapes of each service, and the mean loads computed from them."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, final

from immutables import Map, MapMutation

from serve_common.config.autoscaling import AggregationFunction
from serve_common.names import BackendTag
from serve_controller.adapters.prometheus_api import CONNECTED, HOST, ONGOING, PROXY, QUEUED
from serve_controller.adapters.prometheus_coverage import Process
from serve_controller.core.autoscaling.values import LoadRequest, LoadSample, unmeasured

_LABEL: Final = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_ESCAPE: Final = re.compile(r"\\(.)")
_ESCAPED: Final = {"n": "\n", "\\": "\\", '"': '"'}


class Sample(NamedTuple):
    """One line of a page."""

    series: str
    """Name and labels as written on the page: a series is written identically on every page of one process."""
    name: str
    labels: dict[str, str]
    value: float


def parse_page(
    text: str, names: Collection[str], known: Mapping[str, dict[str, str]] | None = None
) -> Iterator[Sample]:
    """Parse the samples of these names; other lines are skipped. Raises ValueError for a value that is no number.

    ``known`` has the labels of series parsed before: parsing labels takes most of the time.

    Not prometheus_client's parser: it takes 20 µs per line, and a proxy with thousands of backends has tens of
    thousands of lines, few of which matter. Format: prometheus.io/docs/instrumenting/exposition_formats, version 0.0.4.
    """
    for line in text.splitlines():
        brace = line.find("{")
        space = line.find(" ")
        end = brace if 0 <= brace < space else space
        name = line[:end]
        if name not in names or end < 0:
            continue
        after = line.rfind("}") + 1 if end == brace else end
        series = line[:after]
        labels = None if known is None else known.get(series)
        if labels is None:
            labels = _labels(series, end)
        yield Sample(series, name, labels, float(line[after:].split()[0]))  # a time may follow


def _labels(series: str, start: int) -> dict[str, str]:
    return {
        found[1]: _ESCAPE.sub(lambda escape: _ESCAPED.get(escape[1], escape[0]), found[2])
        if "\\" in found[2]
        else found[2]
        for found in _LABEL.finditer(series, start)
    }


_SPACING: Final = 16.0
"""One of two scrapes that are closer together than their age divided by this is dropped."""
_ROUNDING: Final = 0.999
"""Part of its value to which a counter may fall by rounding; one that fell further was reset."""

_FORGET_S: Final = 120.0
"""Seconds after which a series that is missing on its page is forgotten."""

_Seconds = tuple[float, float]
"""Ongoing and queued seconds of one backend at one target, since its first scrape here."""
_NOTHING: Final = (0.0, 0.0)
_EMPTY: Final[Map[BackendTag, _Seconds]] = Map()


class Point(NamedTuple):
    """One scrape of one target."""

    at: float
    seconds: Map[BackendTag, _Seconds]


class Between(NamedTuple):
    """A time between two scrapes of a target."""

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
    """The scrapes of one target.

    It stores cumulative values: between any two scrapes, the increase of a counter of seconds gives the exact mean
    number of requests. So old scrapes may be thinned out, and windows of any length can be computed from the rest.
    """

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.since: dict[Process, float] = {}
        """Processes on its page, and since when without a break."""
        self.measured: dict[BackendTag, int] = {}
        """Number of replicas of each backend on its page."""
        self.failure = ""
        """Why the latest scrape failed; empty if it succeeded."""
        self._counters: dict[str, tuple[float, float]] = {}
        """The latest value of each series, and its time."""
        self._tags: dict[BackendTag, float] = {}
        """When each backend was last on its page."""
        self._gc_at = float("-inf")

    def add(self, at: float, samples: Iterable[Sample], retention_s: float) -> None:
        """Add the page of a scrape; scrapes older than ``retention_s`` are dropped."""
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
            self._counters = {}  # another process has this address now
        # A series that appears together with its process may have been left out before: its value is no increase.
        starts_at_zero = bool(self.points) and processes <= self.since.keys()
        self._append(Point(at, self._added(at, counted, starts_at_zero=starts_at_zero)), retention_s)
        self.since = {process: self.since.get(process, at) for process in processes}
        self.measured = measured
        self.failure = ""

    def _added(
        self, at: float, counted: Iterable[Sample], *, starts_at_zero: bool
    ) -> Map[BackendTag, _Seconds]:
        seconds = (self.points[-1].seconds if self.points else _EMPTY).mutate()
        if at - self._gc_at > _FORGET_S:
            self._gc(at, seconds)
        counters = self._counters
        for sample in counted:
            value = sample.value
            tag = BackendTag(sample.labels.get("backend_tag", ""))
            self._tags[tag] = at
            known, _ = counters.get(sample.series, (0.0 if starts_at_zero else value, at))
            counters[sample.series] = (max(value, known) if value > known * _ROUNDING else value, at)
            increase = _increase(known, value)
            if increase:
                ongoing, queued = seconds.get(tag, _NOTHING)
                seconds[tag] = (
                    (ongoing, queued + increase) if sample.name == QUEUED else (ongoing + increase, queued)
                )
        return seconds.finish()

    def _gc(self, at: float, seconds: MapMutation[BackendTag, _Seconds]) -> None:
        """Forget series that are gone, and backends without any series."""
        self._gc_at = at
        self._counters = {
            series: known for series, known in self._counters.items() if known[1] > at - _FORGET_S
        }
        for tag in [tag for tag, seen_at in self._tags.items() if seen_at <= at - _FORGET_S]:
            del self._tags[tag]
            seconds.pop(tag, None)

    def _append(self, newest: Point, retention_s: float) -> None:
        at = newest.at
        points = [*self.points, newest]
        retained: list[Point] = []
        for index, point in enumerate(points):
            is_last = index >= len(points) - 2
            if not is_last and points[index + 1].at < at - retention_s:
                continue
            if not is_last and retained and point.at - retained[-1].at < (at - point.at) / _SPACING:
                continue
            retained.append(point)
        self.points = retained

    @property
    def newest_at(self) -> float:
        """Time of the latest scrape; minus infinity before the first."""
        return self.points[-1].at if self.points else float("-inf")

    def at(self, moment: float) -> Between:
        """Locate a time among the scrapes; values are constant before the first and after the last."""
        points = self.points
        index = bisect_right(points, moment, key=_get_time)
        before = points[max(index - 1, 0)]
        after = points[min(index, len(points) - 1)]
        length_s = after.at - before.at
        return Between(
            before.seconds, after.seconds, (moment - before.at) / length_s if length_s > 0 else 0.0
        )


def _increase(known: float, value: float) -> float:
    if value >= known:
        return value - known
    return 0.0 if value > known * _ROUNDING else value


def _get_time(point: Point) -> float:
    return point.at


SOURCE: Final = "scrape"
STALE_S: Final = 8.0
"""Seconds without a scrape after which a process does not count."""
YOUNG_S: Final = 10.0
"""Seconds after its start in which a process need not have been scraped."""
SHORTEST_S: Final = 0.5
"""Shortest window of a load, seconds: processes write their counters twice a second."""


@final
class LoadWindows:
    """The scrapes of all targets."""

    def __init__(self) -> None:
        self._targets: dict[str, TargetHistory] = {}

    def retain(self, urls: Collection[str]) -> None:
        """Forget all other targets."""
        for url in self._targets.keys() - set(urls):
            del self._targets[url]

    def add(self, url: str, at: float, samples: Iterable[Sample], retention_s: float) -> None:
        """Add a target's page. Raises ValueError, and adds nothing, when it cannot be parsed."""
        self._targets.setdefault(url, TargetHistory()).add(at, list(samples), retention_s)

    def add_failure(self, url: str, why: str) -> None:
        """Record that a target could not be scraped."""
        self._targets.setdefault(url, TargetHistory()).failure = why

    def at(self, now: float) -> LoadEvaluation:
        """Evaluate the scrapes at ``now``, by the clock of `add`."""
        return LoadEvaluation(
            {url: target for url, target in self._targets.items() if target.points}, self._failures(), now
        )

    def _failures(self) -> list[str]:
        return [f"{url}: {target.failure}" for url, target in self._targets.items() if target.failure]


class _Window(NamedTuple):
    """The window that covers some processes."""

    end: float
    length_s: float


@final
class LoadEvaluation:
    """Load samples at one time; results that backends share are computed once.

    Thousands of backends expect the same proxies and need the same windows.
    """

    def __init__(self, targets: Mapping[str, TargetHistory], failures: Sequence[str], now: float) -> None:
        self._failures = failures
        self._now = now
        self._pages: dict[Process, TargetHistory] = {}
        for target in targets.values():
            for process in target.since:
                page = self._pages.get(process)
                if page is None or page.newest_at < target.newest_at:
                    self._pages[process] = target
        pages = {id(page) for page in self._pages.values()}
        # A page whose processes are all on newer pages is a duplicate under another address.
        self._targets = [target for target in targets.values() if not target.since or id(target) in pages]
        self._targets_by_tag: defaultdict[BackendTag, list[int]] = defaultdict(list)
        """Targets that ever had a request of a backend: few of many."""
        for number, target in enumerate(self._targets):
            for tag in target.points[-1].seconds:
                self._targets_by_tag[tag].append(number)
        self._measured: Counter[BackendTag] = Counter()
        for target in self._targets:
            self._measured.update(target.measured)
        self._known: dict[tuple[object, ...], _Window | str] = {}
        self._moments: dict[float, list[Between]] = {}

    def sample(self, request: LoadRequest, wall_now: float) -> LoadSample:
        """The load of one backend; ``wall_now`` is the current time in seconds since 1970."""
        if request.config.query is not None:
            return LoadSample(
                at=wall_now,
                seen=None,
                source=SOURCE,
                missing="a query needs a Prometheus server, and MUSTER_PROMETHEUS_URL names none",
            )
        config = request.config
        seen = self._window(request, config.look_back_period_s, wall_now)
        why = (
            seen if isinstance(seen, str) else unmeasured(request, self._measured.get(request.backend_tag, 0))
        )
        if why or isinstance(seen, str):
            return LoadSample(at=wall_now, seen=None, source=SOURCE, missing=why)
        ongoing, queued = self._mean(request.backend_tag, seen.end - seen.length_s, seen.end)
        load = ongoing + queued
        if config.aggregation_function is not AggregationFunction.MEAN:
            load = self._extreme(request.backend_tag, seen, config.aggregation_function)
        burst = None
        if config.panic_threshold:
            burst = sum(
                self._mean(
                    request.backend_tag, seen.end - min(config.panic_window_s, seen.length_s), seen.end
                )
            )
        return LoadSample(
            at=wall_now - (self._now - seen.end),
            seen=load,
            burst=burst,
            queued=min(queued, load),
            source=SOURCE,
            over_s=seen.length_s,
        )

    def _window(self, request: LoadRequest, wanted_s: float, wall_now: float) -> _Window | str:
        key = (wanted_s, request.proxies, request.hosts)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._find_window(request, wanted_s, wall_now)
        return found

    def _find_window(self, request: LoadRequest, wanted_s: float, wall_now: float) -> _Window | str:
        expected = [Process("proxy", name) for name in request.proxies]
        expected += [Process("host", name) for name in request.hosts]
        if not expected:
            expected = [process for process, page in self._pages.items() if self._age(page) <= STALE_S]
        if not expected:
            return self._with_failures("no proxy or host could be scraped")
        end, since = self._now, float("-inf")
        for process in expected:
            started_at = request.started_at.get(process.name)
            is_young = started_at is not None and wall_now - started_at <= YOUNG_S
            page = self._pages.get(process)
            if page is None and is_young:
                continue
            if page is None:
                return self._with_failures(f"no page of metrics is that of {process}")
            if self._age(page) > STALE_S:
                return (
                    f"{process} was not scraped for {self._age(page):.0f} s: {page.failure or 'it is gone'}"
                )
            end = min(end, page.newest_at)
            if not is_young:
                since = max(since, page.since[process])
        length_s = min(wanted_s, end - since)
        if length_s < SHORTEST_S:
            return "the services were scraped only once so far"
        return _Window(end, length_s)

    def _age(self, page: TargetHistory) -> float:
        return self._now - page.newest_at

    def _with_failures(self, why: str) -> str:
        failures = self._failures
        if not failures:
            return why
        more = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
        return f"{why} ({failures[0]}{more})"

    def _mean(self, tag: BackendTag, start: float, end: float) -> tuple[float, float]:
        """Mean numbers of ongoing and queued requests."""
        ongoing = queued = 0.0
        before, after = self._moment(start), self._moment(end)
        for number in self._targets_by_tag.get(tag, ()):
            low, high = before[number].value(tag), after[number].value(tag)
            ongoing += high[0] - low[0]
            queued += high[1] - low[1]
        return max(ongoing / (end - start), 0.0), max(queued / (end - start), 0.0)

    def _extreme(self, tag: BackendTag, seen: _Window, function: AggregationFunction) -> float:
        """The largest or smallest mean over the parts of the window: parts of 5 s, at most 15."""
        parts = max(min(int(seen.length_s / 5.0), 15), 1)
        part_s = seen.length_s / parts
        starts = [seen.end - (number + 1) * part_s for number in range(parts)]
        means = [sum(self._mean(tag, start, start + part_s)) for start in starts]
        return max(means) if function is AggregationFunction.MAX else min(means)

    def _moment(self, moment: float) -> list[Between]:
        found = self._moments.get(moment)
        if found is None:
            found = self._moments[moment] = [target.at(moment) for target in self._targets]
        return found
