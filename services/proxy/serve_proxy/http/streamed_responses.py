"""Bodies of streamed and large responses, written to a client's connection as they arrive.

Why not by the library: a response that breaks off must close the connection, which is the only way to signal an error
in the middle of a body. And its objects for one response cost more than everything else that a stream's first part
needs here.
"""

from __future__ import annotations

import asyncio
from typing import Final, final

import structlog
from aiohttp import web

from serve_common.dispatch.calls import Call, Response, ResponseBody
from serve_common.dispatch.errors import ResponseUnusable, get_error_type
from serve_common.errors import ServeError
from serve_proxy.http.bodies import MinRateGuard
from serve_proxy.shell.request_observers import LoggedRequest

_log = structlog.get_logger(__name__)

READS_TOO_SLOWLY: Final = "client_reads_too_slowly"
"""Error in the access log for a client that reads its response too slowly."""
_JOINED_BYTES_MAX: Final = 16 * 1024
"""Pieces up to this size are joined with what goes around them; larger ones are not copied."""


@final
class StreamedBody:
    """The body of one response, on its way to the client; a `ResponseProgress`."""

    __slots__ = (
        "_client",
        "_content_length",
        "_has_started",
        "_is_chunked",
        "_request_id",
        "_transport",
        "_upstream",
        "failure",
        "written_bytes",
    )

    def __init__(
        self,
        connection: web.RequestHandler,
        transport: asyncio.Transport,
        call: Call,
        upstream: Response,
        content_length: int | None,
        *,
        is_chunked: bool,
    ) -> None:
        """``transport`` is that of ``connection``. ``content_length`` is what the head says; None when it says none."""
        self.written_bytes = 0
        self.failure = ""
        self._client = connection
        self._transport = transport
        self._upstream = upstream
        self._content_length = content_length
        self._is_chunked = is_chunked
        self._has_started = False
        self._request_id = call.spec.request_id
        observer = call.spec.trace
        if isinstance(observer, LoggedRequest):
            observer.sends(self, is_stream=upstream.stream is not None)

    def taken_bytes(self) -> int | None:
        """Bytes that the client has read; None while it has read everything written so far."""
        unsent_bytes = self._transport.get_write_buffer_size()
        return self.written_bytes - unsent_bytes if unsent_bytes else None

    def start(self, head: bytes) -> None:
        """Write the ``head``, if it was not written before, and what there is of the body.

        Raises ConnectionResetError when the client is gone.
        """
        stream = self._upstream.stream
        data = self._upstream.body if stream is None else stream.take_first()
        self._write(data, head)
        self._has_started = True

    async def finish(self, rate_min: int) -> None:
        """Write the rest. A client that reads less than ``rate_min`` bytes a second is disconnected.

        Raises ConnectionError when the client is gone, and when the response broke off: the connection is then closed.
        """
        if not self._has_started:
            raise ConnectionResetError("the client is gone")
        with MinRateGuard(rate_min, self.taken_bytes, self._disconnect_slow_client, spares_first=True):
            await self._client._drain_helper()  # noqa: SLF001 - as the library's own writer does
            if self._upstream.stream is not None:
                await self._write_pieces(self._upstream.stream)

    async def _write_pieces(self, stream: ResponseBody) -> None:
        connection, content_length = self._client, self._content_length
        try:
            while (data := await stream.read()) is not None:
                if data:
                    self._write(data)
                    await connection._drain_helper()  # noqa: SLF001 - as above
            if content_length is not None and self.written_bytes != content_length:
                raise ResponseUnusable(
                    f"the replica promised {content_length} bytes and sent {self.written_bytes}"
                )
        except ServeError as error:
            _log.warning("answer_broke_off", reason=str(error), written_bytes=self.written_bytes)
            self.failure = get_error_type(error)
            self._transport.abort()
            raise ConnectionResetError("the answer broke off") from error
        if self._is_chunked:
            self._write(b"", end=b"0\r\n\r\n")

    def _write(self, data: bytes | memoryview, head: bytes = b"", *, end: bytes = b"") -> None:
        """Write all three at once; of a body with a length no more than that, as the client would read the rest as
        another response."""
        transport = self._transport
        if transport.is_closing():
            raise ConnectionResetError("the client is gone")
        at, length = self.written_bytes, self._content_length
        self.written_bytes = at + len(data)
        if length is not None and self.written_bytes > length:
            data = data[: max(0, length - at)]
        if data and self._is_chunked:
            head, end = b"%b%x\r\n" % (head, len(data)), b"\r\n" + end
        if len(data) <= _JOINED_BYTES_MAX:
            transport.write(b"".join((head, data, end)))
        else:
            transport.writelines([part for part in (head, data, end) if part])

    def _disconnect_slow_client(self) -> None:
        _log.warning("client_reads_too_slowly", request_id=self._request_id)
        self.failure = READS_TOO_SLOWLY
        self._transport.abort()
