"""The mean loads that the scrapes of all services come to.

Why a look of its own for each moment: thousands of backends expect the same proxies and ask about the same windows, so
what they share is worked out once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, final

from serve_common.autoscaling import AggregationFunction
from serve_common.names import BackendTag
from serve_controller.adapters.load_history import Between, TargetHistory
from serve_controller.adapters.load_page import Sample
from serve_controller.adapters.prometheus_coverage import Process
from serve_controller.core.autoscaling.asks import unmeasured
from serve_controller.core.autoscaling.values import LoadAsk, Reading

SOURCE: Final = "scrape"
STALE_S: Final = 8.0
"""What was not scraped for so long does not count."""
YOUNG_S: Final = 10.0
"""A process that began so lately need not have been scraped."""
SHORTEST_S: Final = 0.5
"""No load is told of less time than this: processes write their counters twice a second."""


@final
class LoadWindows:
    """The scrapes of all targets."""

    def __init__(self) -> None:
        self._targets: dict[str, TargetHistory] = {}

    def keep_only(self, urls: Collection[str]) -> None:
        """Forget all other targets."""
        for url in self._targets.keys() - set(urls):
            del self._targets[url]

    def add(self, url: str, at: float, samples: Iterable[Sample], keep_s: float) -> None:
        """A target was scraped. Raises ValueError, and keeps nothing of it, when the page cannot be read."""
        self._targets.setdefault(url, TargetHistory()).add(at, list(samples), keep_s)

    def add_failure(self, url: str, why: str) -> None:
        """It could not be."""
        self._targets.setdefault(url, TargetHistory()).failure = why

    def at(self, now: float) -> LoadLook:
        """For readings of that moment; ``now`` by the clock that scrapes are told by."""
        return LoadLook(
            {url: target for url, target in self._targets.items() if target.points}, self._failures(), now
        )

    def _failures(self) -> list[str]:
        return [f"{url}: {target.failure}" for url, target in self._targets.items() if target.failure]


class _Seen(NamedTuple):
    """What some processes' readings are made of."""

    end: float
    length_s: float


@final
class LoadLook:
    """Readings of one moment; what backends share is worked out once."""

    def __init__(self, targets: Mapping[str, TargetHistory], failures: Sequence[str], now: float) -> None:
        self._failures = failures
        self._now = now
        self._homes: dict[Process, TargetHistory] = {}
        for target in targets.values():
            for process in target.since:
                home = self._homes.get(process)
                if home is None or home.newest_at < target.newest_at:
                    self._homes[process] = target
        homes = {id(home) for home in self._homes.values()}
        # A page of processes that have all been found on others is theirs once more, under another address.
        self._targets = [target for target in targets.values() if not target.since or id(target) in homes]
        self._places: defaultdict[BackendTag, list[int]] = defaultdict(list)
        """Which targets have ever told of a request of a backend: of many few."""
        for number, target in enumerate(self._targets):
            for tag in target.points[-1].seconds:
                self._places[tag].append(number)
        self._measured: Counter[BackendTag] = Counter()
        for target in self._targets:
            self._measured.update(target.measured)
        self._known: dict[tuple[object, ...], _Seen | str] = {}
        self._moments: dict[float, list[Between]] = {}

    def reading(self, ask: LoadAsk, wall_now: float) -> Reading:
        """The load of one backend; ``wall_now`` is now in seconds since 1970."""
        if ask.config.query is not None:
            return Reading(
                at=wall_now,
                seen=None,
                source=SOURCE,
                missing="a query needs a Prometheus server, and SERVE_PROMETHEUS_URL names none",
            )
        config = ask.config
        seen = self._seen(ask, config.look_back_period_s, wall_now)
        why = seen if isinstance(seen, str) else unmeasured(ask, self._measured.get(ask.backend_tag, 0))
        if why or isinstance(seen, str):
            return Reading(at=wall_now, seen=None, source=SOURCE, missing=why)
        ongoing, queued = self._mean(ask.backend_tag, seen.end - seen.length_s, seen.end)
        load = ongoing + queued
        if config.aggregation_function is not AggregationFunction.MEAN:
            load = self._extreme(ask.backend_tag, seen, config.aggregation_function)
        burst = None
        if config.panic_threshold:
            burst = sum(
                self._mean(ask.backend_tag, seen.end - min(config.panic_window_s, seen.length_s), seen.end)
            )
        return Reading(
            at=wall_now - (self._now - seen.end),
            seen=load,
            burst=burst,
            queued=min(queued, load),
            source=SOURCE,
            over_s=seen.length_s,
        )

    def _seen(self, ask: LoadAsk, wanted_s: float, wall_now: float) -> _Seen | str:
        key = (wanted_s, ask.proxies, ask.hosts)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._find_seen(ask, wanted_s, wall_now)
        return found

    def _find_seen(self, ask: LoadAsk, wanted_s: float, wall_now: float) -> _Seen | str:
        expected = [Process("proxy", name) for name in ask.proxies]
        expected += [Process("host", name) for name in ask.hosts]
        if not expected:
            expected = [process for process, home in self._homes.items() if self._age(home) <= STALE_S]
        if not expected:
            return self._nobody("no proxy or host could be scraped")
        end, since = self._now, float("-inf")
        for process in expected:
            began_at = ask.began_at.get(process.name)
            is_young = began_at is not None and wall_now - began_at <= YOUNG_S
            home = self._homes.get(process)
            if home is None and is_young:
                continue
            if home is None:
                return self._nobody(f"no page of metrics is that of {process}")
            if self._age(home) > STALE_S:
                return (
                    f"{process} was not scraped for {self._age(home):.0f} s: {home.failure or 'it is gone'}"
                )
            end = min(end, home.newest_at)
            if not is_young:
                since = max(since, home.since[process])
        length_s = min(wanted_s, end - since)
        if length_s < SHORTEST_S:
            return "the services were scraped only once so far"
        return _Seen(end, length_s)

    def _age(self, home: TargetHistory) -> float:
        return self._now - home.newest_at

    def _nobody(self, why: str) -> str:
        failures = self._failures
        if not failures:
            return why
        more = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
        return f"{why} ({failures[0]}{more})"

    def _mean(self, tag: BackendTag, start: float, end: float) -> tuple[float, float]:
        """Requests worked on and waiting, on average."""
        ongoing = queued = 0.0
        before, after = self._moment(start), self._moment(end)
        for number in self._places.get(tag, ()):
            low, high = before[number].value(tag), after[number].value(tag)
            ongoing += high[0] - low[0]
            queued += high[1] - low[1]
        return max(ongoing / (end - start), 0.0), max(queued / (end - start), 0.0)

    def _extreme(self, tag: BackendTag, seen: _Seen, function: AggregationFunction) -> float:
        """The largest or smallest of the means of the parts of the window, each of them 5 s or a fifteenth."""
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
