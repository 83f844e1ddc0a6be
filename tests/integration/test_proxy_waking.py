"""Requests for a backend that was scaled to zero, through a real proxy and a real nats-server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from serve_common.names import BackendTag
from serve_common.protocol.reports import Wake
from tests.integration.nats_server import until_known
from tests.integration.proxy_stack import MIB, R0, TAG, NatsServer, Stack, running_stack

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path)
    server.start()
    yield server
    server.close()


class Wakes:
    """What a controller would hear, and when."""

    def __init__(self) -> None:
        self.heard: list[tuple[float, Wake]] = []
        self._came = asyncio.Event()

    async def hear(self, message) -> None:
        wake = msgspec.json.decode(message.data, type=Wake)
        assert message.subject == f"serve.wake.{TAG.replace('/', '.')}"
        assert wake.backend_tag == TAG
        self.heard.append((asyncio.get_running_loop().time(), wake))
        self._came.set()

    async def wait(self, count: int, waiting: int = 1) -> None:
        """Until so many were heard and the last one tells of ``waiting`` requests."""
        async with asyncio.timeout(30):
            while len(self.heard) < count or self.heard[-1][1].waiting < waiting:
                self._came.clear()
                await self._came.wait()


@pytest.fixture
async def stack(server: NatsServer) -> AsyncIterator[Stack]:
    async with running_stack(server) as stack:
        await stack.serve(can_wake=True)
        yield stack


@pytest.fixture
async def wakes(stack: Stack) -> Wakes:
    wakes = Wakes()
    await stack.client.subscribe(stack.subjects.wakes, cb=wakes.hear)
    await until_known(stack.client)
    return wakes


@pytest.fixture
async def group() -> AsyncIterator[asyncio.TaskGroup]:
    async with asyncio.TaskGroup() as group:
        yield group


async def all_heard(stack: Stack) -> None:
    """Until what the proxy has said is with who listens: answers to requests come on another connection."""
    await stack.proxy._bus.flush(20)
    await until_known(stack.client)


async def upload(pieces: int) -> AsyncIterator[bytes]:
    for _ in range(pieces):
        yield bytes(MIB)


async def test_a_hundred_first_requests_of_every_kind_are_held_and_all_served(
    stack: Stack, wakes: Wakes, group: asyncio.TaskGroup
) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    first = group.create_task(stack.get("/echo", "POST", data=b"first"))
    await wakes.wait(1)
    assert wakes.heard[0][1].waiting == 1

    requests = [first]
    requests += [group.create_task(stack.get("/echo", "POST", data=b"%d" % i)) for i in range(96)]
    large = group.create_task(stack.get("/echo/sink", "POST", data=upload(5)))
    plain = group.create_task(stack.client.request("serve.call.default.echo", b"by NATS", timeout=30))
    socket = group.create_task(stack.session.ws_connect(stack.url + "/echo/ws"))
    await stack.queued(100)
    await wakes.wait(3, 100)  # at once, of those that came with it, and again after a second
    assert wakes.heard[2][0] - began > 0.9

    router = stack.proxy._ingress.routes.routers[BackendTag(TAG)]
    now = stack.proxy._ingress.routes.now
    async with asyncio.timeout(30):
        while router.queued_seconds(now()) <= 50:  # a hundred for about half a second  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await stack.add_replica(R0)
    await stack.put_backend(R0)
    answers = [await request for request in requests]
    assert {status for status, _, _ in answers} == {200}
    assert sorted(body for _, body, _ in answers) == sorted([b"first", *(b"%d" % i for i in range(96))])
    assert (await large)[:2] == (200, b"%d" % (5 * MIB))
    assert (await plain).data == b"by NATS"
    async with await socket as opened:
        await opened.send_str("hello")
        assert await opened.receive_str(timeout=20) == "hello"
    await all_heard(stack)
    heard = len(wakes.heard)
    total = router.queued_seconds(now())
    await stack.get("/echo")
    await all_heard(stack)
    assert router.queued_seconds(now()) == total
    assert len(wakes.heard) == heard <= 3 + (loop.time() - began)


async def test_a_replica_that_leaves_while_requests_are_on_their_way_loses_none(
    stack: Stack, wakes: Wakes, group: asyncio.TaskGroup
) -> None:
    replica = await stack.add_replica(R0)
    await stack.applied(await stack.put_backend(R0))
    assert (await stack.get("/echo", "POST", data=b"x"))[0] == 200
    replica.is_draining = True  # it was told before the proxy was
    requests = [group.create_task(stack.get("/echo", "POST", data=b"x")) for _ in range(20)]
    await stack.queued(20)
    assert not wakes.heard
    await stack.put_backend(draining=[R0], can_wake=True)
    await wakes.wait(1, 20)
    await stack.put_backend(can_wake=True)
    other = await stack.add_replica("default/echo#9")
    await stack.put_backend(other.tag)
    assert {(await request)[0] for request in requests} == {200}
    assert len(other.seen) == 20


async def test_a_server_that_restarts_meanwhile_breaks_nothing(
    server: NatsServer, stack: Stack, wakes: Wakes, group: asyncio.TaskGroup
) -> None:
    request = group.create_task(stack.get("/echo", "POST", data=b"patient"))
    await wakes.wait(1)
    server.kill()
    late = group.create_task(stack.get("/echo", "POST", data=b"late"))
    server.start()
    heard = len(wakes.heard)
    await wakes.wait(heard + 1)
    await stack.add_replica(R0)
    await stack.put_backend(R0)
    assert (await request)[:2] == (200, b"patient")
    assert (await late)[:2] == (200, b"late")
