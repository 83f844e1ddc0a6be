"""What Prometheus is asked, how often, and what is made of answers that it should not give."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest
from aiohttp import web

from serve_common.config.autoscaling import AggregationFunction, AutoscalingConfig, AutoscalingQuery
from serve_common.errors import BadField
from serve_common.names import BackendTag, HostId, ProxyId
from serve_common.runtime.settings import Environment
from serve_controller.adapters import prometheus_api, prometheus_source
from serve_controller.adapters import prometheus_api as promql
from serve_controller.adapters.prometheus_api import PrometheusApi, PrometheusUnavailable, QueryRefused
from serve_controller.adapters.prometheus_coverage import Coverage, Process, Scraped, Window, infer_interval
from serve_controller.adapters.prometheus_source import PrometheusSource
from serve_controller.core.autoscaling.values import LoadRequest, LoadSample, Targets
from serve_controller.settings import check_selector, read_prometheus_settings
from tests.support.waiting import let_pass

AT = 1000.0
NOW = 5000.0
"""By the controller's clock, which is another one."""
Answer = dict[str, object]


def success(kind: str, result: object, **more: object) -> Answer:
    return {"status": "success", "data": {"resultType": kind, "result": result}, **more}


class FakePrometheus:
    """Answers what a server would whose services bear a steady load, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.answers: dict[str, Answer | str | Callable[[], Awaitable[None]]] = {}
        """By a part of the query: what is answered instead."""
        self.scraped_until = AT - 2
        self.started_at = 600.0

    async def handle(self, request: web.Request) -> web.Response:
        form = await request.post()
        query = str(form["query"])
        self.asked.append(query)
        self.headers.append(dict(request.headers))
        self.paths.append(request.path)
        for part, answer in self.answers.items():
            if part in query:
                if callable(answer):
                    await answer()
                elif isinstance(answer, str):
                    return web.Response(text=answer, status=200)
                else:
                    return web.json_response(answer, status=200 if answer["status"] == "success" else 422)
        return web.json_response(self.answer(query))

    def answer(self, query: str) -> Answer:
        if query == "time()":
            return success("scalar", [AT, str(AT)])
        if query.startswith(("serve_proxy_info", "serve_host_info")):
            label = "proxy_id" if "proxy" in query else "host_id"
            times = [self.started_at + 5.0 * number for number in range(200)]
            values = [[time, "1"] for time in times if AT - 300 < time <= self.scraped_until]
            metric = {label: "p1" if "proxy" in query else "h1", "job": "j", "instance": "i"}
            return success("matrix", [{"metric": metric, "values": values}])
        load = "2" if "queued" in query else "5"
        return success("vector", [{"metric": {"backend_tag": "busy"}, "value": [AT, load]}])


@pytest.fixture
def fake() -> FakePrometheus:
    return FakePrometheus()


@pytest.fixture
async def url(fake: FakePrometheus) -> AsyncIterator[str]:
    application = web.Application()
    application.add_routes([web.post("/{path:.*}", fake.handle)])
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.fixture
async def api(url: str) -> AsyncIterator[PrometheusApi]:
    api = PrometheusApi(f"http://{url}")
    yield api
    await api.close()


@pytest.fixture
def source(api: PrometheusApi) -> PrometheusSource:
    return PrometheusSource(api, 'cluster="a"')


def ask(tag: str = "busy", **config: object) -> LoadRequest:
    return LoadRequest(
        backend_tag=BackendTag(tag),
        config=AutoscalingConfig(max_replicas=9, **config),  # type: ignore[arg-type]  # tests change single fields
        proxies=frozenset({ProxyId("p1")}),
        hosts=frozenset({HostId("h1")}),
    )


async def read(source: PrometheusSource, *asks: LoadRequest) -> list[LoadSample]:
    return list((await source.read(asks, Targets(urls=frozenset()), NOW)).values())


async def test_a_reading_is_dated_by_the_age_that_its_scrapes_have_for_prometheus(
    source: PrometheusSource,
) -> None:
    (reading,) = await read(source, ask())
    assert (reading.seen, reading.queued, reading.burst) == (7.0, 2.0, 7.0)
    assert reading.at == NOW - 5.0
    assert reading.missing == ""


async def test_thousands_of_backends_cost_as_many_queries_as_one(
    source: PrometheusSource, fake: FakePrometheus
) -> None:
    readings = await read(source, *(ask(f"b{number}") for number in range(3000)), ask())
    assert [reading.seen for reading in readings] == [0.0] * 3000 + [7.0]
    # The clock, both kinds of processes, and two counters over the look-back period and the panic window.
    assert len(fake.asked) == 7
    assert all('cluster="a"' in query for query in fake.asked[1:])


async def test_a_replica_that_is_on_no_page_makes_the_load_unknown(
    source: PrometheusSource, fake: FakePrometheus
) -> None:
    known = {"metric": {"backend_tag": "busy"}, "value": [AT, "2"]}
    fake.answers["serve_replica_bus_connected"] = success("vector", [known])
    two, three = ask(), ask()
    two = msgspec.structs.replace(two, num_replicas=2)
    three = msgspec.structs.replace(three, num_replicas=3)
    (reading,) = await read(source, two)
    assert reading.seen == 7.0
    (reading,) = await read(source, three)
    assert reading.missing.startswith("2 of 3 replicas are on their hosts' pages of metrics")


async def test_other_windows_and_aggregations_cost_queries_of_their_own(
    source: PrometheusSource, fake: FakePrometheus
) -> None:
    await read(source, ask(), ask("longer", look_back_period_s=60.0))
    assert len(fake.asked) == 9
    fake.asked.clear()
    await read(source, ask("most", aggregation_function=AggregationFunction.MAX, panic_threshold=0))
    assert sum("max_over_time" in query for query in fake.asked) == 1


async def test_the_same_query_of_two_backends_is_asked_once(
    source: PrometheusSource, fake: FakePrometheus
) -> None:
    query = AutoscalingQuery(promql="sum(queue_length)", target=1.0)
    readings = await read(source, ask("a", query=query), ask("b", query=query))
    assert [reading.seen for reading in readings] == [5.0, 5.0]
    assert fake.asked.count("sum(queue_length)") == 1


async def test_a_query_says_nothing_while_prometheus_had_seen_nothing_for_a_while(
    source: PrometheusSource, fake: FakePrometheus
) -> None:
    fake.scraped_until = AT - 40
    loads, queried = await read(
        source, ask(), ask("a", query=AutoscalingQuery(promql="up", target=1.0), look_back_period_s=60)
    )
    assert loads.missing == "proxy p1 was not scraped for 40 s"
    assert queried.missing == "Prometheus has scraped nothing for 40 s"


async def test_a_look_that_fails_says_why_for_every_backend(
    source: PrometheusSource, fake: FakePrometheus
) -> None:
    fake.answers["rate("] = {"status": "error", "errorType": "execution", "error": "too many samples"}
    first, second = await read(source, ask(), ask("idle"))
    assert first.missing == second.missing == "Prometheus: execution: too many samples"
    fake.answers = {"time()": "<html>a proxy's login page</html>"}
    (reading,) = await read(source, ask())
    assert reading.missing.endswith("answers with status 200, and not as Prometheus does")


async def test_an_answer_with_a_warning_is_a_part_of_an_answer(
    api: PrometheusApi, fake: FakePrometheus
) -> None:
    """Thanos answers with what it could reach, and warns."""
    vector = [{"metric": {}, "value": [AT, "1"]}]
    fake.answers["x"] = success("vector", vector, warnings=["store 2 is unreachable"])
    with pytest.raises(QueryRefused, match="it warns: store 2 is unreachable"):
        await api.number("x", AT)
    fake.answers["x"] = success("vector", vector, infos=["metric might not be a counter"])
    assert await api.number("x", AT) == 1.0


async def test_an_answer_that_is_too_long_or_too_late_is_given_up(
    api: PrometheusApi, fake: FakePrometheus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus_api, "RESPONSE_BYTES_MAX", 1000)
    fake.answers["x"] = "1" * 2000
    with pytest.raises(PrometheusUnavailable, match="more than 1000 bytes"):
        await api.number("x", AT)
    monkeypatch.setattr(prometheus_api, "TIMEOUT_S", 0.05)

    async def never() -> None:
        await asyncio.Event().wait()

    fake.answers["x"] = never
    with pytest.raises(PrometheusUnavailable, match=r"does not answer within 0\.05 s"):
        await api.number("x", AT)


async def test_a_server_that_hangs_is_let_rest_so_that_looks_go_on(
    source: PrometheusSource, fake: FakePrometheus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus_api, "TIMEOUT_S", 30.0)
    monkeypatch.setattr(prometheus_source, "_LOADS_DEADLINE_S", 60.0)
    monkeypatch.setattr(prometheus_source, "_BACKOFF_S", 3600.0)
    is_asked = asyncio.Event()

    async def never() -> None:
        is_asked.set()
        await asyncio.Event().wait()

    fake.answers["time()"] = never
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(read(source, ask()))
        async with asyncio.timeout(20):
            await is_asked.wait()
        let_pass(30.0)
    (first,) = reading.result()
    (second,) = await read(source, ask())
    assert "does not answer within" in first.missing
    assert second.missing == first.missing
    assert len(fake.asked) == 1
    fake.answers.clear()
    let_pass(3600.0)
    assert (await read(source, ask()))[0].seen == 7.0


async def test_a_histogram_is_no_number(api: PrometheusApi, fake: FakePrometheus) -> None:
    fake.answers["x"] = success("vector", [{"metric": {}, "histogram": [AT, {"count": "1"}]}])
    with pytest.raises(QueryRefused, match="a histogram instead of a number"):
        await api.number("x", AT)


async def test_credentials_and_a_path_are_used_and_never_shown(url: str, fake: FakePrometheus) -> None:
    api = PrometheusApi(f"http://me:secret@{url}/prometheus/")
    await api.time()
    await api.close()
    assert fake.paths == ["/prometheus/api/v1/query"]
    assert fake.headers[0]["Authorization"] == f"Basic {base64.b64encode(b'me:secret').decode()}"
    assert "secret" not in api.shown
    bearer = PrometheusApi(f"http://{url}", "token")
    await bearer.time()
    await bearer.close()
    assert fake.headers[1]["Authorization"] == "Bearer token"


async def test_a_server_that_is_not_there_is_named_without_its_password() -> None:
    api = PrometheusApi("http://me:secret@127.0.0.1:1")
    with pytest.raises(PrometheusUnavailable, match=r"127\.0\.0\.1:1") as away:
        await api.time()
    await api.close()
    assert "secret" not in str(away.value)


# Over which windows Prometheus may be believed: who was scraped, since when, and how often.


P1, P2, H1 = Process("proxy", "p1"), Process("proxy", "p2"), Process("host", "h1")
SCRAPED_AT = 1000.0


def every(interval_s: float, first: float, last: float, target: str = "proxy 10.0.0.1:9102") -> Scraped:
    count = int((last - first) / interval_s) + 1
    return Scraped([first + interval_s * number for number in range(count)], target)


def window(
    processes: dict[Process, list[Scraped]],
    wanted_s: float = 30.0,
    started_at: dict[str, float] | None = None,
    counts: dict[float, dict[Process, int]] | None = None,
) -> Window | str:
    coverage = Coverage(SCRAPED_AT, 300.0, processes, counts)
    return coverage.window(wanted_s, [P1, H1], started_at or {})


STEADY = {P1: [every(5, 703, 998)], H1: [every(5, 702, 997)]}


def test_what_all_are_scraped_for_is_asked_about_as_it_was_wanted() -> None:
    assert window(STEADY) == Window(30.0, 997.0)


def test_a_window_that_two_scrapes_do_not_fit_into_is_widened() -> None:
    assert window(STEADY, wanted_s=10.0) == Window(12.5, 997.0)
    slow = {P1: [every(60, 700, 1000)], H1: [every(60, 690, 990)]}
    assert window(slow) == Window(150.0, 990.0)


def test_the_interval_is_learned_from_the_slowest_whatever_failed_between() -> None:
    assert infer_interval([[0, 5, 10, 15, 40, 45], [0, 10, 20, 30]]) == 10
    assert infer_interval([[7.0], []]) is None


def test_after_a_break_the_window_begins_when_prometheus_saw_again() -> None:
    """Otherwise the rate over 30 s would be that of the seconds since its restart, divided by 30."""
    restarted = {
        P1: [Scraped([*every(5, 700, 930).times, *every(5, 988, 998).times])],
        H1: [every(5, 702, 997)],
    }
    assert window(restarted) == Window(15.0, 997.0)
    once = {P1: [Scraped([*every(5, 700, 930).times, 998.0])], H1: [every(5, 702, 997)]}
    assert window(once) == "proxy p1 was scraped only once in the last 5 s"


def test_a_scrape_or_two_that_failed_are_no_break() -> None:
    failed = {
        P1: [Scraped([*every(5, 700, 975).times, *every(5, 990, 1000).times])],
        H1: [every(5, 702, 997)],
    }
    assert window(failed) == Window(30.0, 997.0)


def test_who_is_missing_or_stale_is_named() -> None:
    assert window({H1: [every(5, 702, 997)]}) == "proxy p1 was not scraped by Prometheus"
    stale = {P1: [every(5, 700, 980)], H1: [every(5, 702, 997)]}
    assert window(stale) == "proxy p1 was not scraped for 20 s"


def test_who_has_just_begun_need_not_have_been_seen_before() -> None:
    born = {P1: [every(5, 988, 998)], H1: [every(5, 702, 997)]}
    assert window(born, started_at={"p1": 985.0}) == Window(30.0, 997.0)
    assert window(born, started_at={"p1": 900.0}) == Window(15.0, 997.0)
    assert window({H1: STEADY[H1]}, started_at={"p1": 995.0}) == Window(30.0, 997.0)


def test_a_process_that_two_jobs_scrape_would_count_double() -> None:
    twice = {P1: [every(5, 700, 998, "a x"), every(5, 701, 999, "b x")], H1: [every(5, 702, 997)]}
    assert window(twice) == (
        "proxy p1 is scraped twice, as a x and b x; MUSTER_PROMETHEUS_SELECTOR can choose one"
    )
    moved = {P1: [every(5, 700, 960, "a x"), every(5, 965, 1000, "a y")], H1: [every(5, 702, 997)]}
    assert window(moved) == Window(30.0, 997.0)


def test_long_windows_are_judged_by_the_number_of_scrapes() -> None:
    full = {600.0: {P1: 118, H1: 120}}
    assert window(STEADY, 600.0, counts=full) == Window(600.0, 997.0)
    half = {600.0: {P1: 80, H1: 120}}
    assert window(STEADY, 600.0, counts=half) == Window(400.0, 997.0)


def test_a_time_in_which_nothing_was_scraped_is_found() -> None:
    assert Coverage(SCRAPED_AT, 300.0, STEADY).last_break() is None
    down = {P1: [Scraped([*every(5, 700, 900).times, *every(5, 960, 1000).times])]}
    assert Coverage(SCRAPED_AT, 300.0, down).last_break() == (900.0, 960.0)
    assert Coverage(SCRAPED_AT + 60, 300.0, down).last_break() == (1000.0, SCRAPED_AT + 60)
    one_was_away = {**STEADY, P2: [Scraped([700.0, 705.0, 900.0])]}
    assert Coverage(SCRAPED_AT, 300.0, one_was_away).last_break() is None


def test_nothing_scraped_twice_gives_no_window() -> None:
    once = {P1: [Scraped([998.0])], H1: [Scraped([997.0])]}
    assert window(once) == "Prometheus has not scraped any proxy or host twice so far"


@pytest.mark.parametrize(
    ("text", "matchers"),
    [
        ("", ""),
        ("{}", ""),
        ('{cluster="a"}', 'cluster="a"'),
        ('cluster="a", env=~"x|y",', 'cluster="a", env=~"x|y"'),
        ('{name!="with \\" quote}"}', 'name!="with \\" quote}"'),
    ],
)
def test_label_matchers_are_taken_with_and_without_braces(text: str, matchers: str) -> None:
    assert check_selector(text, "SELECTOR") == matchers


@pytest.mark.parametrize(
    "text", ["cluster", '{cluster="a"}) or vector(1', 'a="b" c="d"', '{1a="b"}', '{a="b}']
)
def test_what_is_no_label_matcher_is_refused(text: str) -> None:
    with pytest.raises(BadField, match="SELECTOR"):
        check_selector(text, "SELECTOR")


def test_the_settings_name_a_server_or_none() -> None:
    assert read_prometheus_settings(Environment({})) is None
    settings = read_prometheus_settings(
        Environment({"MUSTER_PROMETHEUS_URL": "https://u:p@prom/x", "MUSTER_PROMETHEUS_TOKEN": "secret"})
    )
    assert settings is not None
    assert settings.token == "secret"
    assert "secret" not in repr(settings)
    assert "u:p" not in repr(settings)
    with pytest.raises(BadField, match="MUSTER_PROMETHEUS_URL"):
        read_prometheus_settings(Environment({"MUSTER_PROMETHEUS_URL": "prometheus:9090"}))


def test_placeholders_are_replaced_and_fit_for_strings() -> None:
    query = 'sum(rate(x{b="$backend_tag", d=~"$deployment$"}[$look_back])) > $backend_tags'
    replaced = promql.with_placeholders(query, BackendTag("app/model"), 1.5)
    assert replaced == 'sum(rate(x{b="app/model", d=~"model$"}[1500ms])) > $backend_tags'
    assert promql.with_placeholders("'$backend_tag'", BackendTag("a'b\\\n"), 1) == r"'a\'b\\\n'"


def test_queries_bear_the_selector() -> None:
    assert promql.get_mean("x_total", 'c="a"', 30) == 'sum by (backend_tag) (rate(x_total{c="a"}[30s]))'
    extreme = promql.get_extreme(AggregationFunction.MAX, "", window_s=30, inner_s=12.5, step_s=5)
    assert extreme.startswith(
        "max_over_time((sum by (backend_tag) (label_replace(sum by (backend_tag) (rate("
    )
    assert extreme.endswith(")[30s:5s])")
