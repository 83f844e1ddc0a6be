"""What is made of a NATS server's monitoring pages, also of those that are odd, late, or of something else."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from serve_common.errors import BadField
from serve_common.runtime.operations import metrics_page
from serve_common.runtime.settings import Environment
from serve_common.runtime.tasks import TaskOwner
from serve_common.telemetry.catalogue import get_spec
from serve_common.telemetry.catalogue.nats_servers import NATS_METRICS
from serve_controller.adapters.nats_monitor import (
    PAGE_BYTES_MAX,
    RETENTION_S,
    NatsMonitorReader,
    NatsServersCollector,
)
from serve_controller.settings import NATS_SERVERS_MAX, read_nats_monitors

Answer = bytes | Callable[[web.Request], Awaitable[web.StreamResponse]]
Shown = dict[tuple[str, str], float]

VARZ = {
    "server_id": "NAFV2WTJ",
    "max_connections": 4096,
    "jetstream": {
        "config": {"max_memory": 67108864, "max_storage": 2147483648},
        "stats": {"memory": 0, "storage": 5000, "api": {"level": 5, "total": 70, "errors": 3}},
    },
    "start": "2026-01-02T03:04:05.173591306Z",
    "mem": 15228928,
    "cores": 4,
    "gomaxprocs": 2,
    "cpu": 150.5,
    "connections": 7,
    "total_connections": 12,
    "in_msgs": 100,
    "in_bytes": 1000,
    "out_msgs": 200,
    "out_bytes": 2**53,
    "slow_consumers": 2,
    "stale_connections": 1,
    "stalled_clients": 4,
    "subscriptions": 68,
}
JSZ = {"server_id": "NAFV2WTJ", "streams": 2, "consumers": 5}
WELL = b'{"status":"ok"}'


class FakeServer:
    """A monitoring port that answers as it is told, and counts what it is asked."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {
            "varz": json.dumps(VARZ).encode(),
            "jsz": json.dumps(JSZ).encode(),
            "healthz": WELL,
        }
        self.asked: Counter[str] = Counter()
        self.url = ""
        self._asked_anew = asyncio.Condition()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        async with self._asked_anew:
            self.asked[request.match_info["page"]] += 1
            self._asked_anew.notify_all()
        answer = self.answers[request.match_info["page"]]
        return web.Response(body=answer) if isinstance(answer, bytes) else await answer(request)

    async def until_read(self) -> None:
        """Until a round was made that began later than now: the one after it has begun.

        One more, because aiohttp asks once more when it is cut off.
        """
        async with asyncio.timeout(20), self._asked_anew:
            end = self.asked["varz"] + 3
            await self._asked_anew.wait_for(lambda: self.asked["varz"] >= end)


@asynccontextmanager
async def listening(fake: FakeServer) -> AsyncIterator[None]:
    application = web.Application()
    application.add_routes([web.get("/{page}", fake.handle)])
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield
    await runner.cleanup()


@pytest.fixture
async def fake() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    async with listening(fake):
        yield fake


class Rig:
    """A reader that reads without pause, and what is shown of it."""

    def __init__(self, urls: Sequence[str], timeout_s: float) -> None:
        self.leads = True
        self.looked = asyncio.Event()
        """Somebody wanted to know whether it leads."""
        self.now = 1_000.0
        names = ",".join(urls)
        self.reader = NatsMonitorReader(
            read_nats_monitors(Environment({"MUSTER_NATS_MONITOR_URL": names})),
            leads=self._leads,
            clock=lambda: self.now,
            period_s=0.001,
            timeout_s=timeout_s,
        )
        self._registry = CollectorRegistry()
        self._registry.register(NatsServersCollector(self.reader.samples))

    def _leads(self) -> bool:
        self.looked.set()
        return self.leads

    @property
    def shown(self) -> Shown:
        """Values by metric and server."""
        text = metrics_page(self._registry, ()).decode()
        families = text_string_to_metric_families(text)
        return {
            (sample.name, sample.labels["server"]): sample.value
            for family in families
            for sample in family.samples
        }

    def of(self, fake: FakeServer) -> dict[str, float]:
        """Values by metric."""
        server = fake.url.removeprefix("http://")
        return {name: value for (name, of), value in self.shown.items() if of == server}


@asynccontextmanager
async def reading(*fakes: FakeServer, timeout_s: float = 20.0) -> AsyncIterator[Rig]:
    rig = Rig([fake.url for fake in fakes], timeout_s)
    tasks = TaskOwner("test")
    task = tasks.start(rig.reader.run(), "reader")
    try:
        yield rig
        assert not task.is_done
    finally:
        await tasks.close(timeout_s=5.0)


async def test_an_ordinary_answer_gives_every_metric_of_the_catalogue(fake: FakeServer) -> None:
    async with reading(fake) as rig:
        await fake.until_read()
        shown = rig.of(fake)
    assert shown == {
        "serve_nats_up": 1,
        "serve_nats_healthy": 1,
        "serve_nats_start_time_seconds": 1767323045.173591,
        "serve_nats_connections": 7,
        "serve_nats_connections_limit": 4096,
        "serve_nats_connections_opened_total": 12,
        "serve_nats_subscriptions": 68,
        "serve_nats_slow_consumers_total": 2,
        "serve_nats_stale_connections_total": 1,
        "serve_nats_stalled_clients_total": 4,
        "serve_nats_received_messages_total": 100,
        "serve_nats_sent_messages_total": 200,
        "serve_nats_received_bytes_total": 1000,
        "serve_nats_sent_bytes_total": 2**53,
        "serve_nats_memory_bytes": 15228928,
        "serve_nats_cpus_used": 1.505,
        "serve_nats_cpus": 2,
        "serve_nats_jetstream_storage_bytes": 5000,
        "serve_nats_jetstream_storage_limit_bytes": 2147483648,
        "serve_nats_jetstream_memory_bytes": 0,
        "serve_nats_jetstream_memory_limit_bytes": 67108864,
        "serve_nats_jetstream_api_requests_total": 70,
        "serve_nats_jetstream_api_errors_total": 3,
        "serve_nats_jetstream_streams": 2,
        "serve_nats_jetstream_consumers": 5,
    }
    assert set(shown) == {spec.name for spec in NATS_METRICS}
    assert all(get_spec(name) is not None for name in shown)


async def test_what_a_server_does_not_tell_or_tells_oddly_is_absent_and_nothing_else(
    fake: FakeServer,
) -> None:
    fake.answers["varz"] = json.dumps(
        {
            "server_id": "N",
            "connections": "many",
            "max_connections": -1,
            "slow_consumers": -3,
            "subscriptions": True,
            "in_msgs": 10**400,
            "out_msgs": {"a": 1},
            "mem": 17,
            "start": "yesterday",
            "jetstream": {"config": {"max_storage": 0}, "stats": []},
        }
    ).encode()
    fake.answers["jsz"] = b'{"server_id": "N", "disabled": true, "streams": 0}'
    async with reading(fake) as rig:
        await fake.until_read()
        assert rig.of(fake) == {"serve_nats_up": 1, "serve_nats_healthy": 1, "serve_nats_memory_bytes": 17}


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:  # until the reader has enough of it
        try:
            await response.write(b" " * PAGE_BYTES_MAX)
        except ConnectionError:
            return response


async def redirect(_request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("/elsewhere")


async def cut_off(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def failing(_request: web.Request) -> web.StreamResponse:
    return web.Response(status=500, body=json.dumps(VARZ).encode())


ODD: dict[str, Answer] = {
    "nothing": b"",
    "no JSON": b"<html>ok</html>",
    "no text": b"\xff\xfe{",
    "half of it": json.dumps(VARZ).encode()[:200],
    "no object": b"[1, 2]",
    "another one's": b'{"slow_consumers": 1}',
    "deeper than anybody reads": b'{"server_id": "N", "a": ' + b"[" * 200_000,
    "too long": b" " * PAGE_BYTES_MAX + json.dumps(VARZ).encode(),
    "without end": endless,
    "elsewhere": redirect,
    "a cut connection": cut_off,
    "a fault": failing,
}


@pytest.mark.parametrize("answer", ODD.values(), ids=list(ODD))
async def test_a_server_that_answers_oddly_is_down_and_shows_nothing_of_before(
    fake: FakeServer, answer: Answer
) -> None:
    good = fake.answers["varz"]
    async with reading(fake) as rig:
        await fake.until_read()
        assert rig.of(fake)["serve_nats_connections"] == 7
        fake.answers["varz"] = answer
        await fake.until_read()
        assert rig.of(fake) == {"serve_nats_up": 0}
        fake.answers["varz"] = good
        await fake.until_read()
        assert rig.of(fake)["serve_nats_connections"] == 7
    assert fake.asked["elsewhere"] == 0


async def test_a_server_that_does_not_answer_is_down_and_the_others_are_shown(fake: FakeServer) -> None:
    held = asyncio.Event()

    async def hang(_request: web.Request) -> web.StreamResponse:
        await held.wait()
        return web.Response()

    hanging = FakeServer()
    hanging.answers["varz"] = hang
    async with listening(hanging), reading(fake, hanging, timeout_s=0.5) as rig:
        async with asyncio.timeout(20):
            while rig.of(fake).get("serve_nats_up") != 1:  # a slow machine may not answer in time either
                await fake.until_read()
        assert rig.of(hanging) == {"serve_nats_up": 0}
        held.set()


async def test_nobody_listens_there(fake: FakeServer) -> None:
    gone = FakeServer()
    async with listening(gone):
        pass
    async with reading(fake, gone) as rig:
        await fake.until_read()
        assert rig.of(gone) == {"serve_nats_up": 0}


async def test_a_server_that_says_it_is_not_well_is_still_shown(fake: FakeServer) -> None:
    async def unwell(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "unavailable", "error": "JetStream is not there"}, status=503)

    fake.answers["healthz"] = unwell
    fake.answers["jsz"] = b"?"
    async with reading(fake) as rig:
        await fake.until_read()
        shown = rig.of(fake)
    assert (shown["serve_nats_up"], shown["serve_nats_healthy"], shown["serve_nats_connections"]) == (1, 0, 7)
    assert "serve_nats_jetstream_streams" not in shown


async def test_only_who_leads_asks_and_shows(fake: FakeServer) -> None:
    async with reading(fake) as rig:
        await fake.until_read()
        rig.leads = False
        assert rig.shown == {}
        asked = []
        for _ in range(4):
            rig.looked.clear()
            await rig.looked.wait()
            asked.append(fake.asked["varz"])
        assert asked[1] == asked[-1]  # a round may have been on its way
        assert rig.shown == {}
        rig.leads = True
        await fake.until_read()
        assert rig.of(fake)["serve_nats_up"] == 1


async def test_what_was_read_long_ago_is_not_shown(fake: FakeServer) -> None:
    held = asyncio.Event()
    async with reading(fake) as rig:
        await fake.until_read()

        async def hang(_request: web.Request) -> web.StreamResponse:
            await held.wait()
            return web.Response()

        fake.answers["varz"] = hang
        rig.now += RETENTION_S
        assert rig.of(fake)["serve_nats_up"] == 1
        rig.now += RETENTION_S
        assert rig.shown == {}
        held.set()


async def test_without_servers_nothing_runs() -> None:
    rig = Rig([], timeout_s=1.0)
    await rig.reader.run()
    assert rig.shown == {}


def monitors(text: str) -> list[tuple[str, str]]:
    return list(read_nats_monitors(Environment({"MUSTER_NATS_MONITOR_URL": text})).items())


def test_each_server_is_named_by_host_and_port() -> None:
    assert monitors("") == []
    assert monitors(" http://nats:8222 , ,https://u:secret@a.example/nats,http://[::1]:8222/") == [
        ("nats:8222", "http://nats:8222"),
        ("a.example:443", "https://u:secret@a.example/nats"),
        ("[::1]:8222", "http://[::1]:8222/"),
    ]


NONSENSE = (
    *(
        "nats:8222",
        "nats://nats:4222",
        "http://",
        "http://:8222",
        "http://a:b",
        "http://a:99999",
        "http://a b:1",
    ),
    *("http://[::1", "http://a/?x=1", "http://a/#x", "http://a:8222,http://a:8222/other"),
    ",".join(f"http://n{number}:8222" for number in range(NATS_SERVERS_MAX)),
)


@pytest.mark.parametrize("text", NONSENSE)
def test_other_addresses_are_refused_without_showing_them(text: str) -> None:
    with pytest.raises(BadField) as caught:
        monitors(f"http://u:secret@ok:1,{text}")
    assert caught.value.field == "MUSTER_NATS_MONITOR_URL"
    assert "secret" not in str(caught.value)
