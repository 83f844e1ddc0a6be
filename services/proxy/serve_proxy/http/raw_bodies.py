"""Large request bodies of known size, which do not reach the parser: it would look at each byte, and copy it twice.

Why a part of the connection: it is the connection that knows where a body begins and ends. The private parts of aiohttp
that are used here are those of `http/connection`.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any, Final, final

from aiohttp import hdrs, web
from aiohttp.http_parser import HttpRequestParser, RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader

from serve_common.dispatch.request_body import CROWDED_PIECE_BYTES_MAX, RequestBody

COUNTED_BYTES_MIN: Final = 16 * 1024
"""Least size of a body that does not reach the parser: looking at each byte costs more than another parser."""
_MOVES_MAX: Final = 4
"""Frames that are moved before others have a turn."""
_SMALL_READ_BYTES: Final = 16 * 1024
"""What comes in smaller parts is copied: a pipe holds a page or more for each, and nothing is gained."""
_SMALL_READS_MAX: Final = 8
"""Small parts, beyond the number of others, after which a body is copied."""


class CountingConnection(web.RequestHandler):
    """Counts the bytes of large bodies itself, and makes another parser for what comes after them."""

    __slots__ = ("_is_body_paused", "_last_bytes", "_last_payload", "_raw", "_rest_bytes")

    def __init__(self, manager: web.Server, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._last_payload: StreamReader = EMPTY_PAYLOAD
        self._last_bytes = b""
        """The last bytes received, when they may be part of the end of a head."""
        self._is_body_paused = False
        """True between `pause_body` and what ends that."""
        self._raw: RawBody | None = None
        """Reads a body past the parser, in the place of this."""
        self._rest_bytes = 0
        """What is left of a body whose bytes are counted here, and do not reach the parser."""

    def pause_body(self) -> None:
        """Read nothing until `start_raw_body` or `resume_body`: the task that calls them has yet to start, and what is
        read before that is copied more often.
        """
        if self._rest_bytes and not self._reading_paused:
            self._is_body_paused = True
            self.pause_reading()

    def resume_body(self) -> None:
        """Read on after `pause_body`."""
        if self._is_body_paused:
            self._is_body_paused = False
            self.resume_reading()

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
            or (self._reading_paused and not self._is_body_paused)
            or self._force_close
        ):
            return None
        self._rest_bytes = 0
        self._is_body_paused = self._reading_paused = False
        raw = self._raw = RawBody(self, transport, content, rest_bytes, body)
        self._read_as(raw)
        raw.start()
        return raw

    def end_raw_body(self) -> None:
        """Go on with the parser, and with what is left of the body; may be called twice."""
        self.resume_body()
        raw, self._raw = self._raw, None
        if raw is None:
            return
        raw.stop()
        if self.transport is None:
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

    Where it is sent over a Unix socket, it is moved there through a pipe, and not read.

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
        self._loop = asyncio.get_running_loop()
        self._is_lost = False
        self._view = memoryview(b"")
        self._waiter: asyncio.Future[None] | None = None
        self._may_pipe = transport.get_extra_info("ssl_object") is None
        self._descriptor = -1
        """The socket's, while what comes is moved into the pipe, and the transport reads nothing."""
        self._small_reads = 0

    def start(self) -> None:
        """Choose how the body is read; what it is sent over may be known already."""
        if self._may_pipe and self._body.takes_pipe:
            self._enter_pipe()

    async def wait(self) -> None:
        """Wait until everything was read, or reading has to pause. Raises ConnectionError when the client is gone."""
        if self.rest_bytes and not self.is_paused and not self._is_lost:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._is_lost:
            raise ConnectionResetError("the client disconnected")

    def resume(self) -> None:
        """Go on after a pause."""
        self.is_paused = False
        if self._is_lost:
            return
        if self._descriptor >= 0:
            self._loop.add_reader(self._descriptor, self._move)
        else:
            self._transport.resume_reading()

    def stop(self) -> None:
        """Read nothing more."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's
        if not self._view:
            self._view = memoryview(bytearray(min(self._body.piece_bytes_max, self.rest_bytes)))
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        piece, self._view = self._view[:nbytes], self._view[nbytes:]
        self._body.add(piece)
        self._count(nbytes)
        if self.rest_bytes and not self.is_paused:
            self.start()

    def eof_received(self) -> None:
        self._connection.eof_received()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._is_lost = True
        self.stop()
        self._connection.connection_lost(exc)
        self._wake()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def _count(self, read_bytes: int) -> None:
        """Count what was read, and pause or end after it."""
        self.rest_bytes -= read_bytes
        self._content.total_bytes += read_bytes
        if not self.rest_bytes:
            self._connection.end_raw_body()
        elif self._body.has_space:
            return
        else:
            self.is_paused = True
            if self._descriptor >= 0:
                self._loop.remove_reader(self._descriptor)
            else:
                self._transport.pause_reading()
        self._wake()

    def _enter_pipe(self) -> None:
        try:
            self._may_pipe = self._body.open_pipe()
            if self._may_pipe:
                # Of its own, as the loop lets nobody else read what belongs to a transport.
                self._descriptor = os.dup(self._transport.get_extra_info("socket").fileno())
        except OSError:  # no descriptor is free
            self._may_pipe = False
        if self._may_pipe:
            self._view = memoryview(b"")
            self._transport.pause_reading()
            self._loop.add_reader(self._descriptor, self._move)

    def _leave_pipe(self) -> None:
        """Let the transport read again, which also finds out what is wrong with the connection."""
        self._may_pipe = False
        self.stop()
        self._body.leave_pipe()
        self._transport.resume_reading()

    def _move(self) -> None:
        """Move what has arrived into the pipe; as long as there is something, because a wake-up costs more."""
        for _ in range(_MOVES_MAX):
            if self._move_once() < CROWDED_PIECE_BYTES_MAX or self._descriptor < 0 or self.is_paused:
                return

    def _move_once(self) -> int:
        if self._body.is_closed or not self._body.takes_pipe or self._small_reads > _SMALL_READS_MAX:
            self._leave_pipe()
            return 0
        try:
            moved_bytes = self._body.fill_pipe(
                self._descriptor, min(self._body.piece_bytes_max, self.rest_bytes)
            )
        except BlockingIOError:
            # Nothing has come, or the pipe has no space for it: each packet takes a page.
            self._small_reads += 1
            return 0
        except OSError:
            moved_bytes = 0
        if not moved_bytes:
            self._leave_pipe()
            return 0
        if moved_bytes < _SMALL_READ_BYTES:
            self._small_reads += 1
        elif self._small_reads:
            self._small_reads -= 1
        self._count(moved_bytes)
        return moved_bytes

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
