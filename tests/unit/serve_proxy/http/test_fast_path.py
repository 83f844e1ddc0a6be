"""The short way of simple requests on a real connection: what takes it, in which order answers leave, and its ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import pytest
import uvloop

from serve_common.config.backend import EndpointOptions, ErrorFormat, HttpOptions
from serve_common.dispatch.admission import CLIENT_GONE
from serve_common.dispatch.calls import Response, ResponseBody
from serve_common.dispatch.errors import ReplicaError
from serve_common.dispatch.request_body import UploadMemory
from serve_common.errors import NoReplicaAvailable
from serve_proxy.http import bodies as given_back
from serve_proxy.http import connection as http_connection
from serve_proxy.http.connection import HttpConnection
from serve_proxy.http.server import drop_new_connections
from tests.support.http_desk import HOST, Desk, goes_on, listening, read_answer, whole
from tests.support.waiting import eventually, let_pass

HEADER_TIMEOUT_S = 40.0
"""No test sits through it: they let it pass at once."""


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    async with listening(Desk(HttpOptions(header_timeout_s=HEADER_TIMEOUT_S, body_bytes_max=100))) as desk:
        yield desk


both_ways = pytest.mark.parametrize("target", [b"/", b"http://h/"], ids=["short way", "long way"])


async def test_a_simple_request_is_asked_and_answered_without_a_task(desk: Desk) -> None:
    reader, _ = await desk.ask(b"POST /a/b?x=1", b"X-A: 1\r\nX-A: 2\r\nContent-Length: 2\r\n\r\nhi")
    ask = desk.ingress.begun[0].spec
    assert (ask.method, ask.path, ask.query, ask.body) == ("POST", "/a/b", "x=1", b"hi")
    assert [value for name, value in ask.headers if name == b"x-a"] == [b"1", b"2"]
    assert ask.client.startswith("127.0.0.1:")
    assert desk.server.in_flight == 1

    desk.ingress.answer(whole(b"ok", (b"Content-Type", b"text/x"), (b"set-cookie", b"a")))
    status, headers, body = await read_answer(reader)
    assert (status, body) == (200, b"ok")
    assert (headers["content-type"], headers["set-cookie"], headers["server"]) == ("text/x", "a", "muster")
    assert (headers["x-request-id"], headers["content-length"]) == ("made", "2")
    assert "date" in headers
    assert desk.server.in_flight == 0
    assert desk.ingress.endpoint.stats.counts == {("POST", 200): 1}
    assert not desk.ingress.asked


async def test_responses_that_come_in_one_read_are_written_at_its_end(desk: Desk) -> None:
    readers = [(await desk.connect())[0] for _ in range(2)]
    for writer in desk.writers:
        writer.write(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
    await desk.ingress.until(lambda: len(desk.ingress.begun) == 2)
    desk.server.start_gathering()
    for number, call in enumerate(desk.ingress.begun):
        call.on_response(call, whole(b"%d" % number))
    await asyncio.sleep(0.05)
    assert not any(reader._buffer for reader in readers)
    assert desk.server.in_flight == 2
    desk.server.write_gathered()
    assert {(await read_answer(reader))[2] for reader in readers} == {b"0", b"1"}
    assert desk.server.in_flight == 0
    await goes_on(readers[0], desk.writers[0])


@pytest.mark.parametrize(("status", "length"), [(204, None), (304, "7")])
async def test_an_answer_without_a_body_by_its_status_has_none(
    desk: Desk, status: int, length: str | None
) -> None:
    reader, writer = await desk.ask()
    desk.ingress.answer(whole(b"", (b"content-length", b"7"), (b"x", b""), status=status))
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)).decode()
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert "\r\nx: \r\n" in head
    assert (f"content-length: {length}" in head) if length else ("content-length" not in head)
    await goes_on(reader, writer)


async def test_errors_are_problems(desk: Desk) -> None:
    reader, writer = await desk.connect()
    for target, status, code in ((b"/none", 404, "not_found"), (b"/bug", 500, "internal")):
        writer.write(b"GET " + target + b" HTTP/1.1\r\n" + HOST + b"X-Request-ID: mine\r\n\r\n")
        got, headers, body = await read_answer(reader)
        assert (got, json.loads(body)["error"]["code"], headers["x-request-id"]) == (status, code, "mine")
    writer.write(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
    await desk.ingress.until(lambda: desk.ingress.begun)
    desk.ingress.begun[0].on_error(desk.ingress.begun[0], NoReplicaAvailable("none"))
    got, headers, _ = await read_answer(reader)
    assert got == 503
    assert "retry-after" in headers
    assert desk.ingress.routes.unmatched.counts == {("GET", 404): 1, ("GET", 500): 1}


@both_ways
async def test_errors_of_an_endpoint_have_its_format(desk: Desk, target: bytes) -> None:
    desk.ingress.endpoint.options = EndpointOptions(error_format=ErrorFormat.TEXT)
    reader, _ = await desk.ask(b"GET " + target, is_fast=target == b"/")
    error = ReplicaError("user_code_raised", 500, "ValueError: secret")
    if desk.ingress.begun:
        desk.ingress.begun[0].on_error(desk.ingress.begun[0], error)
    else:
        desk.ingress.asked[0].waiter.set_exception(error)
    status, headers, body = await read_answer(reader)
    assert (status, headers["content-type"], body) == (
        500,
        "text/plain; charset=utf-8",
        b"Internal Server Error",
    )


@both_ways
async def test_applications_get_a_path_that_was_removed_in_front(target: bytes) -> None:
    async with listening(Desk(HttpOptions(root_path="/outer"))) as desk:
        await desk.ask(b"GET " + target, is_fast=target == b"/")
        spec = (desk.ingress.begun[0] if desk.ingress.begun else desk.ingress.asked[0]).spec
        route = desk.ingress.endpoint.route
        assert (route, spec.path, spec.route) == ("/", "/outer/", "/outer")


@pytest.mark.parametrize(("error_format", "left_s"), [(ErrorFormat.TEXT, 90.0), (ErrorFormat.PROBLEM, 60.0)])
@both_ways
async def test_ray_serves_headers_change_the_time_limit_and_what_a_client_that_leaves_does(
    desk: Desk, target: bytes, error_format: ErrorFormat, left_s: float
) -> None:
    desk.ingress.endpoint.options = EndpointOptions(error_format=error_format)
    extra = b"X-Request-Timeout-Seconds: 90\r\nX-Request-Disconnect-Disabled: ?1\r\n"
    await desk.ask(b"GET " + target, extra + b"\r\n", is_fast=target == b"/")
    spec = (desk.ingress.begun[0] if desk.ingress.begun else desk.ingress.asked[0]).spec
    assert spec.outlives_client
    assert spec.deadline - asyncio.get_running_loop().time() == pytest.approx(left_s, abs=20)


@pytest.mark.parametrize("is_streamed", [False, True])
@both_ways
async def test_headers_leave_as_the_bytes_that_they_are(
    desk: Desk, target: bytes, *, is_streamed: bool
) -> None:
    reader, _ = await desk.ask(b"GET " + target, is_fast=target == b"/")
    answer = whole(b"ok", (b"x-latin", b"\xe4\xff"), (b"x-latin", "ä€".encode()), (b"x", b"1"))
    if is_streamed:
        body = ResponseBody(memoryview(b"o"), lambda _: None)
        body.add(memoryview(b"k"), last=True)
        answer = Response(200, [*answer.headers, (b"content-length", b"2")], memoryview(b"o"), body)
    desk.ingress.answer(answer)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    assert await asyncio.wait_for(reader.readexactly(2), 30) == b"ok"
    lines = head.split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 200 OK"
    assert lines[1:4] == [b"x-latin: \xe4\xff", "x-latin: ä€".encode(), b"x: 1"]
    assert b"server: muster" in [line.lower() for line in lines]


@both_ways
@pytest.mark.parametrize("pieces", [(b"abcd",), (b"a", b"bcd"), (b"ab", b"cd"), (b"a",), (b"",)], ids=str)
async def test_a_body_of_another_length_than_promised_is_cut_there_and_ends_the_connection(
    desk: Desk, target: bytes, pieces: tuple[bytes, ...]
) -> None:
    """More would be read as the next response."""
    reader, writer = await desk.ask(b"GET " + target, is_fast=target == b"/")
    body = ResponseBody(memoryview(pieces[0]), lambda _: None)
    desk.ingress.answer(Response(200, [(b"content-length", b"2")], memoryview(pieces[0]), body))
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    assert b"content-length: 2\r\n" in head.lower()
    for piece in pieces[1:]:
        await asyncio.sleep(0.02)  # each in a write of its own
        body.add(memoryview(piece), last=False)
    await asyncio.sleep(0.02)
    body.add(memoryview(b""), last=True)
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := await asyncio.wait_for(reader.read(100), 30):
            received += data
    assert received == b"".join(pieces)[:2]
    writer.close()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_is_reset_when_its_response_comes_harms_no_one_else(
    desk: Desk, *, is_streamed: bool
) -> None:
    """The response is written while a link is read, which an exception would end."""
    await desk.ask()
    (call,) = desk.ingress.begun
    (connection,) = desk.server._http.connections
    assert connection.transport is not None
    connection.transport.abort()
    first = memoryview(b"a" * 100_000)
    body = ResponseBody(first, lambda _: None) if is_streamed else None
    call.on_response(call, Response(200, [], first, body))
    await desk.ingress.until(lambda: desk.server.in_flight == 0)
    assert desk.ingress.endpoint.stats.counts == {("GET", CLIENT_GONE): 1}


async def test_a_stream_to_an_old_client_ends_with_its_connection(desk: Desk) -> None:
    reader, writer = await desk.connect()
    writer.write(b"GET / HTTP/1.0\r\nHost: h\r\nConnection: keep-alive\r\n\r\n")
    await desk.ingress.until(lambda: desk.ingress.asked)
    body = ResponseBody(memoryview(b"ab"), lambda _: None)
    body.add(memoryview(b"cd"), last=True)
    desk.ingress.asked[0].waiter.set_result(Response(200, [], memoryview(b"ab"), body))
    received = await asyncio.wait_for(reader.read(), 30)
    assert received.partition(b"\r\n\r\n")[2] == b"abcd"


@both_ways
async def test_a_stream_begins_before_its_first_piece(desk: Desk, target: bytes) -> None:
    reader, _ = await desk.ask(b"GET " + target, is_fast=target == b"/")
    body = ResponseBody(memoryview(b""), lambda _: None)
    answer = Response(200, [], memoryview(b""), body)
    desk.ingress.answer(answer)
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)).startswith(b"HTTP/1.1 200 OK\r\n")
    body.add(memoryview(b"ab"), last=True)
    assert await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 30) == b"2\r\nab\r\n0\r\n\r\n"


@both_ways
@pytest.mark.parametrize("value", [b"a\x01", b"a\r\nset-cookie: b"], ids=["control byte", "line end"])
async def test_an_answer_that_would_break_apart_is_a_bad_gateway(
    desk: Desk, target: bytes, value: bytes
) -> None:
    reader, _ = await desk.ask(b"GET " + target, is_fast=target == b"/")
    desk.ingress.answer(whole(b"", (b"x", value)))
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
    desk.ingress.answer(whole(b"first"))
    assert (await read_answer(reader))[2] == b"first"
    await desk.ingress.until(lambda: desk.ingress.asked)
    desk.ingress.asked[0].waiter.set_result(whole(b""))
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    await desk.ingress.until(lambda: len(desk.ingress.asked) + len(desk.ingress.begun) == 3)
    assert desk.ingress.asked[1].spec.path == "/3"
    desk.ingress.asked[1].waiter.set_result(whole(b"third"))
    assert (await read_answer(reader))[2] == b"third"
    writer.write(one)
    await desk.ingress.until(lambda: len(desk.ingress.begun) == 2)  # the short way again
    desk.ingress.begun[1].on_response(None, whole(b"again"))
    assert (await read_answer(reader))[2] == b"again"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_leaves_is_given_up_at_once(desk: Desk, *, is_streamed: bool) -> None:
    _, writer = await desk.ask()
    (call,) = desk.ingress.begun
    if is_streamed:
        body = ResponseBody(memoryview(b"ab"), lambda _: None)
        call.on_response(call, Response(200, [], memoryview(b"ab"), body))
        await asyncio.sleep(0.05)
    writer.transport.abort()
    await desk.ingress.until(lambda: call in desk.ingress.abandoned)
    assert desk.server.in_flight == 0
    if not is_streamed:
        assert desk.ingress.abandoned == [call]
        assert desk.ingress.endpoint.stats.counts == {("GET", CLIENT_GONE): 1}


async def test_an_answer_in_pieces_is_streamed_and_the_connection_goes_on(desk: Desk) -> None:
    reader, writer = await desk.ask()
    call = desk.ingress.begun[0]
    body = ResponseBody(memoryview(b"ab"), lambda _: None)
    call.on_response(call, Response(200, [(b"content-length", b"4")], memoryview(b"ab"), body))
    body.add(memoryview(b"cd"), last=True)
    assert (await read_answer(reader))[::2] == (200, b"abcd")
    assert desk.ingress.endpoint.stats.counts == {("GET", 200): 1}
    await goes_on(reader, writer)
    assert desk.server.in_flight == 0


@pytest.mark.parametrize("status", [204, 304])
async def test_a_stream_whose_status_has_no_body_is_answered_and_the_connection_goes_on(
    desk: Desk, status: int
) -> None:
    reader, writer = await desk.ask(b"DELETE /")
    call = desk.ingress.begun[0]
    call.on_response(
        call, Response(status, [(b"x", b"y")], memoryview(b""), ResponseBody(memoryview(b""), lambda _: None))
    )
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)).decode()
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert "x: y" in head
    assert "server: muster" in head.lower()
    assert "connection: close" not in head.lower()
    await goes_on(reader, writer)
    assert desk.server.in_flight == 0


async def test_what_is_not_simple_takes_the_long_way(desk: Desk) -> None:
    reader, writer = await desk.ask(b"HEAD /", is_fast=False)
    desk.ingress.answer(whole(b""))
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
    await goes_on(reader, writer)


# Bodies that find no room: refused at their head however their client sends; what it still sends is dropped.


MIB = 1024 * 1024
BODY_BYTES_MAX = 8 * MIB
LENGTH = b"Content-Length: %d\r\n" % (6 * MIB)
CHUNKED = b"Transfer-Encoding: chunked\r\n"


@pytest.fixture
async def full_desk() -> AsyncIterator[Desk]:
    full_desk = Desk(HttpOptions(body_bytes_max=BODY_BYTES_MAX))
    full_desk.ingress.memory = UploadMemory(admitted_bytes_max=MIB)
    full_desk.requests._endpoints._memory = full_desk.ingress.memory
    full_desk.ingress.memory.admit(MIB)
    async with listening(full_desk):
        yield full_desk


def connection_of(full_desk: Desk) -> HttpConnection:
    (connection,) = full_desk.server._http.connections
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
async def test_it_is_refused_when_its_head_has_come(full_desk: Desk, lines: bytes, version: bytes) -> None:
    reader, writer = await full_desk.connect()
    writer.write(b"POST /a " + version + b"\r\n" + HOST + lines + b"\r\n")
    await refused(reader)
    assert not full_desk.ingress.asked
    assert not full_desk.ingress.begun
    assert full_desk.ingress.memory.refused == 1
    assert full_desk.ingress.endpoint.stats.counts == {("POST", 503): 1}
    assert full_desk.server.in_flight == 0
    assert await asyncio.wait_for(reader.read(), 30) == b"", "nothing else comes"


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"], ids=["short way", "long way"])
async def test_who_sends_everything_first_is_answered_and_not_reset(full_desk: Desk, version: bytes) -> None:
    reader, writer = await full_desk.connect()
    writer.write(b"POST /a " + version + b"\r\n" + HOST + LENGTH + b"\r\n" + bytes(6 * MIB))
    async with asyncio.timeout(30):
        await writer.drain()
        while writer.transport.get_write_buffer_size():  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
    await refused(reader)
    writer.close()
    await eventually(lambda: not full_desk.server.connections)


async def test_who_sends_more_than_a_body_may_have_before_it_reads_is_told_so(full_desk: Desk) -> None:
    size = BODY_BYTES_MAX + 16 * MIB
    reader, writer = await full_desk.connect()
    writer.write(b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % size + bytes(size))
    await eventually(lambda: not writer.transport.get_write_buffer_size())
    assert (await read_answer(reader))[0] == 413


async def test_nothing_of_it_is_held(full_desk: Desk) -> None:
    reader, writer = await full_desk.connect()
    writer.write(b"POST /a HTTP/1.1\r\n" + HOST + LENGTH + b"\r\n" + bytes(MIB))
    await refused(reader)
    assert connection_of(full_desk)._last_payload._size == 0


@pytest.mark.parametrize("is_apart", [False, True])
async def test_what_comes_before_it_is_answered_first_and_what_comes_behind_is_not(
    full_desk: Desk, is_apart: bool
) -> None:
    reader, writer = await full_desk.connect()
    good = b"GET /a HTTP/1.1\r\n" + HOST + b"\r\n"
    writer.write(good)
    if is_apart:
        await full_desk.ingress.until(lambda: full_desk.ingress.begun)
    writer.write(b"POST /a HTTP/1.1\r\n" + HOST + LENGTH + b"\r\n" + bytes(6 * MIB) + good)
    await full_desk.ingress.until(lambda: full_desk.ingress.begun or full_desk.ingress.asked)
    full_desk.ingress.answer(whole(b"ok"))
    assert (await read_answer(reader))[::2] == (200, b"ok")
    await refused(reader)
    assert await asyncio.wait_for(reader.read(), 30) == b""
    assert len(full_desk.ingress.begun) + len(full_desk.ingress.asked) == 1


@pytest.mark.parametrize(
    ("path", "length", "status"),
    [(b"/none", 6 * MIB, 404), (b"/a", BODY_BYTES_MAX + 1, 413)],
)
async def test_what_is_wrong_with_a_request_is_told_before_that_there_is_no_room(
    full_desk: Desk, path: bytes, length: int, status: int
) -> None:
    reader, writer = await full_desk.connect()
    writer.write(b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % (path, length))
    assert (await read_answer(reader))[0] == status


async def test_a_small_body_that_finds_room_is_let_in_beside_them(full_desk: Desk) -> None:
    full_desk.ingress.memory.leave(100)
    reader, writer = await full_desk.connect()
    writer.write(b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: 100\r\n\r\n")
    await asyncio.sleep(0.05)
    writer.write(bytes(100))
    await full_desk.ingress.until(lambda: full_desk.ingress.asked)
    full_desk.ingress.answer(whole(b"ok"))
    assert (await read_answer(reader))[0] == 200


async def test_no_more_is_dropped_than_so_much(full_desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "_LINGERS_IDLE_S", 0.5)
    monkeypatch.setattr(http_connection, "_DROPPED_BYTES_MAX", 8 * MIB)
    reader, writer = await full_desk.connect()
    writer.write(b"POST /a HTTP/1.1\r\n" + HOST + CHUNKED + b"\r\n")
    await refused(reader)
    connection = connection_of(full_desk)

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
    full_desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "_LINGERS_IDLE_S", 0.1)
    reader, writer = await full_desk.connect()
    writer.write(b"POST /a HTTP/1.1\r\n" + HOST + LENGTH + b"\r\n")
    await refused(reader)
    await eventually(lambda: not full_desk.server.connections)


def test_connections_that_wait_are_accepted_many_in_a_turn() -> None:
    """libuv accepts one; while bodies are read a turn is long."""

    async def turns_for(clients: int) -> int:
        full_desk = Desk(HttpOptions())
        await full_desk.start()
        host, _, port = full_desk.address.rpartition(":")
        with contextlib.ExitStack() as stack:
            for _ in range(clients):
                stack.enter_context(socket.create_connection((host, int(port))))
            turns = 0
            async with asyncio.timeout(30):
                while full_desk.server.connections < clients:
                    turns += 1
                    await asyncio.sleep(0)
        await full_desk.server.close(1.0)
        return turns

    assert uvloop.run(turns_for(60)) < 30


# That a listener can be emptied and closed without losing anybody.


def test_who_waits_is_still_accepted_and_heard_and_nobody_comes_after_them() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), timeout=5) as early,
        socket.socket() as late,
    ):
        early.sendall(b"request")
        drop_new_connections(listener)
        late.settimeout(0.3)
        with pytest.raises(TimeoutError):
            late.connect(listener.getsockname())
        listener.settimeout(5)
        accepted, _ = listener.accept()
        with accepted:
            accepted.settimeout(5)
            assert accepted.recv(100) == b"request"
            accepted.sendall(b"answer")
            assert early.recv(100) == b"answer"
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()


# When a proxy gives memory back to the system, and when it takes what is left for needed.


async def test_what_is_still_held_at_the_first_try_is_given_back_at_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resident = [60 * MIB]
    freed_by_try = [60 * MIB, 0, 40 * MIB]
    tries = [0]

    def trim(_pad: int) -> int:
        resident[0] -= freed_by_try[tries[0]] if tries[0] < len(freed_by_try) else 0
        tries[0] += 1
        return 1

    async def settle(count: int) -> None:
        await eventually(lambda: tries[0] >= count)
        for _ in range(100):
            await asyncio.sleep(0)
        assert tries[0] == count

    monkeypatch.setattr(given_back, "find_trim", lambda: trim)
    monkeypatch.setattr(given_back, "resident_bytes", lambda: resident[0])
    monkeypatch.setattr(given_back, "MEMORY_CHECK_PERIOD_S", 0)
    giving = asyncio.get_running_loop().create_task(given_back.release_memory(UploadMemory()))
    await asyncio.sleep(0)
    resident[0] = 160 * MIB
    await settle(3)
    assert resident[0] == 60 * MIB
    resident[0] = 100 * MIB
    await settle(3 + given_back._TRIES_MAX)
    giving.cancel()
    await asyncio.gather(giving, return_exceptions=True)
