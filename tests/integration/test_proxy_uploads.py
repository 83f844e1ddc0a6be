"""Bodies that are still arriving while they are sent on: in constant memory, at the pace of the slower side."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from serve_common.dispatch.request_body import RETAINED_BYTES_MAX
from serve_common.protocol.frames import FRAME_BODY_BYTES_MAX, UNKNOWN_BYTES, WINDOW_FRAMES
from serve_proxy.http import bodies as slow_clients
from tests.support.servers.nats_server import NatsServer
from tests.support.stacks.proxy_stack import MIB, R0, R1, TAG, Stack, running_stack
from tests.support.stacks.raw_peers import raw_connection
from tests.support.waiting import eventually

HEAD = b"POST /echo%b HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
async def stack(server: NatsServer) -> AsyncIterator[Stack]:
    async with running_stack(server) as stack:
        yield stack
        await eventually(lambda: not stack.proxy._requests._endpoints._memory.buffered_bytes)


class Sender:
    """A client that sends its body when the test says so."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        self.writer.write(b"0\r\n\r\n")

    async def status(self) -> int:
        return int((await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 30)).split()[1])

    async def chunk(self) -> bytes:
        size = int(await asyncio.wait_for(self.reader.readuntil(b"\r\n"), 30), 16)
        return (await self.reader.readexactly(size + 2))[:-2]


@contextlib.asynccontextmanager
async def sender(stack: Stack, path: str = "", head: bytes = HEAD) -> AsyncIterator[Sender]:
    async with raw_connection(stack.url) as (reader, writer):
        writer.write(head % path.encode() if b"%b" in head else head)
        yield Sender(reader, writer)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def has_received(replica, size: int) -> bool:
    return any(held.received_bytes == size for held in replica.held.values())


async def pieces(size: int, piece: int = MIB):
    block = os.urandom(piece)
    for at in range(0, size, piece):
        yield block[: min(piece, size - at)]


async def test_a_request_is_begun_before_its_body_is_whole(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    async with sender(stack) as client:
        client.send(b"first ")
        await replica.wait(lambda: len(replica.seen) == 1)
        assert replica.seen[0].body_bytes == UNKNOWN_BYTES
        client.send(b"second ")
        await replica.wait(lambda: has_received(replica, len(b"first second ")))
        client.send(b"third")
        client.end()
        assert await client.status() == 200
    assert replica.bodies == [b"first second third"]


async def test_a_small_body_that_comes_late_is_collected_and_travels_in_one_frame(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    async with sender(stack, head=b"POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 6\r\n\r\n") as client:
        client.writer.write(b"abc")
        await asyncio.sleep(0.05)
        assert not replica.seen
        client.writer.write(b"def")
        assert await client.status() == 200
    assert replica.seen[0].body_bytes == 6


async def test_100_mib_go_through_in_little_memory(server: NatsServer) -> None:
    async with running_stack(server) as stack:
        (replica,) = await stack.serve(R0)
        await stack.applied(await stack.put_http(body_bytes_max=200 * MIB))
        await stack.get("/echo/sink", "POST", data=pieces(8 * MIB))
        before = resident_bytes()
        most = before

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, resident_bytes())
                await asyncio.sleep(0.01)

        watching = asyncio.get_running_loop().create_task(watch())
        status, body, _ = await stack.get("/echo/sink", "POST", data=pieces(100 * MIB))
        watching.cancel()
        assert (status, body) == (200, b"%d" % (100 * MIB))
        assert most - before < 64 * MIB, f"grew by {(most - before) // MIB} MiB"
        assert replica.seen[-1].body_bytes == UNKNOWN_BYTES


async def test_many_uploads_to_replicas_that_do_not_take_them_are_bounded_together(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    await stack.applied(await stack.put_http(body_bytes_max=200 * MIB))
    room = stack.proxy._requests._endpoints._memory
    room._bytes_max = 4 * MIB
    async with asyncio.TaskGroup() as group:
        uploads = [
            group.create_task(stack.get(f"/echo/stuck/{i}", "POST", data=pieces(4 * MIB))) for i in range(8)
        ]
        await replica.wait(lambda: len(replica.held) == 8)
        await eventually(lambda: room.is_full)
        await asyncio.sleep(0.2)
        assert room.buffered_bytes < 4 * MIB + 8 * MIB
        assert all(
            held.received_bytes <= WINDOW_FRAMES * FRAME_BODY_BYTES_MAX for held in replica.held.values()
        )

        async def take() -> None:
            while replica.held:
                replica.take_on()
                await asyncio.sleep(0.01)

        group.create_task(take())
    assert {task.result()[0] for task in uploads} == {200}


async def test_a_replica_that_takes_nothing_holds_up_the_client(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    await stack.applied(await stack.put_http(body_bytes_max=200 * MIB))
    sent = 0

    async def body():
        nonlocal sent
        async for piece in pieces(40 * MIB):
            yield piece
            sent += len(piece)

    async with asyncio.TaskGroup() as group:
        upload = group.create_task(stack.get("/echo/stuck", "POST", data=body()))
        await replica.wait(lambda: any(held.frames == WINDOW_FRAMES - 1 for held in replica.held.values()))
        await asyncio.sleep(0.2)
        assert sent < 30 * MIB  # the rest is the system's buffers
        (held,) = replica.held.values()
        assert held.received_bytes <= WINDOW_FRAMES * FRAME_BODY_BYTES_MAX
        while not upload.done():
            replica.take_on()
            await asyncio.sleep(0.01)
    assert upload.result()[0] == 200


async def test_a_client_that_leaves_while_it_is_held_up_cancels_its_request(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    async with sender(stack, "/stuck") as client:
        for _ in range(4):
            client.send(bytes(MIB))
        await replica.wait(lambda: any(held.frames == WINDOW_FRAMES - 1 for held in replica.held.values()))
        reset_on_close = struct.pack("ii", 1, 0)
        client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset_on_close)
        client.writer.transport.abort()
        await replica.wait(lambda: replica.cancelled == ["/echo/stuck"])


async def test_a_refused_upload_is_sent_elsewhere_from_its_beginning(stack: Stack) -> None:
    first, second = await stack.serve(R0, R1)
    first.is_draining = second.is_draining = True
    body = os.urandom(RETAINED_BYTES_MAX - 1000)
    async with sender(stack) as client:
        client.send(body[:MIB])
        await stack.queued()
        client.send(body[MIB:])
        client.end()
        await asyncio.sleep(0.1)
        third = await stack.add_replica("default/echo#2")
        await stack.applied(await stack.put_backend("default/echo#2", draining=[R0, R1]))
        assert await client.status() == 200
    assert third.bodies == [body]
    assert not first.bodies + second.bodies


async def test_an_idempotent_upload_survives_its_replica_while_it_is_all_here(stack: Stack) -> None:
    (first,) = await stack.serve(R0)
    async with sender(stack, head=HEAD.replace(b"\r\n\r\n", b"\r\nIdempotency-Key: k\r\n\r\n")) as client:
        client.send(b"begin ")
        await first.wait(lambda: len(first.held) == 1)
        others = [await stack.add_replica(tag) for tag in (R1, f"{TAG}#2")]
        await stack.applied(await stack.put_backend(R0, R1, f"{TAG}#2"))
        await first.close()
        await stack.applied(await stack.put_backend(R1, f"{TAG}#2"))
        client.send(b"end")
        client.end()
        assert await client.status() == 200
    assert [body for other in others for body in other.bodies] == [b"begin end"]


async def test_an_upload_whose_beginning_is_gone_ends_with_its_replica(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    async with sender(stack, head=HEAD.replace(b"\r\n\r\n", b"\r\nIdempotency-Key: k\r\n\r\n")) as client:
        client.send(bytes(RETAINED_BYTES_MAX + 1))
        await replica.wait(lambda: has_received(replica, RETAINED_BYTES_MAX + 1))
        client.send(b"more")
        await replica.wait(lambda: has_received(replica, RETAINED_BYTES_MAX + 5))
        await stack.applied(await stack.put_backend())
        assert await client.status() == 502


async def test_an_answer_may_come_before_the_body_is_whole(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    async with sender(stack, "/early") as client:
        client.send(b"first")
        head = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 30)
        assert head.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in head.lower()
        assert await client.reader.readexactly(6) == b"enough"
        client.send(b"the rest")
        client.end()
        assert await asyncio.wait_for(client.reader.read(), 30) == b""
    assert not replica.held


async def test_body_and_answer_may_go_both_ways_at_once(stack: Stack) -> None:
    await stack.serve(R0)
    async with sender(stack, "/pieces") as client:
        client.send(b"one")
        assert await client.status() == 200
        assert await client.chunk() == b"one"
        client.send(b"two")
        assert await client.chunk() == b"two"
        client.send(b"three")
        assert await client.chunk() == b"three"
        client.end()
        assert await client.chunk() == b""
        client.writer.write(b"GET /echo HTTP/1.1\r\nHost: h\r\n\r\n")
        assert await client.status() == 200


async def test_a_client_that_leaves_in_the_middle_cancels_its_request(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    async with sender(stack) as client:
        client.send(b"first")
        await replica.wait(lambda: len(replica.held) == 1)
    await replica.wait(lambda: replica.cancelled == ["/echo"])


async def test_a_body_that_turns_out_malformed_is_a_400_and_cancels_the_request(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    async with sender(stack) as client:
        client.send(b"first")
        await replica.wait(lambda: len(replica.held) == 1)
        client.writer.write(b"nonsense\r\n")
        assert await client.status() == 400
    await replica.wait(lambda: replica.cancelled == ["/echo"])


async def test_100_continue_is_said_once_and_only_to_who_may_send(stack: Stack) -> None:
    await stack.serve(R0)
    expecting = b"POST %b HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    async with sender(stack, head=expecting % (b"/echo", 5)) as client:
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.writer.write(b"hello")
        assert await client.status() == 200
    async with sender(stack, head=expecting % (b"/echo", 500 * MIB)) as client:
        assert await client.status() == 413
    async with sender(stack, head=expecting % (b"/nowhere", 5)) as client:
        assert await client.status() == 404


@pytest.mark.parametrize("path", ["", "/small"])
async def test_a_client_that_sends_a_drop_at_a_time_gets_408(stack: Stack, monkeypatch, path: str) -> None:
    monkeypatch.setattr(slow_clients, "PERIOD_S", 0.2)
    (replica,) = await stack.serve(R0)
    await stack.applied(await stack.put_http(body_rate_min=1000))
    head = HEAD if not path else b"POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 2000\r\n\r\n"
    async with sender(stack, head=head) as client:
        answer = asyncio.get_running_loop().create_task(client.status())
        while not answer.done():
            if path:
                client.writer.write(b"x")
            else:
                client.send(b"x")
            await asyncio.sleep(0.02)
        assert answer.result() == 408
    if not path:
        await replica.wait(lambda: replica.cancelled == ["/echo"])


@pytest.mark.parametrize("path", ["/echo/big-sized", "/echo/big"])
async def test_a_client_that_does_not_read_is_cut_off(stack: Stack, monkeypatch, path: str) -> None:
    monkeypatch.setattr(slow_clients, "PERIOD_S", 0.2)
    (replica,) = await stack.serve(R0)
    await stack.applied(await stack.put_http(body_rate_min=1000))
    request = b"GET %b?%d HTTP/1.1\r\nHost: h\r\n\r\n" % (path.encode(), 50 * MIB)
    async with sender(stack, head=request) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await replica.wait(lambda: replica.cancelled == [path])


async def test_a_client_that_reads_slowly_enough_gets_it_all_after_the_request_timeout(
    server: NatsServer, monkeypatch
) -> None:
    monkeypatch.setattr(slow_clients, "PERIOD_S", 1.0)  # in which a busy machine reads something
    async with running_stack(server, request_timeout_s=2.0) as stack:
        await stack.serve(R0)
        loop = asyncio.get_running_loop()
        got, began = 0, loop.time()
        async with (
            aiohttp.ClientSession(read_bufsize=4096) as session,
            session.get(f"{stack.url}/echo/big?{20 * MIB}") as response,
        ):
            async for piece in response.content.iter_chunked(MIB):
                got += len(piece)
                await asyncio.sleep(0.11)
        assert got == 20 * MIB
        assert loop.time() - began > 2.0
