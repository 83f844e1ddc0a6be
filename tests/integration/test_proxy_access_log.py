"""The access log of a running proxy: one line for every request, by whichever way it went and however it ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.servers.nats_server import NatsServer
from tests.support.stacks.proxy_stack import MIB, R0, TAG, Stack, running_stack
from tests.support.stacks.raw_peers import raw_connection

HOST = b"Host: h\r\n"
UPGRADE = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


class Log:
    """What a proxy has written."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._written: list[bytes] = []
        self._changed = asyncio.Event()

    def write(self, piece: bytes) -> None:
        self._loop.call_soon_threadsafe(self._take, piece)

    def _take(self, piece: bytes) -> None:
        self._written.append(piece)
        self._changed.set()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in b"".join(self._written).splitlines()]

    async def lines_of(self, request_id: str, count: int = 1) -> list[dict[str, Any]]:
        async with asyncio.timeout(30):
            while len(found := [line for line in self.lines if line["request_id"] == request_id]) < count:
                self._changed.clear()
                await self._changed.wait()
        return found

    async def line_of(self, request_id: str) -> dict[str, Any]:
        (line,) = await self.lines_of(request_id)
        return line


@asynccontextmanager
async def logged(shared_server: NatsServer) -> AsyncIterator[tuple[Stack, Log]]:
    log = Log()
    async with running_stack(shared_server, write_access=log.write) as stack:
        await stack.serve(R0)
        yield stack, log
        await stack.client.jetstream().delete_key_value(stack.subjects.bucket)


@pytest.fixture
async def world(shared_server: NatsServer) -> AsyncIterator[tuple[Stack, Log]]:
    """A proxy with one replica and its log, which is on."""
    async with logged(shared_server) as (stack, log):
        await switch(stack)
        yield stack, log


async def switch(stack: Stack, *, on: bool = True, **options) -> None:
    await stack.applied(await stack.put_http(access_log=on, body_bytes_max=10 * MIB, **options))
    assert not stack.reports[-1].http_error


def named(request_id: str) -> dict[str, str]:
    return {"X-Request-ID": request_id}


def asking(path: str, request_id: str, *headers: bytes) -> bytes:
    return b"GET %b HTTP/1.1\r\n%bX-Request-ID: %b\r\n%b\r\n" % (
        path.encode(),
        HOST,
        request_id.encode(),
        b"".join(headers),
    )


async def test_it_is_off_until_it_is_switched_on_and_off_again_while_the_proxy_runs(
    shared_server: NatsServer,
) -> None:
    async with logged(shared_server) as (stack, log):
        await stack.get("/echo", headers=named("before"))
        await switch(stack)
        await stack.get("/echo", headers=named("during"))
        await log.line_of("during")
        await switch(stack, on=False)
        await stack.get("/echo", headers=named("after"))
        await switch(stack)
        await stack.get("/echo", headers=named("again"))
        await log.line_of("again")
    assert [line["request_id"] for line in log.lines] == ["during", "again"]


@pytest.mark.parametrize("way", ["short", "long", "middlewares"])
async def test_an_answered_request_has_a_line_by_every_way_and_none_of_its_secrets(
    world: tuple[Stack, Log], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack, log = world
    monkeypatch.setenv("MUSTER_CORS_ALLOW_ORIGINS", "https://a.example")
    chain = ["serve_proxy.middlewares.cors:cors"] if way == "middlewares" else []
    await switch(stack, middlewares=chain)
    headers = {
        **named("mine"),
        "Authorization": "secret",
        **({"Connection": "close"} if way == "long" else {}),
    }
    await stack.get("/echo/%22a?token=secret", "POST", data=b"secret", headers=headers)
    line = await log.line_of("mine")
    assert line.pop("duration_ms") > 0
    assert line.pop("timestamp").endswith("Z")
    assert line.pop("client").startswith("127.0.0.1:")
    assert line == {
        "event": "request",
        "kind": "http",
        "method": "POST",
        "path": "/echo/%22a",
        "status": 200,
        "bytes_in": 6,
        "bytes_out": 6,
        "request_id": "mine",
        "endpoint_tag": TAG,
        "backend_tag": TAG,
        "replica_tag": R0,
        "service": "proxy",
        "proxy_id": "p1",
        "level": "info",
    }
    assert "secret" not in repr(log.lines)


@pytest.mark.parametrize("headers", [{}, {"Connection": "close"}], ids=["short", "long"])
async def test_a_request_without_a_route_says_so(world: tuple[Stack, Log], headers: dict[str, str]) -> None:
    stack, log = world
    _, body, _ = await stack.get("/nowhere/" + "x" * 3000, headers={**headers, **named("lost")})
    line = await log.line_of("lost")
    assert (line["status"], line["error"], line["bytes_out"]) == (404, "no_route", len(body))
    assert len(line["path"]) < 500
    assert "endpoint_tag" not in line


@pytest.mark.parametrize("headers", [(), (b"Connection: close\r\n",)], ids=["short", "long"])
async def test_refusals_say_why_and_a_client_that_left_is_told_apart(
    world: tuple[Stack, Log], headers: tuple[bytes, ...]
) -> None:
    stack, log = world
    (replica,) = stack.replicas
    await stack.applied(await stack.put_backend(R0, limit=1, queue=1))
    async with raw_connection(stack.url) as (_, first), raw_connection(stack.url) as (reader, second):
        first.write(asking("/echo/hold", "leaves", *headers))
        await replica.wait(lambda: len(replica.held) == 1)
        second.write(asking("/echo/late", "late", *headers))
        await stack.queued()
        async with raw_connection(stack.url) as (third_reader, third):
            third.write(asking("/echo/full", "full", *headers))
            assert b" 503 " in await third_reader.readline()
        full = await log.line_of("full")
        assert (full["status"], full["error"], full["backend_tag"]) == (503, "queue_full", TAG)
        assert "replica_tag" not in full
        first.close()
        left = await log.line_of("leaves")
        assert (left["status"], left["replica_tag"], left["bytes_out"]) == (499, R0, 0)
        await replica.wait(lambda: len(replica.seen) == 2)
        assert b" 200 " in await reader.readline()
    assert (await log.line_of("late"))["status"] == 200
    await switch(stack, request_timeout_s=0.5)
    await stack.get("/echo/hold", headers=named("slow"))
    slow = await log.line_of("slow")
    assert (slow["status"], slow["error"]) == (504, "deadline_exceeded")
    assert slow["duration_ms"] >= 400


@pytest.mark.parametrize("headers", [{}, {"Connection": "close"}], ids=["short", "long"])
async def test_a_stream_has_one_line_with_all_its_bytes(
    world: tuple[Stack, Log], headers: dict[str, str]
) -> None:
    stack, log = world
    _, body, _ = await stack.get(f"/echo/big?{2 * MIB}", headers={**headers, **named("whole")})
    line = await log.line_of("whole")
    assert (line["kind"], line["status"], line["bytes_out"]) == ("stream", 200, len(body))
    assert line["replica_tag"] == R0


async def test_a_stream_that_ends_early_says_how_far_it_came(world: tuple[Stack, Log]) -> None:
    stack, log = world
    (replica,) = stack.replicas
    async with raw_connection(stack.url) as (reader, writer):
        writer.write(asking("/echo/break", "broken"))
        assert b" 200 " in await reader.readline()
        broken = await log.line_of("broken")
    assert (broken["kind"], broken["status"], broken["error"]) == ("stream", 499, "user_code_raised")
    assert broken["bytes_out"] == len(b"first")
    async with raw_connection(stack.url) as (reader, writer):
        writer.write(asking(f"/echo/big?{40 * MIB}", "left"))
        await reader.readexactly(100_000)
        await replica.wait(lambda: bool(replica.held))
    left = await log.line_of("left")
    assert (left["kind"], left["status"], "error" in left) == ("stream", 499, False)
    assert 100_000 < left["bytes_out"] < 40 * MIB


async def test_a_socket_has_one_line_when_it_ends(world: tuple[Stack, Log]) -> None:
    stack, log = world
    (replica,) = stack.replicas
    async with stack.session.ws_connect(stack.url + "/echo/ws?token=secret", headers=named("talk")) as ws:
        for text in ("a", "grüß"):
            await ws.send_str(text)
            assert await ws.receive_str() == text
        assert [line for line in log.lines if line["request_id"] == "talk"] == []
        await ws.close(code=4001)
    line = await log.line_of("talk")
    assert (line["kind"], line["status"], line["close_code"]) == ("websocket", 101, 4001)
    assert (line["messages_in"], line["messages_out"], line["bytes_in"], line["bytes_out"]) == (2, 2, 7, 7)
    assert (line["path"], line["replica_tag"]) == ("/echo/ws", R0)

    async with raw_connection(stack.url) as (reader, writer):
        writer.write(asking("/echo/ws", "torn", UPGRADE))
        assert b" 101 " in await reader.readline()
        await replica.wait(lambda: len(replica.sockets) == 2)
        writer.transport.abort()
        torn = await log.line_of("torn")
    assert (torn["status"], torn["close_code"], torn["messages_in"]) == (101, 1006, 0)

    await stack.get("/echo/ws-refuse", headers={**named("no"), **_as_headers(UPGRADE)})
    refused = await log.line_of("no")
    assert (refused["kind"], refused["status"]) == ("websocket", 403)


async def test_what_cannot_be_read_has_a_line_too(world: tuple[Stack, Log]) -> None:
    stack, log = world
    for request in (b"nonsense\r\n\r\n", b"GET /echo HTTP/1.1\r\nHost: a b\r\n\r\n"):
        async with raw_connection(stack.url) as (reader, writer):
            writer.write(request)
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        request_id = head.lower().partition("x-request-id: ")[2].partition("\r\n")[0]
        line = await log.line_of(request_id)
        assert (line["status"], line["error"]) == (400, "bad_request")
        assert line["client"].startswith("127.0.0.1:")


async def test_in_a_drain_a_socket_is_refused_for_that(world: tuple[Stack, Log]) -> None:
    stack, log = world
    async with raw_connection(stack.url) as (reader, writer):
        writer.write(asking("/echo", "first"))
        await log.line_of("first")
        stack.proxy._ingress.is_draining = True
        writer.write(asking("/echo/ws", "late", UPGRADE))
        line = await log.line_of("late")
        await reader.readline()
    assert (line["status"], line["error"]) == (503, "draining")


async def test_what_waits_is_written_before_the_proxy_ends(shared_server: NatsServer) -> None:
    async with logged(shared_server) as (stack, log):
        await switch(stack)
        for number in range(50):
            await stack.get("/echo", headers=named(f"r{number}"))
    assert {line["request_id"] for line in log.lines} == {f"r{number}" for number in range(50)}


def _as_headers(lines: bytes) -> dict[str, str]:
    named_values = [line.partition(": ") for line in lines.decode().splitlines()]
    return {name: value for name, _, value in named_values}
