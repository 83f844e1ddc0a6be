"""Loads read from real pages, by a real Prometheus and without it: right, the same, never without ground."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serve_common.clock import SystemClock
from serve_common.config.autoscaling import AggregationFunction, AutoscalingConfig, AutoscalingQuery
from serve_common.names import BackendTag, HostId, ProxyId
from serve_controller.adapters.load_scrape import LoadScrape, LoadSources
from serve_controller.adapters.load_windows import LoadWindows
from serve_controller.adapters.prometheus_api import PrometheusApi
from serve_controller.adapters.prometheus_source import PrometheusSource
from serve_controller.core.autoscaling.values import LoadRequest, LoadSample, Targets
from tests.support.servers.prometheus_server import PrometheusServer, scrape_config

pytestmark = pytest.mark.timeout(240)

INTERVAL_S = 1.0
LOOK_BACK_S = 4.0
PANIC_S = 2.5
PERIOD_S = 0.8
"""Of the direct scrape: quicker than in earnest."""
STRAY_S_MAX = 0.15
TRIES = 60
BUSY, IDLE = BackendTag("app/busy"), BackendTag("app/idle")
ONGOING, QUEUED = 5.0, 2.0


class Service(Collector):
    """A page whose counters grow as if so many requests were there all the time."""

    def __init__(self, info: str, label: str, name: str, counter: str, load: float) -> None:
        self._info = (info, label, name)
        self._counter = counter
        self._load = load
        self._began_at = self.made_at = time.monotonic()
        """When the newest page was made."""
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(0, "127.0.0.1", registry)
        self.address = f"127.0.0.1:{self._server.server_port}"
        self.url = f"http://{self.address}/metrics"

    def collect(self) -> Iterator[Metric]:
        info, label, name = self._info
        who = GaugeMetricFamily(info, "Who this is", labels=[label])
        who.add_metric([name], 1.0)
        yield who
        seconds = CounterMetricFamily(self._counter, "Seconds of requests", labels=["backend_tag"])
        self.made_at = time.monotonic()
        seconds.add_metric([BUSY], self._load * (self.made_at - self._began_at))
        yield seconds

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


@pytest.fixture(scope="module")
def services() -> Iterator[dict[str, Service]]:
    """Two proxies, of which Prometheus scrapes the first, and a host."""
    made = {
        "p1": Service("serve_proxy_info", "proxy_id", "p1", "serve_router_queued_seconds", QUEUED),
        "p2": Service("serve_proxy_info", "proxy_id", "p2", "serve_router_queued_seconds", 0.0),
        "h1": Service("serve_host_info", "host_id", "h1", "serve_replica_ongoing_seconds", ONGOING),
    }
    yield made
    for service in made.values():
        service.close()


@pytest.fixture(scope="module")
def prometheus(
    services: dict[str, Service], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrometheusServer]:
    """One that scrapes every second, and has seen the whole look-back period."""
    jobs = {"proxy": [services["p1"].address], "host": [services["h1"].address]}
    config = scrape_config(jobs, interval_s=INTERVAL_S)
    with PrometheusServer(tmp_path_factory.mktemp("prometheus"), config) as server:
        server.start()
        full = f"count_over_time(serve_host_info[{LOOK_BACK_S + 1:g}s]) > {LOOK_BACK_S / INTERVAL_S:g}"
        server.wait_for(full, timeout_s=60.0)
        yield server


@pytest.fixture
async def source(prometheus: PrometheusServer) -> AsyncIterator[PrometheusSource]:
    prometheus.start()
    source = PrometheusSource(PrometheusApi(prometheus.url))
    yield source
    await source.close()


def ask(
    tag: BackendTag = BUSY,
    *,
    proxies: tuple[str, ...] = ("p1",),
    promql: str = "",
    aggregation: AggregationFunction = AggregationFunction.MEAN,
    look_back_s: float = LOOK_BACK_S,
) -> LoadRequest:
    config = AutoscalingConfig(
        max_replicas=9,
        look_back_period_s=look_back_s,
        panic_window_s=PANIC_S,
        aggregation_function=aggregation,
        query=AutoscalingQuery(promql=promql, target=1.0) if promql else None,
    )
    return LoadRequest(
        backend_tag=tag,
        config=config,
        proxies=frozenset(ProxyId(name) for name in proxies),
        hosts=frozenset({HostId("h1")}),
    )


now = SystemClock().now
NOBODY = Targets(urls=frozenset())


async def read(source: PrometheusSource, *asks: LoadRequest) -> list[LoadSample]:
    readings = await source.read(asks, NOBODY, now())
    return list(readings.values())


async def read_right(
    source: PrometheusSource, is_right: Callable[[LoadSample], bool], *asks: LoadRequest
) -> list[LoadSample]:
    """Readings, the first of which is right.

    A scrape that a busy machine holds up gives the counters of a later moment than Prometheus thinks, which spoils all
    readings until it is out of their windows; one that it holds up for longer is missing. The load is steady, so what
    reads wrongly never comes to be right.
    """
    for _ in range(TRIES):
        readings = await read(source, *asks)
        if is_right(readings[0]):
            return readings
        await asyncio.sleep(INTERVAL_S)
    raise AssertionError(f"{TRIES} times it was not right, lastly {readings[0]}")


async def test_prometheus_tells_the_mean_of_what_is_worked_on_and_waits(source: PrometheusSource) -> None:
    def is_right(busy: LoadSample) -> bool:
        return (
            busy.missing == ""
            and busy.seen == pytest.approx(ONGOING + QUEUED, rel=0.1)
            and busy.burst == pytest.approx(ONGOING + QUEUED, rel=0.15)
            and busy.queued == pytest.approx(QUEUED, rel=0.1)
            and 0.0 <= now() - busy.at < 3.0
        )

    busy, idle = await read_right(source, is_right, ask(), ask(IDLE))
    assert (busy.source, busy.over_s) == ("prometheus", LOOK_BACK_S)
    # Everybody was scraped, and it has no series: nobody ever asked for it.
    assert (idle.seen, idle.burst, idle.missing) == (0.0, 0.0, "")


@pytest.mark.parametrize("aggregation", [AggregationFunction.MAX, AggregationFunction.MIN])
async def test_the_extremes_of_a_steady_load_are_its_mean(
    source: PrometheusSource, aggregation: AggregationFunction
) -> None:
    def is_right(reading: LoadSample) -> bool:
        return reading.seen == pytest.approx(ONGOING + QUEUED, rel=0.3)

    (reading,) = await read_right(source, is_right, ask(aggregation=aggregation))
    assert reading.missing == ""


async def test_a_look_back_before_prometheus_began_is_as_long_as_it_has_seen(
    source: PrometheusSource,
) -> None:
    def is_right(reading: LoadSample) -> bool:
        return reading.seen == pytest.approx(ONGOING + QUEUED, rel=0.1)

    (reading,) = await read_right(source, is_right, ask(look_back_s=120.0))
    assert reading.over_s is not None
    assert reading.over_s < 120.0


async def test_a_proxy_that_prometheus_does_not_scrape_makes_a_load_unknown(source: PrometheusSource) -> None:
    _, partial = await read_right(
        source, lambda whole: whole.seen is not None, ask(), ask(IDLE, proxies=("p1", "p2"))
    )
    assert partial.seen is None
    assert partial.missing == "proxy p2 was not scraped by Prometheus"


@pytest.mark.parametrize(
    ("promql", "missing"),
    [
        ("sum(", "parse error"),
        ("no_such_series", "gives nothing"),
        ('{__name__=~"serve_.*_info"}', "gives 2 numbers instead of one"),
        ("vector(0) / 0", "gives nan"),
        ("vector(1) / 0", "gives inf"),
        ("up[1m]", "gives a matrix"),
        ('"text"', "gives a string"),
    ],
)
async def test_a_query_that_gives_no_number_says_why(
    source: PrometheusSource, promql: str, missing: str
) -> None:
    (reading,) = await read_right(source, lambda reading: missing in reading.missing, ask(promql=promql))
    assert reading.seen is None


async def test_a_query_may_give_a_scalar_or_a_vector_of_one_and_knows_its_backend(
    source: PrometheusSource,
) -> None:
    rate = 'sum(rate(serve_replica_ongoing_seconds_total{backend_tag="$backend_tag"}[$look_back]))'

    def is_right(reading: LoadSample) -> bool:
        return reading.seen == pytest.approx(ONGOING, rel=0.1)

    _, other = await read_right(source, is_right, ask(promql=rate), ask(IDLE, promql="2.5 * 2"))
    assert (other.seen, other.burst) == (5.0, None)


async def test_a_selector_leaves_other_instances_out(prometheus: PrometheusServer) -> None:
    source = PrometheusSource(PrometheusApi(prometheus.url), 'job="other"')
    (reading,) = await read(source, ask())
    await source.close()
    assert "was not scraped by Prometheus" in reading.missing


async def test_what_answers_but_is_no_prometheus_is_named(services: dict[str, Service]) -> None:
    source = PrometheusSource(PrometheusApi(f"http://user:secret@{services['p1'].address}"))
    (reading,) = await read(source, ask())
    await source.close()
    assert "not as Prometheus does" in reading.missing
    assert "secret" not in reading.missing


async def test_loads_go_on_from_the_services_while_prometheus_is_away_and_return_to_it(
    prometheus: PrometheusServer,
    source: PrometheusSource,
    services: dict[str, Service],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    targets = Targets(urls=frozenset(service.url for service in services.values()))
    sources = LoadSources(source, LoadScrape(time.monotonic, period_s=PERIOD_S))

    async def look() -> LoadSample:
        return (await sources.read([ask()], targets, now()))[BUSY]

    async with asyncio.timeout(60):
        while (await look()).source != "prometheus":  # a scrape may just have been held up  # noqa: ASYNC110
            await asyncio.sleep(PERIOD_S)
    strays = Strays(services, monkeypatch)
    prometheus.kill()
    during = reading = await look()
    await asyncio.to_thread(prometheus.start)
    seen: list[LoadSample] = []
    async with asyncio.timeout(120):
        while True:
            if not strays.spoil(reading):
                seen.append(reading)
            if reading.source == "prometheus":
                break
            await asyncio.sleep(PERIOD_S)  # the interval at which a backend is looked at
            reading = await look()
    await sources.close()
    assert during.source == "scrape"
    # At no moment, and least of all with the first scrapes of the new server, was it another load. (So far can scrapes
    # be off that were held up a little: what is forgotten or counted twice here is half of it and more.)
    assert [reading.seen for reading in seen] == [pytest.approx(ONGOING + QUEUED, rel=0.4)] * len(seen)


class Strays:
    """How far it is from the moment at which a page was made to the one for which the scrape takes it."""

    def __init__(self, services: dict[str, Service], monkeypatch: pytest.MonkeyPatch) -> None:
        self._found: list[tuple[float, float]] = []
        by_url = {service.url: service for service in services.values()}
        add = LoadWindows.add

        def noted(windows: LoadWindows, url: str, at: float, *rest: Any) -> None:
            self._found.append((at, abs(at - by_url[url].made_at)))
            add(windows, url, at, *rest)

        monkeypatch.setattr(LoadWindows, "add", noted)

    def spoil(self, reading: LoadSample) -> bool:
        """Whether a page was held up in the window of ``reading``, which was made just now."""
        if reading.source != "scrape":
            return False
        started_at = time.monotonic() - (reading.over_s or LOOK_BACK_S) - 2 * PERIOD_S
        return any(at >= started_at and stray_s > STRAY_S_MAX for at, stray_s in self._found)


async def test_a_scrape_names_who_does_not_answer(services: dict[str, Service]) -> None:
    scrape = LoadScrape(time.monotonic, period_s=PERIOD_S)
    targets = Targets(urls=frozenset({services["h1"].url, services["p1"].url, "http://127.0.0.1:1/metrics"}))
    asks = [ask(), ask(IDLE, proxies=("p1", "p2"))]
    readings = await scrape.read(asks, targets, now())
    for _ in range(TRIES):  # as above
        if readings[BUSY].seen == pytest.approx(ONGOING + QUEUED, rel=0.1):
            break
        await asyncio.sleep(PERIOD_S)
        readings = await scrape.read(asks, targets, now())
    view = await scrape.load_view(targets, 7.0)
    await scrape.close()
    assert readings[BUSY].seen == pytest.approx(ONGOING + QUEUED, rel=0.1)
    assert "no page of metrics is that of proxy p2 (http://127.0.0.1:1/metrics: " in readings[IDLE].missing
    assert (view.at, view.unreachable) == (7.0, ["http://127.0.0.1:1/metrics"])
