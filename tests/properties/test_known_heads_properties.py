"""A head that is known from the request before: it is read as the parser would read it, or not at all."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParser, RawRequestMessage
from hypothesis import given
from hypothesis import strategies as st

from serve_proxy.core.headers import read_request_headers
from serve_proxy.http.known_heads import KnownHead

FIRST = [
    b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n",
    b"DELETE /a/b?c=d&e HTTP/1.1\r\nHost: h:1\r\nAccept: */*\r\nX-Empty:\r\n\r\n",
    b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nhi",
    b"POST /a?b HTTP/1.1\r\ncontent-length:10\r\nHost: h\r\nContent-Type: text/plain\r\n\r\n0123456789",
    b"PUT /a HTTP/1.1\r\nHost: h\r\nX-A: 1\r\nX-A: 2\r\nContent-Length: 0\r\n\r\n",
]
PIECES = [
    *(
        b"\r\n",
        b"\r",
        b"\n",
        b"\r\n\r\n",
        b" ",
        b"\t",
        b"/",
        b"?",
        b"#",
        b"%0d%0a",
        b"\x00",
        b"\xff",
        b"0",
        b"+1",
    ),
    *(
        b" HTTP/1.1\r\n",
        b" HTTP/1.0\r\n",
        b"GET ",
        b"POST ",
        b"HEAD ",
        b"Host: x\r\n",
        b"Content-Length: 3\r\n",
    ),
    *(
        b"Transfer-Encoding: chunked\r\n",
        b"Upgrade: websocket\r\nConnection: upgrade\r\n",
        b"http://h/",
        b"hi",
    ),
]


class Parsed(NamedTuple):
    """A request that was received whole, and nothing else."""

    message: RawRequestMessage
    body: bytes


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def parse(data: bytes, loop: asyncio.AbstractEventLoop) -> Parsed | None:
    parser = HttpRequestParser(BaseProtocol(loop), loop, 2**16, auto_decompress=False)
    try:
        messages, _, tail = parser.feed_data(data)
    except HttpProcessingError:
        return None
    if len(messages) != 1 or tail or not messages[0][1].is_eof():
        return None
    return Parsed(messages[0][0], messages[0][1].read_nowait())


targets = st.one_of(st.text("ab/?=&%;:@!.~", max_size=6), st.text('a/# \\\t"<é', max_size=4)).map(
    lambda text: b"/" + text.encode()
)
lengths = st.one_of(
    st.integers(0, 12).map(lambda size: b"%d" % size),
    st.sampled_from([b"02", b"+2", b" 2", b"2 ", b"2,2", b""]),
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A first request; and another that has another target, length and body, or differs in a few bytes anywhere."""
    first = data = draw(st.sampled_from(FIRST))
    if draw(st.booleans()):
        data = re.sub(rb"/\S*", lambda _: draw(targets), data, count=1)
        head, _, body = data.partition(b"\r\n\r\n")
        size = len(body) + draw(st.sampled_from([0, 0, 0, 1, 5]))
        body = draw(st.sampled_from([body, b"x" * size, b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"]))
        length = draw(st.one_of(st.just(b"%d" % len(body)), lengths))
        head = re.sub(rb"(?i)(content-length: ?)\d+", lambda found: found[1] + length, head)
        return first, head + b"\r\n\r\n" + body
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.sampled_from(PIECES)) + data[at + draw(st.integers(0, 4)) :]
    return first, data


@given(both=requests())
def test_a_known_head_is_read_as_the_parser_reads_it(
    loop: asyncio.AbstractEventLoop, both: tuple[bytes, bytes]
) -> None:
    first, data = both
    before = parse(first, loop)
    assert before is not None
    headers = read_request_headers(before.message.raw_headers)
    known = KnownHead.remember(first, before.message, headers, "10.0.0.9:5555", "http")
    assert known is not None
    assert known.read(first) is not None
    found = known.read(data)
    if found is None:
        return
    parsed = parse(data, loop)
    assert parsed is not None
    message = parsed.message
    assert found == (message.path, parsed.body)
    assert (message.method, message.version) == (before.message.method, before.message.version)
    assert (message.should_close, message.upgrade, message.chunked) == (False, False, False)
    assert without_length(message) == without_length(before.message)


def without_length(message: RawRequestMessage) -> list[tuple[bytes, bytes]]:
    return [header for header in message.raw_headers if header[0].lower() != b"content-length"]
