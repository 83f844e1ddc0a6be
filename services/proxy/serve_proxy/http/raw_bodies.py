"""Large request bodies of known size, which do not reach the parser: it would look at each byte, and copy it twice.

Why a part of the connection: it is the connection that knows where a body begins and ends. The private parts of aiohttp
that are used here are those of `http/connection`.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, final

from aiohttp import hdrs, web
from aiohttp.http_parser import HttpRequestParser, RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader

from serve_common.dispatch.request_body import RequestBody
from serve_common.protocol.frames import FRAME_BODY_BYTES_MAX

COUNTED_BYTES_MIN: Final = 16 * 1024
"""Least size of a body that does not reach the parser: looking at each byte costs more than another parser."""


class CountingConnection(web.RequestHandler):
    """Counts the bytes of large bodies itself, and makes another parser for what comes after them."""

    __slots__ = ("_last_bytes", "_last_payload", "_raw", "_rest_bytes")

    def __init__(self, manager: web.Server, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._last_payload: StreamReader = EMPTY_PAYLOAD
        self._last_bytes = b""
        """The last bytes received, when they may be part of the end of a head."""
        self._raw: RawBody | None = None
        """Reads a body past the parser, in the place of this."""
        self._rest_bytes = 0
        """What is left of a body whose bytes are counted here, and do not reach the parser."""

    def start_raw_body(self, content: StreamReader, rest_bytes: int, body: RequestBody) -> RawBody | None:
        """Read the rest of the body of ``content``, whose bytes so far were taken, into ``body``.

        None where the connection cannot do that now.
        """
        transport = self.transport
        if (
            transport is None
            or transport.is_closing()
            or content is not self._last_payload
            or content.is_eof()
            or rest_bytes
            != self._rest_bytes  # a middleware has changed a header, or the parser has a part of it
            or self._reading_paused
            or self._force_close
        ):
            return None
        self._rest_bytes = 0
        raw = self._raw = RawBody(self, transport, content, rest_bytes, body)
        self._read_as(raw)
        return raw

    def end_raw_body(self) -> None:
        """Go on with the parser, and with what is left of the body; may be called twice."""
        raw, self._raw = self._raw, None
        if raw is None or self.transport is None:
            return
        self._rest_bytes = raw.rest_bytes
        self._read_as(self)
        if not self._rest_bytes:
            self._end_counted_body()

    def _read_as(self, protocol: asyncio.BaseProtocol) -> None:
        """Let ``protocol`` read from now on. Paused meanwhile: how bytes are read is decided when reading starts."""
        transport = self.transport
        assert transport is not None, "it is open"
        self._pause_transport_reading()
        transport.set_protocol(protocol)
        self._resume_transport_reading()

    def _starts_counted_body(self, message: RawRequestMessage, payload: StreamReader) -> bool:
        """True when a large body of known size begins: its bytes are counted here, and do not reach the parser."""
        if payload.is_eof() or payload.total_bytes or message.chunked or message.upgrade:
            return False
        announced = int(message.headers.get(hdrs.CONTENT_LENGTH, "0"))  # the parser has checked it
        if announced < COUNTED_BYTES_MIN:
            return False
        self._rest_bytes = announced
        return True

    def _take_counted(self, data: bytes) -> bytes:
        """Take the part of ``data`` that belongs to the counted body; returns what comes after it."""
        rest = data[: self._rest_bytes]
        self._last_payload.feed_data(rest)  # which may pause reading
        self._rest_bytes -= len(rest)
        if self._rest_bytes:
            return b""
        self._end_counted_body()
        return data[len(rest) :]

    def _end_counted_body(self) -> None:
        """A body has ended of which the parser saw the beginning only: the next request gets another parser."""
        self._last_bytes = b""
        self._parser = HttpRequestParser(
            self,
            self._loop,
            self._read_bufsize,
            max_line_size=self.max_line_size,
            max_field_size=self.max_field_size,
            max_headers=self.max_headers,
            payload_exception=web.RequestPayloadError,
            auto_decompress=False,
            max_msg_queue_size=self._max_msg_queue_size,
        )
        self._last_payload.feed_eof()

    def pause_reading(self) -> None:
        """Pause for the buffer of a body; the parser knows nothing of one that does not reach it."""
        if self._rest_bytes:
            self._reading_paused = True
            self._pause_transport_reading()
        else:
            super().pause_reading()


@final
class RawBody(asyncio.BufferedProtocol):
    """Reads the rest of a body of known size into the buffers from which it is sent to the replica.

    Why a protocol: the loop then reads into these buffers, and no task has to wake up for a piece. It stands in for its
    connection, which gets everything else.
    """

    def __init__(
        self,
        connection: CountingConnection,
        transport: asyncio.Transport,
        content: StreamReader,
        rest_bytes: int,
        body: RequestBody,
    ) -> None:
        self.rest_bytes = rest_bytes
        """Bytes that have not arrived yet."""
        self.is_paused = False
        """True while nothing is read, because the body has no space."""
        self._connection = connection
        self._transport = transport
        self._content = content
        self._body = body
        self._is_lost = False
        self._view = memoryview(b"")
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait until everything was read, or reading has to pause. Raises ConnectionError when the client is gone."""
        if self.rest_bytes and not self.is_paused and not self._is_lost:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._is_lost:
            raise ConnectionResetError("the client disconnected")

    def resume(self) -> None:
        """Go on after a pause."""
        self.is_paused = False
        if not self._is_lost:
            self._transport.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's
        if not self._view:
            self._view = memoryview(bytearray(min(FRAME_BODY_BYTES_MAX, self.rest_bytes)))
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        piece, self._view = self._view[:nbytes], self._view[nbytes:]
        self.rest_bytes -= nbytes
        self._content.total_bytes += nbytes
        self._body.add(piece)
        if not self.rest_bytes:
            self._connection.end_raw_body()
        elif self._body.has_space:
            return
        else:
            self.is_paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        self._connection.eof_received()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._is_lost = True
        self._connection.connection_lost(exc)
        self._wake()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
