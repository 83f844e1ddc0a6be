"""Means over windows from pages that were scraped: what counters, restarts and missing services come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from structlog.testing import capture_logs

from serve_common.config.autoscaling import AggregationFunction, AutoscalingConfig, AutoscalingQuery
from serve_common.names import BackendTag, HostId, ProxyId
from serve_controller.adapters.load_scrape import VIEWED, LoadSources, aggregate_load
from serve_controller.adapters.load_windows import LoadWindows, Sample, parse_page
from serve_controller.core.autoscaling.values import LoadRequest, LoadSample, Targets

NAMES = (
    "serve_proxy_info",
    "serve_host_info",
    "serve_replica_ongoing_seconds_total",
    "serve_router_queued_seconds_total",
    "serve_replica_bus_connected",
)
PROXY, HOST = "http://p/metrics", "http://h/metrics"
WALL = 1_000_000.0
RETENTION_S = 60.0


def page(*lines: str) -> list[Sample]:
    return list(parse_page("\n".join(lines), NAMES))


def proxy_page(queued: float | None, proxy_id: str = "p1", **labels: str) -> list[Sample]:
    more = "".join(f',{name}="{value}"' for name, value in labels.items())
    lines = [f'serve_proxy_info{{proxy_id="{proxy_id}"{more}}} 1.0']
    if queued is not None:
        lines.append(f'serve_router_queued_seconds_total{{backend_tag="a/b"{more}}} {queued}')
    return page(*lines)


def host_page(ongoing: float | None) -> list[Sample]:
    lines = ['serve_host_info{host_id="h1"} 1.0']
    if ongoing is not None:
        lines.append(f'serve_replica_ongoing_seconds_total{{backend_tag="a/b"}} {ongoing}')
    return page(*lines)


def ask(**changes: object) -> LoadRequest:
    fields: dict[str, object] = {
        "backend_tag": BackendTag("a/b"),
        "config": AutoscalingConfig(max_replicas=9),
        "proxies": frozenset({ProxyId("p1")}),
        "hosts": frozenset({HostId("h1")}),
        **changes,
    }
    return LoadRequest(**fields)  # type: ignore[arg-type]  # tests change single fields


def steady(windows: LoadWindows, until: int, *, ongoing: float = 3.0, queued: float = 1.0) -> None:
    """Scrapes every 2 s of a host and a proxy with so many requests, all the time."""
    for at in range(0, until + 1, 2):
        windows.add(HOST, at, host_page(100 + ongoing * at), RETENTION_S)
        windows.add(PROXY, at, proxy_page(50 + queued * at), RETENTION_S)


def read(windows: LoadWindows, at: float, asked: LoadRequest | None = None) -> LoadSample:
    return windows.at(at).sample(asked or ask(), WALL)


def test_a_reading_is_the_mean_over_the_window_of_what_all_services_tell() -> None:
    windows = LoadWindows()
    steady(windows, 60)
    reading = read(windows, 61)
    assert reading.seen == pytest.approx(4.0)
    assert reading.burst == pytest.approx(4.0)
    assert reading.queued == pytest.approx(1.0)
    assert (reading.at, reading.over_s, reading.source) == (WALL - 1, 30.0, "scrape")


def test_a_replica_that_is_on_no_page_makes_the_load_unknown() -> None:
    windows = LoadWindows()
    steady(windows, 30)
    assert read(windows, 31, ask(num_replicas=2)).missing.startswith(
        "0 of 2 replicas are on their hosts' pages"
    )
    for count, is_known in ((1, False), (2, True)):
        line = f'serve_replica_bus_connected{{backend_tag="a/b"}} {count}'
        windows.add(HOST, 31 + count, [*host_page(100 + 3.0 * (31 + count)), *page(line)], RETENTION_S)
        reading = read(windows, 31 + count, ask(num_replicas=2))
        assert (reading.seen is not None) is is_known, reading


def test_a_burst_shows_in_the_short_window_first() -> None:
    windows = LoadWindows()
    steady(windows, 50, queued=0.0, ongoing=0.0)
    for at in range(52, 62, 2):
        windows.add(HOST, at, host_page(100 + 20.0 * (at - 50)), RETENTION_S)
        windows.add(PROXY, at, proxy_page(50), RETENTION_S)
    reading = read(windows, 60)
    assert reading.burst == pytest.approx(20.0)
    assert reading.seen == pytest.approx(20.0 / 3)


def test_two_scrapes_give_a_reading_that_says_over_how_long_it_is() -> None:
    windows = LoadWindows()
    steady(windows, 0)
    assert "only once" in read(windows, 0.5).missing
    steady_on = LoadWindows()
    steady(steady_on, 2)
    reading = read(steady_on, 2)
    assert reading.seen == pytest.approx(4.0)
    assert reading.over_s == 2.0


def test_a_counter_that_begins_anew_counts_from_zero() -> None:
    windows = LoadWindows()
    for at, ongoing in ((0, 1000.0), (10, 1040.0), (20, 8.0), (30, 48.0)):
        windows.add(HOST, at, host_page(ongoing), RETENTION_S)
        windows.add(PROXY, at, proxy_page(0), RETENTION_S)
    reading = read(windows, 30)
    assert reading.seen == pytest.approx((40 + 8 + 40) / 30)


def test_a_counter_that_falls_by_a_rounding_error_did_not_begin_anew() -> None:
    windows = LoadWindows()
    for at, ongoing in ((0, 100_000.0), (15, 100_030.0), (20, 100_029.999), (30, 100_060.0)):
        windows.add(HOST, at, host_page(ongoing), RETENTION_S)
        windows.add(PROXY, at, proxy_page(0), RETENTION_S)
    assert read(windows, 30).seen == pytest.approx(2.0)


def test_a_series_that_is_born_on_a_known_page_counts_from_zero() -> None:
    windows = LoadWindows()
    for at, ongoing in ((0, None), (10, None), (20, None), (30, 45.0)):
        windows.add(HOST, at, host_page(ongoing), RETENTION_S)
        windows.add(PROXY, at, proxy_page(0), RETENTION_S)
    assert read(windows, 30).seen == pytest.approx(1.5)


def test_a_process_that_was_left_out_of_its_page_for_a_moment_is_no_burst() -> None:
    """A parent of proxies leaves out a child that is slow to answer; its counters are those of hours."""
    windows = LoadWindows()
    two = ask(proxies=frozenset({ProxyId("p1"), ProxyId("p2")}), hosts=frozenset())
    first = proxy_page(10.0, process="1")
    windows.add(PROXY, 0, first, RETENTION_S)
    for at in (2, 4, 6):
        second = proxy_page(70_000.0 + at, "p2", process="2")
        windows.add(PROXY, at, [*first, *(second if at != 4 else [])], RETENTION_S)
    windows.add(PROXY, 8, [*first, *proxy_page(70_008.0, "p2", process="2")], RETENTION_S)
    reading = read(windows, 8, two)
    assert reading.seen == pytest.approx(1.0)
    assert reading.over_s == 2.0


def test_an_address_that_somebody_else_has_now_is_no_burst() -> None:
    windows = LoadWindows()
    steady(windows, 10)
    for at in (12, 14):
        other = page(
            'serve_host_info{host_id="h2"} 1',
            f'serve_replica_ongoing_seconds_total{{backend_tag="a/b"}} {90_000 + at}',
        )
        windows.add(HOST, at, other, RETENTION_S)
        windows.add(PROXY, at, proxy_page(50), RETENTION_S)
    reading = read(windows, 14, ask(hosts=frozenset({HostId("h2")})))
    assert (reading.seen, reading.over_s) == (pytest.approx(1.0), 2.0)


def test_backends_that_are_gone_from_a_page_are_forgotten() -> None:
    windows = LoadWindows()
    steady(windows, 20)
    for at in range(22, 400, 2):
        windows.add(HOST, at, host_page(None), RETENTION_S)
        windows.add(PROXY, at, proxy_page(None), RETENTION_S)
    assert read(windows, 398).seen == 0.0
    history = windows._targets[HOST]
    assert (len(history.points[-1].seconds), len(history._counters), len(history._tags)) == (0, 0, 0)


def test_no_series_at_all_is_no_load_where_everybody_was_scraped() -> None:
    windows = LoadWindows()
    for at in (0, 2, 4):
        windows.add(HOST, at, host_page(None), RETENTION_S)
        windows.add(PROXY, at, proxy_page(None), RETENTION_S)
    reading = read(windows, 4)
    assert (reading.seen, reading.burst) == (0.0, 0.0)


def test_who_is_not_found_is_named_and_nothing_is_read() -> None:
    windows = LoadWindows()
    steady(windows, 30)
    reading = read(windows, 30, ask(proxies=frozenset({ProxyId("p1"), ProxyId("p2")})))
    assert reading.seen is None
    assert reading.missing == "no page of metrics is that of proxy p2"
    windows.add_failure("http://other/metrics", "it does not answer within 2 s")
    reading = read(windows, 30, ask(proxies=frozenset({ProxyId("p2")})))
    assert reading.missing.endswith("proxy p2 (http://other/metrics: it does not answer within 2 s)")


def test_who_stopped_answering_is_named_once_its_last_page_is_old() -> None:
    windows = LoadWindows()
    steady(windows, 20)
    for at in (22, 24, 26, 28, 30):
        windows.add(HOST, at, host_page(100 + 3.0 * at), RETENTION_S)
        windows.add_failure(PROXY, "refused")
    assert read(windows, 26).seen == pytest.approx(4.0)
    assert read(windows, 29).missing == "proxy p1 was not scraped for 9 s: refused"


def test_one_that_has_just_begun_need_not_have_been_scraped() -> None:
    windows = LoadWindows()
    steady(windows, 30)
    both = frozenset({ProxyId("p1"), ProxyId("p2")})
    young = ask(proxies=both, started_at={"p2": WALL - 3})
    assert read(windows, 30, young).seen == pytest.approx(4.0)
    old = ask(proxies=both, started_at={"p2": WALL - 30})
    assert read(windows, 30, old).seen is None


def test_a_page_under_two_addresses_counts_once() -> None:
    windows = LoadWindows()
    steady(windows, 30)
    for at in range(0, 31, 2):
        windows.add("http://same-host/metrics", at, host_page(100 + 3.0 * at), RETENTION_S)
    assert read(windows, 30).seen == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("function", "expected"), [(AggregationFunction.MAX, 10.0), (AggregationFunction.MIN, 0.0)]
)
def test_the_largest_and_the_smallest_mean_within_the_window(
    function: AggregationFunction, expected: float
) -> None:
    windows = LoadWindows()
    total = 0.0
    for at in range(31):
        total += 10.0 if 10 < at <= 20 else 0.0
        windows.add(HOST, at, host_page(total), RETENTION_S)
        windows.add(PROXY, at, proxy_page(0), RETENTION_S)
    config = AutoscalingConfig(max_replicas=9, aggregation_function=function)
    assert read(windows, 30, ask(config=config)).seen == pytest.approx(expected)


def test_scrapes_are_thinned_out_and_long_means_stay_right() -> None:
    windows = LoadWindows()
    for at in range(0, 4000, 2):
        windows.add(HOST, at, host_page(5.0 * at), 4500.0)
        windows.add(PROXY, at, proxy_page(0), 4500.0)
    config = AutoscalingConfig(max_replicas=9, look_back_period_s=3600)
    reading = read(windows, 3998, ask(config=config))
    assert reading.seen == pytest.approx(5.0)
    assert reading.over_s == 3600
    assert len(windows._targets[HOST].points) < 200


def test_a_query_cannot_be_read_here() -> None:
    config = AutoscalingConfig(max_replicas=9, query=AutoscalingQuery(promql="vector(1)", target=1))
    reading = read(LoadWindows(), 0, ask(config=config))
    assert reading.missing.startswith("a query needs a Prometheus server")


def test_pages_are_read_with_escapes_times_and_foreign_lines() -> None:
    text = (
        "# HELP serve_proxy_info x\n# TYPE serve_proxy_info gauge\n\n"
        'serve_proxy_info{proxy_id="a\\"b\\\\c\\nd"} 1 1700000000000\n'
        "serve_proxy_info 2\n"
        'serve_proxy_information{proxy_id="no"} 3\n'
        'serve_host_info{host_id="x y}",a="b"} +Inf\n'
    )
    samples = list(parse_page(text, NAMES))
    assert [sample.labels for sample in samples] == [
        {"proxy_id": 'a"b\\c\nd'},
        {},
        {"host_id": "x y}", "a": "b"},
    ]
    assert [sample.value for sample in samples] == [1.0, 2.0, float("inf")]
    with pytest.raises(ValueError, match="could not convert"):
        list(parse_page('serve_host_info{host_id="x"} many', NAMES))


def test_the_view_sums_up_all_pages() -> None:
    first = (
        'serve_proxy_requests_total{endpoint_tag="e",method="GET",code="200"} 5\n'
        'serve_proxy_requests_total{endpoint_tag="e",method="GET",code="503"} 2\n'
        'serve_proxy_request_seconds_bucket{endpoint_tag="e",le="0.1"} 4\n'
        'serve_proxy_request_seconds_bucket{endpoint_tag="e",le="+Inf"} 7\n'
        'serve_proxy_queue_depth{backend_tag="a/b"} 3\n'
    )
    second = first + 'serve_replica_in_flight_requests{backend_tag="a/b"} 8\n'
    view = aggregate_load(9.0, [list(parse_page(text, VIEWED)) for text in (first, second)], ["http://gone"])
    (endpoint,), (backend,) = view.endpoints, view.backends
    assert (endpoint.endpoint_tag, endpoint.requests, endpoint.errors) == ("e", 14.0, 4.0)
    assert endpoint.seconds_buckets == {"0.1": 8.0, "+Inf": 14.0}
    assert (backend.in_flight, backend.queued) == (8.0, 6.0)
    assert (view.at, view.unreachable) == (9.0, ["http://gone"])


# Which source a load is read from: Prometheus, or the services themselves while it lacks something.


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
        self.asked += [load_request.backend_tag for load_request in asks]
        return {
            load_request.backend_tag: self._reading(load_request.backend_tag, now) for load_request in asks
        }

    def _reading(self, tag: BackendTag, now: float) -> LoadSample:
        missing = self.lacks.get(tag, "")
        return LoadSample(at=now, seen=None if missing else 1.0, source=self.name, missing=missing)

    async def close(self) -> None:
        pass


def load_request(tag: BackendTag, query: AutoscalingQuery | None = None) -> LoadRequest:
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
        readings = await self.sources.read(asks or [load_request(A), load_request(B)], NOBODY, self.now)
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
        seen.append((await look(load_request(A)))[0])
    assert set(seen) == {"scrape"}


async def test_what_neither_knows_tells_both_reasons() -> None:
    look = Looks()
    look.prometheus.lacks, look.scrape.lacks = {A: "gone"}, {A: "refused"}
    assert (await look(load_request(A)))[0] == "gone; scraping: refused"


async def test_prometheus_readings_serve_where_the_scrape_has_none_yet() -> None:
    look = Looks()
    look.prometheus.lacks = look.scrape.lacks = {A: "gone"}
    await look(load_request(A))
    look.prometheus.lacks = {}
    assert await look(load_request(A)) == ["prometheus"]


async def test_a_users_query_is_never_scraped() -> None:
    look = Looks()
    look.prometheus.lacks = {A: "the query gives nothing"}
    assert await look(load_request(A, AutoscalingQuery(promql="x", target=1))) == ["the query gives nothing"]
    assert look.scrape.asked == []


async def test_without_prometheus_everything_is_scraped() -> None:
    scrape = Source("scrape")
    readings = await LoadSources(None, scrape).read([load_request(A)], NOBODY, 1.0)
    assert readings[A].source == "scrape"


async def test_each_change_is_logged_once_whichever_backends_are_looked_at() -> None:
    look = Looks()
    with capture_logs() as lines:
        look.prometheus.lacks = {A: "proxy p was not scraped for 20 s"}
        await look()
        await look(load_request(B))
        look.prometheus.lacks = {A: "proxy p was not scraped for 41 s"}
        await look(load_request(A))
        look.prometheus.lacks = {}
        for _ in range(4):
            await look()
    assert [line["event"] for line in lines] == ["prometheus_lacks_loads", "prometheus_has_all_loads"]
    assert lines[0]["reasons"] == {"proxy p was not scraped for # s": 1}
