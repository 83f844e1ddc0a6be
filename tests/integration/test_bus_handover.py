"""A bus connection that logs in anew while messages go both ways: none is lost, doubled or overtaken."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from serve_common.nats.connection import BusConnection
from serve_common.nats.options import BusOptions

from .test_bus_connection import NatsServer

_LIMIT_S = 60.0
_RENEWALS = 30


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path)
    server.start()
    yield server
    server.kill()


@asynccontextmanager
async def connected(server: NatsServer, *, is_shared: bool = False) -> AsyncIterator[BusConnection]:
    options = BusOptions(
        servers=[server.url],
        user="app",
        password="app-secret",
        inbox_prefix="_INBOX_app",
        is_shared=is_shared,
    )
    connection = BusConnection(options, random.Random(0))
    await connection.connect(_LIMIT_S)
    try:
        yield connection
    finally:
        await connection.close()


@pytest.mark.parametrize("is_shared", [False, True])
async def test_renewals_lose_double_and_reorder_nothing(server: NatsServer, *, is_shared: bool) -> None:
    """Two peers count towards each other as fast as they can, in bursts, while one of them renews."""
    heard_here: list[int] = []
    heard_there: list[int] = []
    async with connected(server, is_shared=is_shared) as here, connected(server) as there:
        here.subscribe("t.here.>", lambda _s, _r, payload, _h: heard_here.append(int(payload)))
        here.subscribe("t.queue", lambda _s, _r, payload, _h: heard_here.append(int(payload)), queue="group")
        there.subscribe("t.there", lambda _s, _r, payload, _h: heard_there.append(int(payload)))
        await here.flush(_LIMIT_S)
        await there.flush(_LIMIT_S)
        losses = 0

        def lost() -> None:
            nonlocal losses
            losses += 1

        here.on_disconnected.append(lost)
        is_over = False
        sent = 0

        async def talk() -> None:
            nonlocal sent
            while not is_over:
                for _ in range(20):
                    there.publish("t.here.x", b"%d" % sent)
                    here.publish("t.there", b"%d" % sent)
                    sent += 1
                await asyncio.sleep(0)

        async with asyncio.timeout(_LIMIT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(talk())
            for _ in range(_RENEWALS):
                before = sent
                assert await here.renew()
                while sent < before + 200:  # noqa: ASYNC110 - the other task tells nobody
                    await asyncio.sleep(0)
            is_over = True
        await there.flush(_LIMIT_S)
        await here.flush(_LIMIT_S)
        await there.flush(_LIMIT_S)
        async with asyncio.timeout(_LIMIT_S):
            while len(heard_here) < sent or len(heard_there) < sent:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        assert heard_here == list(range(sent))
        assert heard_there == list(range(sent))
        assert losses == 0
        assert here.reconnects == 0


async def test_what_is_subscribed_meanwhile_is_heard_and_what_was_ended_is_not(server: NatsServer) -> None:
    heard: list[bytes] = []
    async with connected(server) as here, connected(server) as there:
        ended = here.subscribe("t.ended", lambda _s, _r, payload, _h: heard.append(payload))
        async with asyncio.timeout(_LIMIT_S), asyncio.TaskGroup() as tasks:
            renewing = tasks.create_task(here.renew())
            await asyncio.sleep(0)
            ended.unsubscribe()
            here.subscribe("t.begun", lambda _s, _r, payload, _h: heard.append(payload))
        assert renewing.result()
        await here.flush(_LIMIT_S)
        there.publish("t.ended", b"ended")
        there.publish("t.begun", b"begun")
        await there.flush(_LIMIT_S)
        await here.flush(_LIMIT_S)
        assert heard == [b"begun"]


async def test_a_renewal_that_is_refused_leaves_the_old_link_in_use(server: NatsServer) -> None:
    async with connected(server) as here:
        heard = asyncio.Event()
        here.subscribe("t.x", lambda *_: heard.set())
        await here.flush(_LIMIT_S)
        server.send(signal.SIGSTOP)
        assert not await asyncio.wait_for(here.renew(), _LIMIT_S)
        server.send(signal.SIGCONT)
        here.publish("t.x", b"")
        await asyncio.wait_for(heard.wait(), _LIMIT_S)
        assert here.reconnects == 0
