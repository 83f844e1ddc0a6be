"""Which source a load is read from: Prometheus, or the services themselves while it lacks something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from structlog.testing import capture_logs

from serve_common.config.autoscaling import AutoscalingConfig, AutoscalingQuery
from serve_common.names import BackendTag
from serve_controller.adapters.load_scrape import LoadSources
from serve_controller.core.autoscaling.values import LoadSample
from serve_controller.ports import LoadRequest, Targets

A, B = BackendTag("a"), BackendTag("b")
NOBODY = Targets(urls=frozenset())


class Source:
    """Says what it is told to; counts whom it was asked about."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lacks: dict[BackendTag, str] = {}
        self.asked: list[BackendTag] = []

    async def read(
        self, asks: Sequence[LoadRequest], targets: Targets, now: float
    ) -> Mapping[BackendTag, LoadSample]:
        assert targets is NOBODY
        self.asked += [ask.backend_tag for ask in asks]
        return {ask.backend_tag: self._reading(ask.backend_tag, now) for ask in asks}

    def _reading(self, tag: BackendTag, now: float) -> LoadSample:
        missing = self.lacks.get(tag, "")
        return LoadSample(at=now, seen=None if missing else 1.0, source=self.name, missing=missing)

    async def close(self) -> None:
        pass


def ask(tag: BackendTag, query: AutoscalingQuery | None = None) -> LoadRequest:
    config = AutoscalingConfig(max_replicas=9, query=query)
    return LoadRequest(backend_tag=tag, config=config, proxies=frozenset(), hosts=frozenset())


class Looks:
    """A pair of sources that is looked at every 10 s."""

    def __init__(self) -> None:
        self.prometheus, self.scrape = Source("prometheus"), Source("scrape")
        self.sources = LoadSources(self.prometheus, self.scrape)
        self.now = 1000.0

    async def __call__(self, *asks: LoadRequest) -> list[str]:
        self.now += 10.0
        readings = await self.sources.read(asks or [ask(A), ask(B)], NOBODY, self.now)
        return [
            reading.source if reading.seen is not None else reading.missing for reading in readings.values()
        ]


async def test_nothing_is_scraped_while_prometheus_knows_all() -> None:
    look = Looks()
    assert await look() == ["prometheus", "prometheus"]
    assert look.scrape.asked == []


async def test_only_what_prometheus_lacks_is_scraped_until_it_has_been_good_for_a_while() -> None:
    look = Looks()
    look.prometheus.lacks = {A: "proxy p was not scraped for 20 s"}
    assert await look() == ["scrape", "prometheus"]
    assert look.scrape.asked == [A]
    look.prometheus.lacks = {}
    assert [(await look())[0] for _ in range(4)] == ["scrape", "scrape", "prometheus", "prometheus"]


async def test_a_source_that_fails_now_and_then_does_not_alternate() -> None:
    look = Looks()
    seen = []
    for number in range(12):
        look.prometheus.lacks = {A: "away"} if number % 3 == 0 else {}
        seen.append((await look(ask(A)))[0])
    assert set(seen) == {"scrape"}


async def test_what_neither_knows_tells_both_reasons() -> None:
    look = Looks()
    look.prometheus.lacks, look.scrape.lacks = {A: "gone"}, {A: "refused"}
    assert (await look(ask(A)))[0] == "gone; scraping: refused"


async def test_prometheus_readings_serve_where_the_scrape_has_none_yet() -> None:
    look = Looks()
    look.prometheus.lacks = look.scrape.lacks = {A: "gone"}
    await look(ask(A))
    look.prometheus.lacks = {}
    assert await look(ask(A)) == ["prometheus"]


async def test_a_users_query_is_never_scraped() -> None:
    look = Looks()
    look.prometheus.lacks = {A: "the query gives nothing"}
    assert await look(ask(A, AutoscalingQuery(promql="x", target=1))) == ["the query gives nothing"]
    assert look.scrape.asked == []


async def test_without_prometheus_everything_is_scraped() -> None:
    scrape = Source("scrape")
    readings = await LoadSources(None, scrape).read([ask(A)], NOBODY, 1.0)
    assert readings[A].source == "scrape"


async def test_each_change_is_logged_once_whichever_backends_are_looked_at() -> None:
    look = Looks()
    with capture_logs() as lines:
        look.prometheus.lacks = {A: "proxy p was not scraped for 20 s"}
        await look()
        await look(ask(B))
        look.prometheus.lacks = {A: "proxy p was not scraped for 41 s"}
        await look(ask(A))
        look.prometheus.lacks = {}
        for _ in range(4):
            await look()
    assert [line["event"] for line in lines] == ["prometheus_lacks_loads", "prometheus_has_all_loads"]
    assert lines[0]["reasons"] == {"proxy p was not scraped for # s": 1}
