"""What Prometheus is asked, how often, and what is made of answers that it should not give."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest
from aiohttp import web

from serve_common.config.autoscaling import AggregationFunction, AutoscalingConfig, AutoscalingQuery
from serve_common.names import BackendTag, HostId, ProxyId
from serve_controller.adapters import prometheus_api, prometheus_source
from serve_controller.adapters.prometheus_api import PrometheusApi, PrometheusUnavailable, QueryRefused
from serve_controller.adapters.prometheus_source import PrometheusSource
from serve_controller.core.autoscaling.values import LoadRequest, LoadSample, Targets
from tests.unit.passing_time import let_pass

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
        self.began_at = 600.0

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
            times = [self.began_at + 5.0 * number for number in range(200)]
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
    monkeypatch.setattr(prometheus_api, "ANSWER_BYTES_MAX", 1000)
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
