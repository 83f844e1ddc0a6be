"""The short way of simple requests on a real connection: what takes it, in which order answers leave, and its ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from serve_common.config.endpoint import EndpointOptions, HttpOptions
from serve_common.dispatch.admission import CLIENT_GONE, RequestStats
from serve_common.dispatch.calls import Response, ResponseBody
from serve_common.dispatch.request_body import UploadMemory
from serve_common.errors import NoReplicaAvailable, NotFound
from serve_proxy.http.requests import HttpRequests
from serve_proxy.http.server import HttpServer
from tests.unit.passing_time import let_pass

HOST = b"Host: h\r\n"
HEADER_TIMEOUT_S = 40.0
"""No test sits through it: they let it pass at once."""


class FakeIngress:
    """Admits every path but /none; keeps what is asked until the test answers it."""

    is_open = True

    def __init__(self) -> None:
        self.is_draining = False
        self.room = UploadMemory()
        self.routes = SimpleNamespace(unmatched=RequestStats())
        self.endpoint = SimpleNamespace(
            tag="d/a", route="/", tally=RequestStats(), options=EndpointOptions(), shadows=(), methods=()
        )
        self.begun: list[SimpleNamespace] = []
        self.asked: list[SimpleNamespace] = []
        self.abandoned: list[object] = []
        self.changed = asyncio.Event()

    def admit(self, _method: str, path: str):
        if path == "/none":
            raise NotFound("nothing is there")
        if path == "/bug":
            raise ZeroDivisionError
        return self.endpoint

    def begin(self, ask, on_answer, on_error):
        call = SimpleNamespace(ask=ask, on_answer=on_answer, on_error=on_error)
        self.begun.append(call)
        self.changed.set()
        return call

    async def ask(self, ask):
        waiter = asyncio.get_running_loop().create_future()
        call = SimpleNamespace(ask=ask, waiter=waiter)
        self.asked.append(call)
        self.changed.set()
        return call, await waiter

    def routing_error(self) -> str | None:
        return None

    def abandon(self, call) -> None:
        self.abandoned.append(call)
        self.changed.set()

    async def until(self, condition) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


class Desk:
    """A listening server over a fake ingress."""

    def __init__(self, options: HttpOptions) -> None:
        self.ingress = FakeIngress()
        self.requests = HttpRequests(self.ingress, options, new_request_id=lambda: "made")
        self.server = HttpServer(self.requests, self.ingress)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        self.writers.append(writer)
        return reader, writer

    async def start(self) -> None:
        self.writers: list[asyncio.StreamWriter] = []
        self.address = await self.server.start("127.0.0.1", 0)


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    desk = Desk(HttpOptions(header_timeout_s=HEADER_TIMEOUT_S, body_bytes_max=100))
    await desk.start()
    yield desk
    for writer in desk.writers:
        writer.close()
    await desk.server.close(1.0)


def whole(body: bytes, *headers: tuple[bytes, bytes], status: int = 200) -> Response:
    return Response(status, list(headers), memoryview(body), None)


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    async with asyncio.timeout(30):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {
            name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)
        }
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    return int(head[0].split(" ")[1]), headers, body


async def test_a_simple_request_is_asked_and_answered_without_a_task(desk: Desk) -> None:
    reader, writer = await desk.connect()
    writer.write(b"POST /a/b?x=1 HTTP/1.1\r\n" + HOST + b"X-A: 1\r\nX-A: 2\r\nContent-Length: 2\r\n\r\nhi")
    await desk.ingress.until(lambda: desk.ingress.begun)
    ask = desk.ingress.begun[0].ask
    assert (ask.method, ask.path, ask.query, ask.body) == ("POST", "/a/b", "x=1", b"hi")
    assert [value for name, value in ask.headers if name == b"x-a"] == [b"1", b"2"]
    assert ask.client.startswith("127.0.0.1:")
    assert desk.server.in_flight == 1

    desk.ingress.begun[0].on_answer(None, whole(b"ok", (b"Content-Type", b"text/x"), (b"set-cookie", b"a")))
    status, headers, body = await read_answer(reader)
    assert (status, body) == (200, b"ok")
    assert (headers["content-type"], headers["set-cookie"], headers["server"]) == ("text/x", "a", "muster")
    assert (headers["x-request-id"], headers["content-length"]) == ("made", "2")
    assert "date" in headers
    assert desk.server.in_flight == 0
    assert desk.ingress.endpoint.tally.counts == {("POST", 200): 1}
    assert not desk.ingress.asked


@pytest.mark.parametrize(("status", "length"), [(204, None), (304, "7")])
async def test_an_answer_without_a_body_by_its_status_has_none(
    desk: Desk, status: int, length: str | None
) -> None:
    reader, writer = await desk.connect()
    writer.write(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
    await desk.ingress.until(lambda: desk.ingress.begun)
    desk.ingress.begun[0].on_answer(None, whole(b"", (b"content-length", b"7"), (b"x", b""), status=status))
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)).decode()
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert "\r\nx: \r\n" in head
    assert (f"content-length: {length}" in head) if length else ("content-length" not in head)
    writer.write(b"GET /none HTTP/1.1\r\n" + HOST + b"\r\n")
    assert (await read_answer(reader))[0] == 404


async def test_errors_are_problems(desk: Desk) -> None:
    reader, writer = await desk.connect()
    for target, status, code in ((b"/none", 404, "not_found"), (b"/bug", 500, "internal")):
        writer.write(b"GET " + target + b" HTTP/1.1\r\n" + HOST + b"X-Request-ID: mine\r\n\r\n")
        got, headers, body = await read_answer(reader)
        assert (got, json.loads(body)["error"]["code"], headers["x-request-id"]) == (status, code, "mine")
    writer.write(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
    await desk.ingress.until(lambda: desk.ingress.begun)
    desk.ingress.begun[0].on_error(None, NoReplicaAvailable("none"))
    got, headers, _ = await read_answer(reader)
    assert got == 503
    assert "retry-after" in headers
    assert desk.ingress.routes.unmatched.counts == {("GET", 404): 1, ("GET", 500): 1}


async def test_an_answer_that_would_break_apart_is_a_bad_gateway(desk: Desk) -> None:
    reader, writer = await desk.connect()
    writer.write(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
    await desk.ingress.until(lambda: desk.ingress.begun)
    desk.ingress.begun[0].on_answer(None, whole(b"", (b"x", b"a\r\nset-cookie: b")))
    assert (await read_answer(reader))[0] == 502


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("target", [b"/", b"http://h/"], ids=["short way", "long way"])
async def test_headers_leave_as_the_bytes_that_they_are(
    desk: Desk, target: bytes, *, is_streamed: bool
) -> None:
    reader, writer = await desk.connect()
    writer.write(b"GET " + target + b" HTTP/1.1\r\n" + HOST + b"\r\n")
    ingress = desk.ingress
    await ingress.until(lambda: ingress.begun or ingress.asked)
    answer = whole(b"ok", (b"x-latin", b"\xe4\xff"), (b"x-latin", "ä€".encode()), (b"x", b"1"))
    if is_streamed:
        body = ResponseBody(memoryview(b"o"), lambda _: None)
        body.add(memoryview(b"k"), last=True)
        answer = Response(200, [*answer.headers, (b"content-length", b"2")], memoryview(b"o"), body)
    if ingress.begun:
        ingress.begun[0].on_answer(ingress.begun[0], answer)
    else:
        ingress.asked[0].waiter.set_result(answer)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    assert await asyncio.wait_for(reader.readexactly(2), 30) == b"ok"
    assert bool(ingress.begun) == (target == b"/")
    lines = head.split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 200 OK"
    assert lines[1:4] == [b"x-latin: \xe4\xff", "x-latin: ä€".encode(), b"x: 1"]
    assert b"server: muster" in [line.lower() for line in lines]


@pytest.mark.parametrize("target", [b"/", b"http://h/"], ids=["short way", "long way"])
async def test_a_stream_begins_before_its_first_piece(desk: Desk, target: bytes) -> None:
    reader, writer = await desk.connect()
    writer.write(b"GET " + target + b" HTTP/1.1\r\n" + HOST + b"\r\n")
    ingress = desk.ingress
    await ingress.until(lambda: ingress.begun or ingress.asked)
    body = ResponseBody(memoryview(b""), lambda _: None)
    answer = Response(200, [], memoryview(b""), body)
    if ingress.begun:
        ingress.begun[0].on_answer(ingress.begun[0], answer)
    else:
        ingress.asked[0].waiter.set_result(answer)
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)).startswith(b"HTTP/1.1 200 OK\r\n")
    body.add(memoryview(b"ab"), last=True)
    assert await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 30) == b"2\r\nab\r\n0\r\n\r\n"


@pytest.mark.parametrize("target", [b"/", b"http://h/"], ids=["short way", "long way"])
async def test_a_control_byte_in_an_answers_header_is_a_bad_gateway(desk: Desk, target: bytes) -> None:
    reader, writer = await desk.connect()
    writer.write(b"GET " + target + b" HTTP/1.1\r\n" + HOST + b"\r\n")
    ingress = desk.ingress
    await ingress.until(lambda: ingress.begun or ingress.asked)
    answer = whole(b"", (b"x", b"a\x01"))
    if ingress.begun:
        ingress.begun[0].on_answer(None, answer)
    else:
        ingress.asked[0].waiter.set_result(answer)
    assert (await read_answer(reader))[0] == 502


@pytest.mark.parametrize("host", [b"a b", b"a/b", b"u@b", b"a\\b", b"a:b"])
async def test_a_host_that_is_none_is_refused_and_counted(desk: Desk, host: bytes) -> None:
    reader, writer = await desk.connect()
    writer.write(b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
    status, headers, body = await read_answer(reader)
    assert (status, headers["connection"], json.loads(body)["code"]) == (400, "close", "bad_request")
    assert await asyncio.wait_for(reader.read(), 30) == b""
    assert not desk.ingress.begun
    assert not desk.ingress.asked
    assert desk.ingress.routes.unmatched.counts == {("GET", 400): 1}


async def test_pipelined_requests_are_answered_in_order_whichever_way_they_take(desk: Desk) -> None:
    reader, writer = await desk.connect()
    one = b"GET /1 HTTP/1.1\r\n" + HOST + b"\r\n"
    head = b"HEAD /2 HTTP/1.1\r\n" + HOST + b"\r\n"  # takes the long way
    last = b"GET /3 HTTP/1.1\r\n" + HOST + b"\r\n"
    writer.write(one)
    await desk.ingress.until(lambda: desk.ingress.begun)
    writer.write(head + last)
    await asyncio.sleep(0.05)
    assert len(desk.ingress.begun) == 1
    assert not desk.ingress.asked
    desk.ingress.begun[0].on_answer(None, whole(b"first"))
    assert (await read_answer(reader))[2] == b"first"
    await desk.ingress.until(lambda: desk.ingress.asked)
    desk.ingress.asked[0].waiter.set_result(whole(b""))
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    await desk.ingress.until(lambda: len(desk.ingress.asked) + len(desk.ingress.begun) == 3)
    assert desk.ingress.asked[1].ask.path == "/3"
    desk.ingress.asked[1].waiter.set_result(whole(b"third"))
    assert (await read_answer(reader))[2] == b"third"
    writer.write(one)
    await desk.ingress.until(lambda: len(desk.ingress.begun) == 2)  # the short way again
    desk.ingress.begun[1].on_answer(None, whole(b"again"))
    assert (await read_answer(reader))[2] == b"again"


async def test_a_client_that_leaves_is_given_up_at_once(desk: Desk) -> None:
    _, writer = await desk.connect()
    writer.write(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
    await desk.ingress.until(lambda: desk.ingress.begun)
    writer.transport.abort()
    await desk.ingress.until(lambda: desk.ingress.abandoned)
    assert desk.ingress.abandoned == [desk.ingress.begun[0]]
    assert desk.server.in_flight == 0
    assert desk.ingress.endpoint.tally.counts == {("GET", CLIENT_GONE): 1}


async def test_an_answer_in_pieces_is_streamed_and_the_connection_goes_on(desk: Desk) -> None:
    reader, writer = await desk.connect()
    writer.write(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
    await desk.ingress.until(lambda: desk.ingress.begun)
    call = desk.ingress.begun[0]
    body = ResponseBody(memoryview(b"ab"), lambda _: None)
    call.on_answer(call, Response(200, [(b"content-length", b"4")], memoryview(b"ab"), body))
    body.add(memoryview(b"cd"), last=True)
    assert (await read_answer(reader))[::2] == (200, b"abcd")
    assert desk.ingress.endpoint.tally.counts == {("GET", 200): 1}
    writer.write(b"GET /none HTTP/1.1\r\n" + HOST + b"\r\n")
    assert (await read_answer(reader))[0] == 404
    assert desk.server.in_flight == 0


@pytest.mark.parametrize("status", [204, 304])
async def test_a_stream_whose_status_has_no_body_is_answered_and_the_connection_goes_on(
    desk: Desk, status: int
) -> None:
    reader, writer = await desk.connect()
    writer.write(b"DELETE / HTTP/1.1\r\n" + HOST + b"\r\n")
    await desk.ingress.until(lambda: desk.ingress.begun)
    call = desk.ingress.begun[0]
    call.on_answer(
        call, Response(status, [(b"x", b"y")], memoryview(b""), ResponseBody(memoryview(b""), lambda _: None))
    )
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)).decode()
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert "x: y" in head
    assert "server: muster" in head.lower()
    assert "connection: close" not in head.lower()
    writer.write(b"GET /none HTTP/1.1\r\n" + HOST + b"\r\n")
    assert (await read_answer(reader))[0] == 404
    assert desk.server.in_flight == 0


async def test_a_client_that_leaves_a_stream_is_given_up(desk: Desk) -> None:
    _, writer = await desk.connect()
    writer.write(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
    await desk.ingress.until(lambda: desk.ingress.begun)
    call = desk.ingress.begun[0]
    call.on_answer(
        call, Response(200, [], memoryview(b"ab"), ResponseBody(memoryview(b"ab"), lambda _: None))
    )
    await asyncio.sleep(0.05)
    writer.transport.abort()
    await desk.ingress.until(lambda: call in desk.ingress.abandoned)
    assert desk.server.in_flight == 0


async def test_what_is_not_simple_takes_the_long_way(desk: Desk) -> None:
    reader, writer = await desk.connect()
    writer.write(b"HEAD / HTTP/1.1\r\n" + HOST + b"\r\n")
    await desk.ingress.until(lambda: desk.ingress.asked)
    desk.ingress.asked[0].waiter.set_result(whole(b""))
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    writer.write(b"GET /-/healthz HTTP/1.1\r\n" + HOST + b"\r\n")
    assert (await read_answer(reader))[0] == 200
    desk.ingress.is_draining = True
    writer.write(b"GET /none HTTP/1.1\r\n" + HOST + b"\r\n")
    status, headers, _ = await read_answer(reader)
    assert (status, headers["connection"]) == (404, "close")
    assert not desk.ingress.begun


@pytest.mark.parametrize("before", [b"", b"GET /none HTTP/1.1\r\n" + HOST + b"\r\n"])
async def test_a_head_that_comes_too_slowly_is_cut_off(desk: Desk, before: bytes) -> None:
    reader, writer = await desk.connect()
    if before:
        writer.write(before)
        await read_answer(reader)
    for piece in (b"GET / HT", b"TP/1.1\r\n", b"Ho"):
        writer.write(piece)
        await asyncio.sleep(0.01)
    let_pass(HEADER_TIMEOUT_S)
    status, _, body = await read_answer(reader)
    assert (status, json.loads(body)["error"]["code"]) == (408, "head_too_slow")
    assert await asyncio.wait_for(reader.read(), 30) == b""


async def test_a_head_in_pieces_that_comes_in_time_is_as_good(desk: Desk) -> None:
    reader, writer = await desk.connect()
    writer.write(b"GET /none HT")
    await asyncio.sleep(0.05)
    writer.write(b"TP/1.1\r\n" + HOST + b"\r\n")
    assert (await read_answer(reader))[0] == 404
    let_pass(HEADER_TIMEOUT_S)
    await asyncio.sleep(0.05)
    writer.write(b"GET /none HTTP/1.1\r\n" + HOST + b"\r\n")
    assert (await read_answer(reader))[0] == 404
