"""Requests whose head is known from the request before: which are, what they become, and when they are parsed again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from serve_common.config.backend import HttpOptions
from serve_common.dispatch.calls import RequestSpec, Response, ResponseBody
from serve_proxy.http import connection as http_connection
from serve_proxy.http.known_heads import KnownHead
from tests.support.http_desk import Desk, goes_on, listening, read_answer, whole


class Conversation:
    """One connection over which requests are sent and answered."""

    def __init__(self, desk: Desk, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.desk = desk
        self.reader = reader
        self.writer = writer
        self.parsed = 0
        """Requests that were parsed."""

    async def send(self, data: bytes):
        """The specification of the request in ``data``, which is answered with ok."""
        ingress = self.desk.ingress
        before = len(ingress.begun)
        self.writer.write(data)
        await ingress.until(lambda: len(ingress.begun) > before)
        call = ingress.begun[before]
        call.on_response(call, whole(b"ok"))
        assert (await read_answer(self.reader))[0] == 200
        return call.spec


@pytest.fixture
async def talk(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Conversation]:
    parse = http_connection.HttpConnection._parse

    def count(self, data: bytes):
        talk.parsed += 1
        return parse(self, data)

    monkeypatch.setattr(http_connection.HttpConnection, "_parse", count)
    async with listening(Desk(HttpOptions(body_bytes_max=100))) as desk:
        talk = Conversation(desk, *await desk.connect())
        yield talk


def post(target: bytes, body: bytes, headers: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n%b\r\n%b" % (
        target,
        len(body),
        headers,
        body,
    )


async def test_the_third_request_with_the_same_head_is_not_parsed(talk: Conversation) -> None:
    for number in range(5):
        target, body = b"/a/%d?b=%d" % (number, number), b"x" * number * number
        spec = await talk.send(post(target, body, b"X-A: 1\r\n"))
        assert (spec.method, spec.path, spec.query) == ("POST", f"/a/{number}", f"b={number}")
        assert (spec.body, spec.request_id) == (body, "made")
        assert dict(spec.headers)[b"x-a"] == b"1"
        assert [name for name, _ in spec.headers].count(b"x-forwarded-for") == 1
    assert talk.parsed == 2


class Observer:
    """Leaves itself and another traceparent in each request's headers, as traces and the access log do."""

    def __init__(self) -> None:
        self.seen: list[Observed] = []

    def start(self, headers, _method, _path, _scheme, _request_id, *, peer, body) -> None:
        headers.observer = Observed(len(self.seen), peer, body.total_bytes)
        headers.traceparent = f"trace {len(self.seen)}"
        self.seen.append(headers.observer)


class Observed:
    """One request, as its observer sees it."""

    def __init__(self, number: int, peer: str, body_bytes: int) -> None:
        self.number, self.peer, self.body_bytes = number, peer, body_bytes
        self.specs: list[RequestSpec] = []
        self.statuses: list[int] = []

    def on_request(self, spec: RequestSpec) -> None:
        self.specs.append(spec)

    def ended(self, status: int, _problem: object, _sent_bytes: int) -> None:
        self.statuses.append(status)


async def test_each_request_with_a_known_head_has_its_own_observer(talk: Conversation) -> None:
    observer = talk.desk.requests.observer = Observer()  # type: ignore[assignment]
    for number in range(6):
        spec = await talk.send(post(b"/a", b"x" * number))
        assert spec.traceparent == f"trace {number}"
        assert spec.trace is observer.seen[number]
        assert [value for name, value in spec.headers if name == b"x-forwarded-for"] == [b"127.0.0.1"]
    assert talk.parsed == 2
    assert [(len(one.specs), one.statuses, one.body_bytes) for one in observer.seen] == [
        (1, [200], number) for number in range(6)
    ]
    assert len({one.peer for one in observer.seen}) == 1


async def test_another_head_is_parsed_and_then_known(talk: Conversation) -> None:
    for value, parsed in ((b"1", 1), (b"1", 2), (b"1", 2), (b"2", 3), (b"2", 3), (b"1", 4), (b"1", 4)):
        spec = await talk.send(b"GET / HTTP/1.1\r\nHost: h\r\nX-A: %b\r\n\r\n" % value)
        assert dict(spec.headers)[b"x-a"] == value
        assert talk.parsed == parsed


@pytest.mark.parametrize(
    "parts",
    [
        (b"GET /b HTTP/1.1\r\nHost: h\r\n", b"\r\n"),
        (b"G", b"ET /b HTTP/1.1\r\nHost: h\r\n\r\n"),
        (b"\r\n", b"GET /b HTTP/1.1\r\nHost: h\r\n\r\n"),
        (b"GET /b HTTP/1.1\r\nHost: h\r\n\r\n", b"\r\n"),
        (b"POST /b HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n", b"hi"),
        (b"POST /b HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",),
        (b"GET http://h/b HTTP/1.1\r\nHost: h\r\n\r\n",),
    ],
)
async def test_what_comes_otherwise_is_parsed(talk: Conversation, parts: tuple[bytes, ...]) -> None:
    for _ in range(3):
        await talk.send(b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n")
    parsed = talk.parsed
    ingress = talk.desk.ingress
    begun = len(ingress.begun)
    for number, part in enumerate(parts):
        if number:
            await asyncio.sleep(0.02)
        talk.writer.write(part)
    await ingress.until(lambda: ingress.asked or len(ingress.begun) > begun)
    if ingress.asked:  # it has taken the regular path
        spec = ingress.asked[0].spec
        ingress.asked[0].waiter.set_result(whole(b"ok"))
    else:
        spec = ingress.begun[begun].spec
        ingress.begun[begun].on_response(ingress.begun[begun], whole(b"ok"))
    assert (await read_answer(talk.reader))[0] == 200
    assert spec.path == "/b"
    assert talk.parsed > parsed
    for number in range(3):
        spec = await talk.send(b"GET /c/%d HTTP/1.1\r\nHost: h\r\n\r\n" % number)
        assert spec.path == f"/c/{number}"


async def test_requests_behind_one_with_a_known_head_wait_for_its_answer(talk: Conversation) -> None:
    ingress = talk.desk.ingress
    for _ in range(3):
        await talk.send(b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n")
    talk.writer.write(b"GET /b HTTP/1.1\r\nHost: h\r\n\r\n")
    await ingress.until(lambda: len(ingress.begun) == 4)
    talk.writer.write(b"GET /c HTTP/1.1\r\nHost: h\r\n\r\n" * 2)
    await asyncio.sleep(0.05)
    assert not ingress.asked
    ingress.begun[3].on_response(ingress.begun[3], whole(b"b"))
    for number in range(2):
        await ingress.until(lambda number=number: len(ingress.asked) > number)
        ingress.asked[number].waiter.set_result(whole(b"c"))
    assert [(await read_answer(talk.reader))[2] for _ in range(3)] == [b"b", b"c", b"c"]


async def test_a_streamed_response_to_a_known_head_is_written_whole(talk: Conversation) -> None:
    ingress = talk.desk.ingress
    for _ in range(3):
        await talk.send(b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n")
    parsed = talk.parsed
    talk.writer.write(b"GET /b HTTP/1.1\r\nHost: h\r\n\r\n")
    await ingress.until(lambda: len(ingress.begun) == 4)
    stream = ResponseBody(memoryview(b"one"), lambda _credit: None)
    stream.add(memoryview(b"two"), last=True)
    head = [(b"content-length", b"6")]
    ingress.begun[3].on_response(ingress.begun[3], Response(200, head, memoryview(b"one"), stream))
    assert (await read_answer(talk.reader))[2] == b"onetwo"
    await goes_on(talk.reader, talk.writer)
    assert talk.parsed == parsed


async def test_limits_hold_for_known_heads(talk: Conversation) -> None:
    for _ in range(3):
        await talk.send(post(b"/a", b"hi"))
    talk.writer.write(post(b"/a", b"x" * 101))
    assert (await read_answer(talk.reader))[0] == 413


async def test_while_draining_a_known_head_is_answered_with_the_end_of_its_connection(
    talk: Conversation,
) -> None:
    for _ in range(3):
        await talk.send(b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n")
    talk.desk.ingress.is_draining = True
    talk.writer.write(b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n")
    await talk.desk.ingress.until(lambda: talk.desk.ingress.asked)
    talk.desk.ingress.asked[0].waiter.set_result(whole(b"ok"))
    status, headers, _ = await read_answer(talk.reader)
    assert (status, headers["connection"]) == (200, "close")


async def test_a_client_that_leaves_is_abandoned(talk: Conversation) -> None:
    for _ in range(3):
        await talk.send(b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n")
    talk.writer.write(b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n")
    await talk.desk.ingress.until(lambda: len(talk.desk.ingress.begun) == 4)
    talk.writer.close()
    await talk.desk.ingress.until(lambda: talk.desk.ingress.abandoned)
    assert talk.desk.server.in_flight == 0


def test_long_heads_are_not_remembered() -> None:
    class Message:
        method, path, chunked = "GET", "/", False
        raw_headers = ((b"Host", b"h"), (b"X", b"x" * 4000))

    data = b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"x" * 4000 + b"\r\n\r\n"
    assert KnownHead.remember(data, Message(), None, "", "http") is None  # type: ignore[arg-type]
