"""Converts what user code returns to an HTTP response, complete or streamed, by the rules of Ray Serve."""

from __future__ import annotations

import asyncio
import inspect
import ipaddress
import json
import re
import threading
import time
from collections import deque
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import PurePath
from typing import Any, Final, final

import msgspec
from starlette.requests import HTTPConnection
from starlette.responses import FileResponse, Response, StreamingResponse

from serve_common.errors import UserCodeRaised
from serve_common.protocol.frames import Headers
from serve_common.runtime.request_context import is_program_replica
from serve_replica_host.replica.io.request import (
    UNSENT_BYTES_MAX,
    UNSENT_PIECES_MAX,
    Ended,
    Failed,
    Flow,
    IoEvent,
    Opened,
    Piece,
    ReplicaRequest,
    WholeResponseEvent,
)

_JSON: Final[Headers] = [(b"content-type", b"application/json")]
TEXT: Final[Headers] = [(b"content-type", b"text/plain; charset=utf-8")]
_BYTES: Final[Headers] = [(b"content-type", b"text/plain")]


class NotAResponse(TypeError):
    """The user's code returned a value that cannot be sent; the message names it."""


class WholeResponse(msgspec.Struct, frozen=True, gc=False):
    """A complete response."""

    status: int
    headers: Headers
    body: bytes


_BY_THEIR_TEXT: Final = (
    *(PurePath, Exception),
    *(ipaddress.IPv4Address, ipaddress.IPv6Address),
    *(ipaddress.IPv4Network, ipaddress.IPv6Network),
    *(ipaddress.IPv4Interface, ipaddress.IPv6Interface),
)


def _as_json(value: Any) -> Any:
    """What Ray Serve, by FastAPI's encoder, makes of a value that is not JSON. Raises NotImplementedError."""
    if value is None or isinstance(value, bool):  # a key; msgspec asks for these
        return msgspec.json.encode(value).decode()
    if isinstance(value, str):  # of a class of its own, such as a replica's id
        return str(value)
    if hasattr(value, "model_dump"):  # pydantic; FastAPI too writes aliases
        return value.model_dump(mode="json", by_alias=True)
    if hasattr(value, "tolist"):  # numpy's arrays and numbers, torch's tensors
        return value.tolist()
    if isinstance(value, _BY_THEIR_TEXT) or hasattr(value, "get_secret_value"):
        return str(value)
    if isinstance(value, HTTPConnection):
        raise NotImplementedError(type(value).__name__)
    if isinstance(value, Mapping):  # such as the headers of a request
        return dict(value)
    if isinstance(value, deque) or inspect.isgenerator(value):
        return list(value)
    if isinstance(value, re.Pattern):
        return value.pattern
    if hasattr(value, "to_dict") and hasattr(value, "columns"):  # pandas' tables
        return value.to_dict(orient="records")
    if attributes := getattr(value, "__dict__", None):  # an object of a plain class, as in Ray Serve
        return attributes
    raise NotImplementedError(type(value).__name__)


class PlainStream(msgspec.Struct, frozen=True, gc=False):
    """A plain generator, which is run in a thread because it may block."""

    iterator: Iterator[Any]


_encoder = msgspec.json.Encoder(enc_hook=_as_json, decimal_format="number")
_AS_THEY_ARE: Final = (bytes, bytearray, datetime, timedelta, Decimal)
"""Types that FastAPI's encoder, which Ray Serve uses, writes in another form than msgspec does."""


def _as_fastapi_does(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        exponent = value.as_tuple().exponent  # a letter for NaN and infinity
        return int(value) if isinstance(exponent, int) and exponent >= 0 else float(value)
    return value.decode()


_encode_as_ray_serve: Final = json.JSONEncoder(separators=(",", ":"), default=_as_fastapi_does).encode


def to_response(result: Any) -> WholeResponse | PlainStream | Response:
    """Convert ``result`` to a response; a `Response` is streamed by running it as an ASGI application.

    Raises `NotAResponse`.
    """
    if type(result) is bytes:
        return WholeResponse(200, _BYTES, result)
    if type(result) is str:
        return WholeResponse(200, TEXT, result.encode())
    if isinstance(result, bytes | bytearray | memoryview):
        return WholeResponse(200, _BYTES, bytes(result))
    if isinstance(result, str):
        return WholeResponse(200, TEXT, result.encode())
    if result is None:
        return WholeResponse(200, _BYTES, b"")
    if isinstance(result, Response):
        if isinstance(result, StreamingResponse | FileResponse) or result.background is not None:
            return result
        return WholeResponse(result.status_code, result.raw_headers, bytes(result.body))
    if inspect.isgenerator(result):
        return PlainStream(result)
    if inspect.isasyncgen(result):
        pieces: Any = result
        return StreamingResponse(pieces, media_type="text/plain")
    return WholeResponse(200, _JSON, encode_json(result))


def encode_json(value: Any) -> bytes:
    """Encode ``value`` as JSON: also numpy and pydantic values, paths, mappings, and objects by their attributes.

    In replicas of programs the bytes are Ray Serve's: ASCII, and `NaN` as itself.

    Raises `NotAResponse`.
    """
    try:
        if is_program_replica():
            plain = msgspec.to_builtins(value, builtin_types=_AS_THEY_ARE, enc_hook=_as_json)
            return _encode_as_ray_serve(plain).encode()
        return _encoder.encode(value)
    except NotImplementedError as error:
        raise NotAResponse(
            f"the returned value holds a {error}, which is not JSON; "
            "return JSON values, str, bytes or a starlette Response"
        ) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise NotAResponse(f"the returned {type(value).__name__} cannot be sent as JSON: {error}") from error


FIRST_PART_S: Final = 0.0002
"""Seconds in which the other thread wakes up and sends a frame."""


def _let_first_part_leave() -> None:
    """Stand still for a moment: the second part of a stream is there before the first was sent.

    Why: this thread holds Python's lock (GIL), and would for 5 ms more, in which the first part cannot leave. Later
    parts gain from being gathered; nobody waits for those as for the first.
    """
    time.sleep(FIRST_PART_S)


_BURST: Final = 256
"""Consecutive parts after which the writer yields: a generator that never waits must not block the loop."""


async def wait_writable(exchange: ReplicaRequest, written_bytes: int) -> None:
    """Wait until the network has caught up with a writer that has written ``written_bytes`` in all."""
    try:
        while is_full(exchange, written_bytes):
            event = asyncio.Event()
            exchange.writable = event  # set before the check, so that no wake-up is missed
            if is_full(exchange, written_bytes):
                await event.wait()
    finally:
        exchange.writable = None


def is_full(exchange: ReplicaRequest, written_bytes: int) -> bool:
    """True when the writer should wait."""
    return (
        written_bytes - exchange.sent_bytes > UNSENT_BYTES_MAX
        or len(exchange.pieces or ()) > UNSENT_PIECES_MAX
    ) and not exchange.is_dropped


@final
class ResponseStream:
    """Writes one streamed response; all methods run on the user loop, except `run_plain`.

    Why one buffer and one wake-up for a burst: a token then costs less than a microsecond, while a message between two
    threads costs several. Of a part that comes alone the other thread is notified at once, or it is sent here and now
    (`ReplicaIO`), so no token is held back; parts that come faster than that thread reads are sent as one frame.
    """

    def __init__(self, exchange: ReplicaRequest, io_queue: Callable[[IoEvent], object]) -> None:
        self.is_ended = False
        """True once the response is complete."""
        self._exchange = exchange
        self._io_queue = io_queue
        self._flow = Flow(exchange)
        self._pieces: deque[bytes] = deque()
        exchange.pieces = self._pieces
        self._written_bytes = 0
        self._count = 0
        self._opening: Opened | None = None
        self._opening_soon: asyncio.Handle | None = None
        self._is_open = False

    def open(self, status: int, headers: Headers, *, soon: bool = True) -> None:
        """Start the response. Its head is sent with the first part or, if ``soon``, at latest in the next iteration."""
        if self._is_open or self._opening is not None:
            raise RuntimeError("the answer was begun already")
        self._exchange.written_status = status
        self._opening = Opened(self._exchange, status, headers)
        if soon:
            self._opening_soon = asyncio.get_running_loop().call_soon(self._open_now)

    def put(self, data: bytes) -> bool:
        """Append to the response; True when the writer should `wait` before it continues."""
        self._pieces.append(data)
        self._written_bytes += len(data)
        self._count += 1
        if not self._exchange.is_notified:
            self._notify()
        elif self._count == 2:
            _let_first_part_leave()
        return not self._count % _BURST or self._written_bytes - self._exchange.sent_bytes > UNSENT_BYTES_MAX

    async def wait(self) -> None:
        """Yield to the loop, and wait while the network is slower."""
        if is_full(self._exchange, self._written_bytes):
            await wait_writable(self._exchange, self._written_bytes)
        else:
            await asyncio.sleep(0)

    async def run(self, iterator: AsyncIterable[Any], charset: str) -> None:
        """Append all items of an async iterator. This loop is the cost of a token."""
        exchange, append = self._exchange, self._pieces.append
        count = 0
        async for piece in iterator:
            data = piece if type(piece) is bytes else as_bytes(piece, charset)
            append(data)
            self._written_bytes += len(data)
            count += 1
            if not exchange.is_notified:
                self._notify()
            elif count == 2:
                _let_first_part_leave()
            if not count % _BURST or self._written_bytes - exchange.sent_bytes > UNSENT_BYTES_MAX:
                await self.wait()

    def run_plain(self, iterator: Iterable[Any], charset: str) -> None:
        """Append all items of a plain iterator; runs in a thread, and ends early when the exchange is dropped."""
        exchange = self._exchange
        try:
            for count, piece in enumerate(iterator, 1):
                if exchange.is_dropped:
                    return
                self._pieces.append(data := as_bytes(piece, charset))
                self._written_bytes += len(data)
                if not exchange.is_notified:
                    self._notify()
                elif count == 2:
                    _let_first_part_leave()
                if self._written_bytes - exchange.sent_bytes > UNSENT_BYTES_MAX or (
                    len(self._pieces) > UNSENT_PIECES_MAX
                ):
                    self._wait_in_thread()
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()

    def end(self, data: bytes = b"") -> None:
        """End the response, with ``data`` as its last part."""
        if self.is_ended:
            return
        self.is_ended = True
        if self._opening is None:
            self._io_queue(Piece(self._exchange, data, last=True))
            return
        # Nothing was sent yet, so it can be sent as one frame.
        opening = self._take_opening()
        self._io_queue(WholeResponseEvent(self._exchange, opening.status, opening.headers, data))

    def outcome(self) -> IoEvent:
        """The outcome that ends the work; `Ended` when the response was complete."""
        if self.is_ended:
            return Ended(self._exchange)
        if self._opening is not None:
            self._open_now()
        message = "the returned Response ended without a whole answer"
        return Failed(self._exchange, UserCodeRaised.error_code, UserCodeRaised.status_hint, message)

    def _notify(self) -> None:
        self._exchange.is_notified = True  # before notifying: the other thread clears it before it reads
        if self._opening is not None:
            self._open_now()
        elif self._is_open:
            self._io_queue(self._flow)

    def _open_now(self) -> None:
        if self._opening is not None:
            self._io_queue(self._take_opening())

    def _take_opening(self) -> Opened:
        opening, self._opening = self._opening, None
        assert opening is not None, "the answer was begun"
        self._is_open = True
        if self._opening_soon is not None:
            self._opening_soon.cancel()
            self._opening_soon = None
        return opening

    def _wait_in_thread(self) -> None:
        event = threading.Event()
        try:
            while is_full(self._exchange, self._written_bytes):
                self._exchange.writable = event
                if is_full(self._exchange, self._written_bytes):
                    event.wait()
                event.clear()
        finally:
            self._exchange.writable = None


def as_bytes(piece: Any, charset: str) -> bytes:
    """Encode a part of a stream. Raises `NotAResponse`."""
    if isinstance(piece, str):
        return piece.encode(charset)
    if isinstance(piece, bytes | bytearray | memoryview):
        return bytes(piece)
    raise NotAResponse(f"a stream gave a {type(piece).__name__}; it must give str or bytes")
