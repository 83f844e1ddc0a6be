"""Bodies that find no room: refused at their head however their client sends; what it still sends is dropped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import pytest
import uvloop

from serve_common.config.endpoint import HttpOptions
from serve_common.dispatch.request_body import UploadMemory
from serve_proxy.http import connection as http_connection
from serve_proxy.http.connection import HttpConnection
from tests.unit.test_proxy_fast_path import HOST, Desk, read_answer, whole

MIB = 1024 * 1024
BODY_BYTES_MAX = 8 * MIB
LENGTH = b"Content-Length: %d\r\n" % (6 * MIB)
CHUNKED = b"Transfer-Encoding: chunked\r\n"


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    desk = Desk(HttpOptions(body_bytes_max=BODY_BYTES_MAX))
    desk.ingress.room = UploadMemory(admitted_bytes_max=MIB)
    desk.requests._endpoints._room = desk.ingress.room
    desk.ingress.room.admit(MIB)
    await desk.start()
    yield desk
    for writer in desk.writers:
        writer.close()
    await desk.server.close(1.0)


def connection_of(desk: Desk) -> HttpConnection:
    (connection,) = desk.server._http.connections
    return connection


async def refused(reader: asyncio.StreamReader) -> None:
    status, headers, body = await read_answer(reader)
    assert (status, headers.get("connection", "close")) == (503, "close")
    assert int(headers["retry-after"]) > 0
    assert json.loads(body)["code"] == "bodies_full"


EXPECT = LENGTH + b"Expect: 100-continue\r\n"


@pytest.mark.parametrize(
    ("version", "lines"),
    [
        (b"HTTP/1.1", LENGTH),
        (b"HTTP/1.1", CHUNKED),
        (b"HTTP/1.1", EXPECT),
        (b"HTTP/1.1", LENGTH + b"Connection: close\r\n"),
        (b"HTTP/1.0", LENGTH),
        (b"HTTP/1.0", EXPECT),
    ],
)
async def test_it_is_refused_when_its_head_has_come(desk: Desk, lines: bytes, version: bytes) -> None:
    reader, writer = await desk.connect()
    writer.write(b"POST /a " + version + b"\r\n" + HOST + lines + b"\r\n")
    await refused(reader)
    assert not desk.ingress.asked
    assert not desk.ingress.begun
    assert desk.ingress.room.refused == 1
    assert desk.ingress.endpoint.tally.counts == {("POST", 503): 1}
    assert desk.server.in_flight == 0
    assert await asyncio.wait_for(reader.read(), 30) == b"", "nothing else comes"


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"], ids=["short way", "long way"])
async def test_who_sends_everything_first_is_answered_and_not_reset(desk: Desk, version: bytes) -> None:
    reader, writer = await desk.connect()
    writer.write(b"POST /a " + version + b"\r\n" + HOST + LENGTH + b"\r\n" + bytes(6 * MIB))
    async with asyncio.timeout(30):
        await writer.drain()
        while writer.transport.get_write_buffer_size():  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
    await refused(reader)
    writer.close()
    async with asyncio.timeout(30):
        while desk.server.connections:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)


async def test_who_sends_more_than_a_body_may_have_before_it_reads_is_told_so(desk: Desk) -> None:
    size = BODY_BYTES_MAX + 16 * MIB
    reader, writer = await desk.connect()
    writer.write(b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % size + bytes(size))
    async with asyncio.timeout(30):
        while writer.transport.get_write_buffer_size():  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
    assert (await read_answer(reader))[0] == 413


async def test_nothing_of_it_is_held(desk: Desk) -> None:
    reader, writer = await desk.connect()
    writer.write(b"POST /a HTTP/1.1\r\n" + HOST + LENGTH + b"\r\n" + bytes(MIB))
    await refused(reader)
    assert connection_of(desk)._last_payload._size == 0


@pytest.mark.parametrize("is_apart", [False, True])
async def test_what_comes_before_it_is_answered_first_and_what_comes_behind_is_not(
    desk: Desk, is_apart: bool
) -> None:
    reader, writer = await desk.connect()
    good = b"GET /a HTTP/1.1\r\n" + HOST + b"\r\n"
    writer.write(good)
    if is_apart:
        await desk.ingress.until(lambda: desk.ingress.begun)
    writer.write(b"POST /a HTTP/1.1\r\n" + HOST + LENGTH + b"\r\n" + bytes(6 * MIB) + good)
    await desk.ingress.until(lambda: desk.ingress.begun or desk.ingress.asked)
    if desk.ingress.begun:
        desk.ingress.begun[0].on_answer(None, whole(b"ok"))
    else:
        desk.ingress.asked[0].waiter.set_result(whole(b"ok"))
    assert (await read_answer(reader))[::2] == (200, b"ok")
    await refused(reader)
    assert await asyncio.wait_for(reader.read(), 30) == b""
    assert len(desk.ingress.begun) + len(desk.ingress.asked) == 1


@pytest.mark.parametrize(
    ("path", "length", "status"),
    [(b"/none", 6 * MIB, 404), (b"/a", BODY_BYTES_MAX + 1, 413)],
)
async def test_what_is_wrong_with_a_request_is_told_before_that_there_is_no_room(
    desk: Desk, path: bytes, length: int, status: int
) -> None:
    reader, writer = await desk.connect()
    writer.write(b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % (path, length))
    assert (await read_answer(reader))[0] == status


async def test_a_small_body_that_finds_room_is_let_in_beside_them(desk: Desk) -> None:
    desk.ingress.room.leave(100)
    reader, writer = await desk.connect()
    writer.write(b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: 100\r\n\r\n")
    await asyncio.sleep(0.05)
    writer.write(bytes(100))
    await desk.ingress.until(lambda: desk.ingress.asked)
    desk.ingress.asked[0].waiter.set_result(whole(b"ok"))
    assert (await read_answer(reader))[0] == 200


async def test_no_more_is_dropped_than_so_much(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "_LINGERS_IDLE_S", 0.5)
    monkeypatch.setattr(http_connection, "_DROPPED_BYTES_MAX", 8 * MIB)
    reader, writer = await desk.connect()
    writer.write(b"POST /a HTTP/1.1\r\n" + HOST + CHUNKED + b"\r\n")
    await refused(reader)
    connection = connection_of(desk)

    async def send_for_ever() -> None:
        while True:
            writer.write(bytes(MIB))
            await writer.drain()

    with pytest.raises(ConnectionError):
        await asyncio.wait_for(send_for_ever(), 30)
    left = connection._drop_bytes_left
    assert left is not None
    assert -MIB < left <= 0


async def test_who_is_refused_and_neither_sends_nor_leaves_is_closed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "_LINGERS_IDLE_S", 0.1)
    reader, writer = await desk.connect()
    writer.write(b"POST /a HTTP/1.1\r\n" + HOST + LENGTH + b"\r\n")
    await refused(reader)
    async with asyncio.timeout(30):
        while desk.server.connections:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)


def test_connections_that_wait_are_accepted_many_in_a_turn() -> None:
    """libuv accepts one; while bodies are read a turn is long."""

    async def turns_for(clients: int) -> int:
        desk = Desk(HttpOptions())
        await desk.start()
        host, _, port = desk.address.rpartition(":")
        with contextlib.ExitStack() as stack:
            for _ in range(clients):
                stack.enter_context(socket.create_connection((host, int(port))))
            turns = 0
            async with asyncio.timeout(30):
                while desk.server.connections < clients:
                    turns += 1
                    await asyncio.sleep(0)
        await desk.server.close(1.0)
        return turns

    assert uvloop.run(turns_for(60)) < 30
