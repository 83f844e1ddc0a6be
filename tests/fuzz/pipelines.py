"""Hostile HTTP/1.1 pipelines, and what the two reference parsers make of them.

A pipeline is the bytes of one connection. Every request in it, and every one that is hidden in a body, has a target of
its own below ``/echo/<token>/``, by which an application tells whose it is.
"""

from __future__ import annotations

import asyncio
import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

COMPLETE, INCOMPLETE, REFUSED, CLOSED = "complete", "incomplete", "refused", "closed"
HEAD_BYTES_MAX: Final = 8190
"""Of a line, in the proxy."""


class Message(NamedTuple):
    """A whole request, as an application sees it."""

    method: str
    path: str
    body: bytes


@dataclass
class Reading:
    """What one server made of a pipeline."""

    messages: list[Message] = field(default_factory=list)
    end: str = COMPLETE
    why: str = ""
    methods: list[str] = field(default_factory=list)
    """Of all requests that must be answered, whether an application can tell that they are this pipeline's or not."""


class Pipeline(NamedTuple):
    number: int
    sent: bytes
    cuts: tuple[int, ...]
    """Where it is split into several writes."""
    is_cut_off: bool
    """The client leaves at its end, which may be anywhere."""
    kinds: tuple[str, ...]
    optional: frozenset[str] = frozenset()
    """Paths of requests that a server may refuse for another reason than their form: their own upgrade."""
    keeps_alive: bool = False
    """There is one in HTTP/1.0 that asks for the connection to stay, which a server may grant."""
    good: int = 0
    """So many at its beginning are beyond doubt."""


# -- the generator --


class Writer:
    """Draws one pipeline."""

    def __init__(self, rng: random.Random, number: int) -> None:
        self.rng = rng
        self.number = number
        self.targets = 0
        self.optional: set[str] = set()
        self.keeps_alive = False

    def target(self) -> bytes:
        self.targets += 1
        return f"/echo/{token(self.number)}/{self.targets}".encode()

    def line(self, method: bytes | None = None, version: bytes = b"HTTP/1.1") -> bytes:
        method = method or self.rng.choice((b"GET", b"POST", b"PUT", b"DELETE", b"PATCH", b"OPTIONS"))
        return b"%b %b %b\r\nHost: h\r\n" % (method, self.target(), version)

    def hidden(self) -> bytes:
        """A request that must stay a part of a body."""
        return b"GET %b HTTP/1.1\r\nHost: h\r\n\r\n" % self.target()

    def body(self) -> bytes:
        rng = self.rng
        return rng.choice(
            (
                b"",
                b"x",
                b"hello",
                self.hidden(),
                b"0\r\n\r\n",
                b"\r\n",
                rng.randbytes(rng.choice((3, 90, 5000))),
            )
        )

    def chunks(self, body: bytes) -> bytes:
        rng = self.rng
        out, at = [], 0
        while at < len(body):
            size = rng.randint(1, max(1, len(body)))
            piece = body[at : at + size]
            at += size
            extension = rng.choice((b"", b"", b"", b";a=b", b";a", b';a="b"'))
            out.append(
                rng.choice((b"%x", b"%X", b"0%x")) % len(piece) + extension + b"\r\n" + piece + b"\r\n"
            )
        trailer = rng.choice((b"", b"", b"", b"X-T: 1\r\n"))
        return b"".join(out) + b"0\r\n" + trailer + b"\r\n"

    # -- kinds of requests --

    def plain(self) -> bytes:
        return self.line(self.rng.choice((b"GET", b"DELETE", b"OPTIONS"))) + b"\r\n"

    def head(self) -> bytes:
        return self.line(b"HEAD") + b"\r\n"

    def length(self) -> bytes:
        body = self.body()
        return self.line(b"POST") + b"Content-Length: %d\r\n\r\n" % len(body) + body

    def chunked(self) -> bytes:
        return self.line(b"POST") + b"Transfer-Encoding: chunked\r\n\r\n" + self.chunks(self.body())

    def welcome(self) -> bytes:
        body = self.body()
        return self.line(b"POST") + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    def absolute(self) -> bytes:
        return b"GET http://h%b HTTP/1.1\r\nHost: other\r\n\r\n" % self.target()

    def blank(self) -> bytes:
        return b"\r\n" * self.rng.randint(1, 3) + self.plain()

    def both(self) -> bytes:
        """The classic: a length and a coding."""
        hidden = self.hidden()
        body = self.rng.choice((self.chunks(b"a"), b"0\r\n\r\n", self.chunks(hidden)))
        length = self.rng.choice((len(body), 4, 0, len(body) + len(hidden)))
        fields = [b"Content-Length: %d\r\n" % length, b"Transfer-Encoding: chunked\r\n"]
        self.rng.shuffle(fields)
        return self.line(b"POST") + b"".join(fields) + b"\r\n" + body + self.rng.choice((b"", hidden))

    def lengths(self) -> bytes:
        body = self.hidden()
        first, second = self.rng.sample(
            (b"0", b"5", b"%d" % len(body), b"+5", b"0x5", b"5,5", b" 5 ", b"-1"), 2
        )
        form = self.rng.choice(
            (b"Content-Length: %b\r\nContent-Length: %b\r\n", b"Content-Length: %b, %b\r\n")
        )
        return self.line(b"POST") + form % (first, second) + b"\r\n" + body

    def bad_length(self) -> bytes:
        value = self.rng.choice(
            (b"+5", b"-5", b"0x5", b"5 5", b"5\t", b"", b"five", b"00005", b"5;", b"1_0", b"9" * 30, b"\xb2")
        )
        return self.line(b"POST") + b"Content-Length: " + value + b"\r\n\r\nhello" + self.hidden()

    def bad_coding(self) -> bytes:
        value = self.rng.choice(
            (
                b"xchunked",
                b"chunked, identity",
                b"identity",
                b"gzip, chunked",
                b"chunked, chunked",
                b"Chunked",
                b"\tchunked",
                b"chunked\t",
                b"\x0bchunked",
                b'"chunked"',
                b"chunked;q=1",
                b"",
                b"chunked ",
                b"identity\r\nTransfer-Encoding: chunked",
                b"chunked\r\nTransfer-Encoding: identity",
                b"\r\n chunked",
            )
        )
        name = self.rng.choice(
            (
                b"Transfer-Encoding: ",
                b"Transfer-Encoding : ",
                b"transfer-encoding:",
                b"Transfer_Encoding: ",
                b" Transfer-Encoding: ",
                b"Transfer-Encoding\t: ",
                b"X: y\nTransfer-Encoding: ",
                b"\x00Transfer-Encoding: ",
            )
        )
        return self.line(b"POST") + name + value + b"\r\n\r\n" + self.chunks(self.body()) + self.hidden()

    def bad_chunk(self) -> bytes:
        hidden = self.hidden()
        body = self.rng.choice(
            (
                b"5\r\nhelloX\r\n0\r\n\r\n",
                b"5\nhello\n0\n\n",
                b"-5\r\nhello\r\n0\r\n\r\n",
                b"0x5\r\nhello\r\n0\r\n\r\n",
                b"5 \r\nhello\r\n0\r\n\r\n",
                b" 5\r\nhello\r\n0\r\n\r\n",
                b"5\r\nhello0\r\n\r\n",
                b"g\r\n\r\n0\r\n\r\n",
                b"5;\nx\r\nhello\r\n0\r\n\r\n",
                b"5;a=\x00\r\nhello\r\n0\r\n\r\n",
                b"ffffffffffffffff\r\n",
                b"f" * 40 + b"\r\n",
                b"5\r\nhello\r\n0\r\nX T: 1\r\n\r\n",
                b"5\r\nhello\r\n0\r\n" + hidden,
                b"5\r\rhello\r\n0\r\n\r\n",
                b"\r\n0\r\n\r\n",
                b"5;" + b"a" * 20_000 + b"\r\nhello\r\n0\r\n\r\n",
                b"0\r\nContent-Length: 5\r\n\r\nhello",
                b"+5\r\nhello\r\n0\r\n\r\n",
                b"5\r\nhello\r\n00000\r\n\r\n",
                b"5_0\r\nhello\r\n0\r\n\r\n",
                b"5\r\nhello\r\n0\r\n\n",
            )
        )
        return self.line(b"POST") + b"Transfer-Encoding: chunked\r\n\r\n" + body + hidden

    def folded(self) -> bytes:
        value = self.rng.choice(
            (b"X-A: 1\r\n 2\r\n", b"X-A: 1\r\n\t2\r\n", b"X-A:\r\n 1\r\n", b"Content-Length:\r\n 5\r\n")
        )
        return self.line(b"POST") + value + b"\r\nhello" + self.hidden()

    def bad_line(self) -> bytes:
        target = self.target()
        drawn = self.rng.choice(
            (
                b"GET  %b HTTP/1.1\r\nHost: h\r\n\r\n",
                b"GET %b\r\n\r\n",
                b"GET %b HTTP/2.0\r\nHost: h\r\n\r\n",
                b"get %b HTTP/1.1\r\nHost: h\r\n\r\n",
                b"GET %b HTTP/1.1 \r\nHost: h\r\n\r\n",
                b"GET\t%b\tHTTP/1.1\r\nHost: h\r\n\r\n",
                b"GET %b HTTP/1.1\rHost: h\r\n\r\n",
                b"GET %b HTTP/1.1\nHost: h\n\n",
                b"G\x00T %b HTTP/1.1\r\nHost: h\r\n\r\n",
                b"GET %b HTTP/1.9\r\nHost: h\r\n\r\n",
                b"GET %b\x01 HTTP/1.1\r\nHost: h\r\n\r\n",
                b"GET %b HTTP/1.1\r\n\r\n",
                b"GET %b HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
                b"GET %b HTTP/1.1\r\nHost: a b\r\n\r\n",
                b"GET %b HTTP/0.9\r\n\r\n",
                b"POST %b HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
                b"GET %b HTTP/1.0\r\n\r\n",
                b"GET %b HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
                b"GET %b#frag HTTP/1.1\r\nHost: h\r\n\r\n",
                b"GET %b\xc3\xa9 HTTP/1.1\r\nHost: h\r\n\r\n",
                b"\x16\x03\x01%b\r\n\r\n",
                b"FOO %b HTTP/1.1\r\nHost: h\r\n\r\n",
            )
        )
        self.keeps_alive |= b"keep-alive" in drawn
        return drawn % target

    def bad_header(self) -> bytes:
        value = self.rng.choice(
            (
                b"X A: 1",
                b": 1",
                b"X-A",
                b"X-A: \x00",
                b"X-A: a\rb",
                b"X-A: a\nb",
                b"X\xe9: 1",
                b"X-A: \xe9",
                b"X(A): 1",
                b"X-A : 1",
                b"X-A: \x7f",
                b"X_A: 1",
                b"Host: other",
                b"X-A:" + b"a" * 100_000,
                b"Content-Length: 5 ",
                b"Connection: close",
                b"Connection: content-length",
                b"Connection: Upgrade\r\nUpgrade: h2c",
                b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
                b"Connection: Upgrade\r\nUpgrade: websocket",
                b"Upgrade: websocket",
                b"Content-Length: 0",
                b"Proxy-Connection: keep-alive",
                b"Keep-Alive: 300",
                b"\r\nX: 1",
                b"\tX: 1",
            )
        )
        if b"websocket" in value:
            self.optional.add(f"/echo/{token(self.number)}/{self.targets + 1}")
        return self.line(self.rng.choice((b"GET", b"POST"))) + value + b"\r\n\r\n"

    def noise(self) -> bytes:
        """A good request with a few bytes changed."""
        whole = bytearray(self.rng.choice((self.length, self.chunked, self.both, self.plain))())
        for _ in range(self.rng.randint(1, 3)):
            at = self.rng.randrange(len(whole))
            change = self.rng.randrange(3)
            if change == 0:
                whole[at] = self.rng.choice(b"\r\n\t :0\x00\xff;,")
            elif change == 1:
                del whole[at]
            else:
                whole.insert(at, self.rng.choice(b"\r\n\t :0\x00;,"))
        return bytes(whole)


GOOD: Final = ("plain", "head", "length", "chunked", "welcome", "absolute", "blank")
BAD: Final = (
    "both",
    "lengths",
    "bad_length",
    "bad_coding",
    "bad_chunk",
    "folded",
    "bad_line",
    "bad_header",
    "noise",
)


def draw(seed: int, number: int) -> Pipeline:
    """The pipeline of that number; always the same."""
    rng = random.Random(f"{seed}/{number}")
    writer = Writer(rng, number)
    kinds = [rng.choice(GOOD) for _ in range(rng.choice((0, 0, 1, 1, 2, 3)))]
    good = len(kinds)
    if rng.random() < 0.85:
        kinds.append(rng.choice(BAD))
    kinds += [rng.choice(GOOD) for _ in range(rng.choice((0, 0, 1)))]
    sent = b"".join(getattr(writer, kind)() for kind in kinds)
    is_cut_off = rng.random() < 0.1
    if is_cut_off:
        sent = sent[: rng.randint(0, len(sent))]
    else:
        sent += b"GET %b HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n" % writer.target()
    many = rng.choice((0, 0, 1, 3, 8))
    cuts = tuple(sorted(rng.randrange(len(sent)) for _ in range(many))) if sent else ()
    return Pipeline(
        number, sent, cuts, is_cut_off, tuple(kinds), frozenset(writer.optional), writer.keeps_alive, good
    )


# -- the references --


def token(number: int) -> str:
    """The part of a path that tells a pipeline; a changed digit makes another's of none."""
    return f"p{number}-{zlib.crc32(b'%d' % number):08x}"


def path_of(target: bytes) -> str:
    text = target.decode("latin-1")
    return text.removeprefix("http://h").partition("?")[0].partition("#")[0]


def is_ours(path: str, number: int) -> bool:
    return path.startswith(f"/echo/{token(number)}/")


def read_by_h11(pipeline: Pipeline) -> Reading:
    """An echo server on h11, in memory. Empty lines before a request are skipped for it (RFC 9112, 2.2)."""
    reading = Reading()
    left = pipeline.sent
    try:
        while left := left.lstrip(b"\r\n") if left.startswith((b"\r\n", b"\n")) else left:
            connection = h11.Connection(h11.SERVER, max_incomplete_event_size=256 * 1024)
            connection.receive_data(left)
            method, path, body = "", "", b""
            while not isinstance(event := connection.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Request):
                    method, path = event.method.decode(), path_of(event.target)
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                else:
                    reading.end = INCOMPLETE if event is h11.NEED_DATA else CLOSED
                    return reading
            reading.methods.append(method)
            if is_ours(path, pipeline.number):
                reading.messages.append(Message(method, path, body))
            connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            connection.send(h11.EndOfMessage())
            if connection.our_state is h11.MUST_CLOSE:
                reading.end = CLOSED
                return reading
            left = connection.trailing_data[0]
    except h11.RemoteProtocolError as error:
        reading.end, reading.why = REFUSED, str(error)
    return reading


class _Transport(asyncio.Transport):
    """Takes answers, in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(name, default)

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None:
        """Everything is there already."""

    def resume_reading(self) -> None:
        """As above."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There are none."""


class Uvicorn:
    """Uvicorn's connections on httptools, in memory, around an ASGI application."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self._config = Config(
            app, log_level="critical", access_log=False, log_config=None, lifespan="off", ws="none"
        )
        self._config.load()

    async def read(self, pipeline: Pipeline, seen: list[Message]) -> Reading:
        """``seen`` is where the application notes what it sees of this pipeline."""
        state, transport = ServerState(), _Transport()
        protocol = HttpToolsProtocol(self._config, state, {}, asyncio.get_running_loop())
        protocol.connection_made(transport)
        # Part by part: when it meets what it refuses it forgets what it has not begun.
        for part in re.split(rb"(?<=\r\n\r\n)", pipeline.sent):
            if transport.is_closed:
                break
            protocol.data_received(part)
            quiet, before = 0, (-1, -1)
            while quiet < 8:  # turns of the loop in which nothing happens: all is in memory
                await asyncio.sleep(0)
                now = (len(transport.written), len(seen))
                quiet, before = (quiet + 1, now) if now == before else (0, now)
        reading = Reading(list(seen))
        if b"HTTP/1.1 400 " in transport.written:
            reading.end, reading.why = REFUSED, "httptools"
        elif transport.is_closed:
            reading.end = CLOSED
        protocol.connection_lost(None)
        for task in list(state.tasks):
            task.cancel()
        return reading
