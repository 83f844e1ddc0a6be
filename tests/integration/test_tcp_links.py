"""Direct links over TCP between a proxy and a real replica, whose network cuts, stalls and refuses.

The replica listens at 127.0.0.1 and advertises 127.0.0.2, where the network between the two stands: it passes bytes on
until a test says otherwise. There is no directory for Unix sockets, as between machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import pytest
import uvloop

from serve_common.protocol.frames import FRAME_BODY_BYTES_MAX
from serve_common.runtime.settings import DirectMode
from serve_replica_host.replica.process import ReplicaProcess
from tests.support.servers.nats_server import NatsServer
from tests.support.stacks.bare_runner import RunOrder, start_order
from tests.support.stacks.proxy_stack import R0, R1, Stack, running_stack
from tests.support.stacks.raw_peers import running_replica
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(240)

KIB, MIB = 1024, 1024 * 1024
SIZES: Final = (1, 100, 4 * KIB, 64 * KIB - 1, 64 * KIB, 300_000, MIB, 3 * MIB + 7, 8 * MIB)
CLIENTS: Final = 8
_LIMIT_S: Final = 60.0

APP = """
import hashlib
from starlette.responses import StreamingResponse

class Echo:
    async def __call__(self, request):
        digest, pieces = hashlib.sha256(), []
        async for piece in request.stream():
            digest.update(piece)
            pieces.append(piece)
        headers = {"x-sha256": digest.hexdigest()}
        async def body():
            for piece in pieces:
                yield piece
        return StreamingResponse(body(), headers=headers)
"""


class Network:
    """What lies between the proxy and its replica."""

    def __init__(self) -> None:
        self.connections = 0
        self.cuts = 0
        self.cut_after: random.Random | None = None
        """Draws after how many bytes each connection is cut; None: never."""
        self.is_stalled = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._port = 0

    async def start(self, port: int) -> None:
        self._port = port
        self._server = await asyncio.start_server(self._take, "127.0.0.2", port)

    async def close(self) -> None:
        """Refuse connections, and end those that there are."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await eventually(lambda: not self._writers)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        upstream = await asyncio.open_connection("127.0.0.1", self._port)
        left = [2**62 if self.cut_after is None else self.cut_after.randrange(20 * MIB)]
        self._writers |= {writer, upstream[1]}
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(reader, upstream[1], left))
                group.create_task(self._pass_on(upstream[0], writer, left))
        except* (ConnectionError, _CutError):
            pass
        for each in (writer, upstream[1]):
            each.transport.abort()
            self._writers.discard(each)

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: list[int]
    ) -> None:
        while data := await reader.read(64 * KIB):
            while self.is_stalled:
                await asyncio.sleep(0.05)
                if writer.transport.is_closing():
                    raise _CutError
            writer.write(data[: left[0]])
            left[0] -= len(data)
            if left[0] <= 0:
                self.cuts += 1
                raise _CutError
            await writer.drain()
        raise _CutError


class _CutError(Exception):
    """The connection was cut."""


class World:
    """The proxy, the replica, and the network between them."""

    def __init__(self, stack: Stack, replica: ReplicaProcess, network: Network) -> None:
        self.stack = stack
        self.replica = replica
        self.network = network
        self.links = stack.proxy._links

    async def echo(self, session: aiohttp.ClientSession, body: bytes, *, is_chunked: bool = False) -> None:
        """Post ``body``, and check the answer and what the replica has got."""

        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(body), 100_000):
                yield body[at : at + 100_000]

        data: Any = pieces() if is_chunked else io.BytesIO(body)
        async with session.post(f"{self.stack.url}/echo", data=data) as response:
            answer = await response.read()
            assert response.status == 200, answer[:500]
        expected = hashlib.sha256(body).hexdigest()
        assert response.headers["x-sha256"] == expected
        assert hashlib.sha256(answer).hexdigest() == expected

    async def linked(self) -> None:
        """Until there is a link; what is large makes the proxy dial."""
        await self.echo(self.stack.session, bytes(100_000))
        await eventually(lambda: self.links.open_tcp_links == 1, within_s=_LIMIT_S)


@contextlib.asynccontextmanager
async def running(
    server: NatsServer, directory: Path, mode: DirectMode = DirectMode.BODIES, *, drains: bool = True
) -> AsyncIterator[World]:
    (directory / "echo_app.py").write_text(APP)
    order = start_order(server.url, R0, RunOrder(import_path="echo_app:Echo", app_dir=str(directory)))
    bus = msgspec.structs.replace(
        order.bus, direct_host="127.0.0.1", direct_advertise="127.0.0.2", direct=mode
    )
    async with (
        running_stack(server) as stack,
        running_replica(msgspec.structs.replace(order, bus=bus), drains=drains) as replica,
    ):
        stack.proxy._links.mode = mode  # type: ignore[misc] - as its settings would
        await stack.create_bucket()
        await stack.put_endpoint()
        await stack.applied(await stack.put_backend(R0))
        await stack.reachable()
        assert replica._io is not None
        assert replica._io._listener is not None
        network = Network()
        await network.start(replica._io._listener._port)
        try:
            yield World(stack, replica, network)
        finally:
            await network.close()


@pytest.mark.parametrize("mode", [DirectMode.BODIES, DirectMode.ALL])
def test_bodies_of_all_sizes_take_a_link_of_tls(server: NatsServer, tmp_path: Path, mode: DirectMode) -> None:
    async def main() -> None:
        async with running(server, tmp_path, mode) as world:
            await world.linked()
            before = world.links.count_frames()
            rng = random.Random(1)
            for size in SIZES:
                for is_chunked in (False, True):
                    await world.echo(world.stack.session, rng.randbytes(size), is_chunked=is_chunked)
            after = world.links.count_frames()
            assert after[0] - before[0] > 2 * sum(SIZES) / FRAME_BODY_BYTES_MAX
            assert after[1] - before[1] > 2 * sum(SIZES) / FRAME_BODY_BYTES_MAX
            assert (world.network.connections, world.links.opened, world.links.failed) == (1, 1, 0)
            assert 'serve_proxy_direct_links{transport="tcp"} 1.0' in await world.stack.metrics()

    uvloop.run(main())


def test_links_that_are_cut_at_random_bytes_fail_no_request(server: NatsServer, tmp_path: Path) -> None:
    async def main() -> None:
        async with running(server, tmp_path, DirectMode.ALL) as world:
            world.network.cut_after = random.Random(7)
            done = 0

            async def client(seed: int) -> None:
                nonlocal done
                rng = random.Random(seed)
                while world.network.cuts < 12:
                    await world.echo(
                        world.stack.session,
                        rng.randbytes(rng.choice(SIZES)),
                        is_chunked=rng.random() < 0.5,
                    )
                    done += 1

            async with asyncio.timeout(_LIMIT_S), asyncio.TaskGroup() as group:
                for seed in range(CLIENTS):
                    group.create_task(client(seed))
            print(f"{done} requests, {world.network.cuts} cuts, {world.links.failed} dials failed")
            assert done >= 50
            await eventually(lambda: world.replica.in_flight == 0)
            assert world.stack.proxy._dispatcher.calls == {}

    uvloop.run(main())


def test_a_network_that_stalls_in_the_middle_of_a_body_costs_seconds_and_no_request(
    server: NatsServer, tmp_path: Path
) -> None:
    async def main() -> None:
        async with running(server, tmp_path) as world:
            await world.linked()
            world.network.is_stalled = True
            started_at = asyncio.get_running_loop().time()
            await world.echo(world.stack.session, random.Random(3).randbytes(8 * MIB))
            took_s = asyncio.get_running_loop().time() - started_at
            assert world.links.lost == 1
            assert 3 < took_s < 25
            world.network.is_stalled = False

    uvloop.run(main())


def test_a_replica_that_cannot_be_reached_is_served_over_the_bus_and_dialled_once(
    server: NatsServer, tmp_path: Path
) -> None:
    async def main() -> None:
        async with running(server, tmp_path) as world:
            await world.network.close()
            for _ in range(20):
                await world.echo(world.stack.session, bytes(MIB))
            await eventually(lambda: not world.links._dials)
            assert (world.links.opened, world.links.failed) == (0, 1)
            # Once the network is back, and the failure is long ago, links come by themselves.
            await world.network.start(world.network._port)
            world.links._not_before.clear()
            await world.linked()

    uvloop.run(main())


def test_a_replica_that_ends_closes_its_port_and_leaves_nothing(server: NatsServer, tmp_path: Path) -> None:
    async def main() -> None:
        async with running(server, tmp_path, drains=False) as world:
            await world.linked()
            await asyncio.to_thread(world.replica.drain)
            await eventually(lambda: world.links.open_links == 0)
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", world.network._port)

    uvloop.run(main())


@pytest.mark.parametrize("is_stalled", [False, True])
def test_a_drain_loses_no_request_that_is_on_its_way_over_a_link(
    server: NatsServer, tmp_path: Path, *, is_stalled: bool
) -> None:
    """The proxy has not heard of the drain, and what it sends may not be read before the replica ends."""

    async def main() -> None:
        async with running(server, tmp_path, DirectMode.ALL, drains=False) as world:
            await world.linked()
            stack = world.stack
            await stack.add_replica(R1)
            world.network.is_stalled = True
            before = world.links.count_frames()[0]
            async with asyncio.timeout(_LIMIT_S), asyncio.TaskGroup() as group:
                post = group.create_task(stack.session.post(f"{stack.url}/echo", data=b"x"))
                await eventually(lambda: world.links.count_frames()[0] > before)
                await stack.applied(await stack.put_backend(R0, R1))
                drain = group.create_task(asyncio.to_thread(world.replica.drain))
                await asyncio.sleep(1)
                assert world.links.open_links == 1, "its router has yet to read that it leaves"
                world.network.is_stalled = is_stalled
            async with post.result() as response:
                assert response.status == 200, await response.text()
            assert drain.done()
            assert world.links.open_links == 0

    uvloop.run(main())
