"""The HTTP server for clients: aiohttp's low-level server, which only parses and writes.

Why not a `web.Application`: its own routing, middlewares and access log cost a quarter of the throughput, and the
routes here change at run time.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import socket
import ssl
import struct
from typing import Any, Final, final

import structlog
from aiohttp import web

from serve_common.runtime.tasks import TaskOwner
from serve_proxy.http.bodies import is_mostly_unread
from serve_proxy.http.connection import HttpConnection
from serve_proxy.http.requests import HttpRequests
from serve_proxy.http.tls import HANDSHAKE_TIMEOUT_S, SHUTDOWN_TIMEOUT_S
from serve_proxy.shell.ingress import Ingress

_SO_ATTACH_FILTER: Final = 26
"""Socket option of Linux (asm-generic/socket.h)."""
_SYN, _ACK, _FLAGS_AT = 0x02, 0x10, 13
"""TCP flags and their offset (RFC 9293, 3.1): a filter on a TCP socket sees segments from the TCP header on."""
_PROGRAM: Final = (
    # Classic BPF (linux/filter.h) as (code, jump if true, jump if false, constant).
    (0x30, 0, 0, _FLAGS_AT),  # load the byte of flags
    (0x54, 0, 0, _SYN | _ACK),  # keep these two
    (0x15, 0, 1, _SYN),  # a SYN without ACK: it opens a connection
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # accept
)


def drop_new_connections(listener: socket.socket) -> None:
    """Drop new connections on a listening TCP socket from now on; established ones can still be accepted.

    Raises OSError where the system has no such filters.

    Why: the system resets connections that wait to be accepted when their listener is closed. However soon it is closed
    after the last accept, another connection may have come in between, and its client may have sent a request. Where
    its opening segment (SYN) is dropped instead, that client retries a second later, and is then refused or finds
    another listener.
    """
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in _PROGRAM))
    described = struct.pack("HL", len(_PROGRAM), ctypes.addressof(program))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)


_log = structlog.get_logger(__name__)

_LINGERING_S: Final = 2.0
"""Seconds for which an unwanted body is read, so that its client reads the response."""
_READ_BYTES_MAX: Final = 128 * 1024
"""Limit of the library's buffer for unread body bytes: it stops reading at twice as much, which is the size of one
read; with less it would stop after every read."""
BACKLOG: Final = 1024
_ACCEPTED_MAX: Final = 256
"""Connections accepted in one iteration of the loop; the next iteration reads what each of them has sent."""
_DISABLED_LOGGER: Final = logging.getLogger("serve_proxy.http")
_DISABLED_LOGGER.disabled = True
"""aiohttp logs a traceback for every malformed request; client errors are counted and answered instead."""


@final
class HttpServer:
    """Listens, and passes each HTTP request to `HttpRequests`."""

    def __init__(self, requests: HttpRequests, ingress: Ingress, tls: ssl.SSLContext | None = None) -> None:
        """With ``tls`` all connections are HTTPS."""
        self.in_flight = 0
        """Requests without a complete response."""
        self.gathered: list[tuple[HttpConnection, bytes, bool]] | None = None
        """As of `ConnectionOwner`."""
        self.tasks: Final = TaskOwner("http")
        self.requests: Final = requests
        self.ingress = ingress
        self._loop = asyncio.get_running_loop()
        self._http = _Connections(
            self._handle,
            self,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            lingering_time=_LINGERING_S,
            read_bufsize=_READ_BYTES_MAX,
            logger=_DISABLED_LOGGER,
        )
        self._tls: Final[dict[str, Any]] = (
            {}
            if tls is None
            else {
                "ssl": tls,
                "ssl_handshake_timeout": HANDSHAKE_TIMEOUT_S,
                "ssl_shutdown_timeout": SHUTDOWN_TIMEOUT_S,
            }
        )
        self._listener: asyncio.Server | None = None
        self._address: tuple[str, int, bool] | None = None
        self._listening_sockets: list[socket.socket] = []
        """Duplicates of the listener's sockets."""

    def start_gathering(self) -> None:
        """Complete responses come: write none before `write_gathered`.

        Why: a client that gets one at a time goes to sleep after each, and waking it costs more than the write.
        """
        if self.gathered is None and self.in_flight > 1:
            self.gathered = []

    def write_gathered(self) -> None:
        """Write them."""
        gathered, self.gathered = self.gathered, None
        for connection, data, closes in gathered or ():
            connection.finish_fast_path(data, closes=closes)

    @property
    def connections(self) -> int:
        """Open connections of clients."""
        return len(self._http.connections)

    async def start(self, host: str, port: int, reuse_port: bool = False) -> str:  # noqa: FBT001, FBT002 - as asyncio
        """Listen; returns the address as host:port. Raises OSError when the port is taken.

        With ``reuse_port`` other processes may listen there too, and the system spreads connections over them.
        """
        if self._listener is not None:
            raise RuntimeError("it listens already")
        self._listener = await self._loop.create_server(
            self._accept, host, port, backlog=BACKLOG, reuse_port=reuse_port, **self._tls
        )
        for listening in self._listener.sockets:
            listening_socket = socket.socket(fileno=os.dup(listening.fileno()))
            listening_socket.settimeout(0)
            self._listening_sockets.append(listening_socket)
        bound = self._listener.sockets[0].getsockname()
        self._address = host, bound[1], reuse_port
        return f"{bound[0]}:{bound[1]}"

    async def listen_again(self) -> None:
        """Listen on the former port after `stop_listening`. Raises OSError when another program has it."""
        if self._listener is None and self._address is not None:
            await self.start(*self._address)

    async def stop_listening(self) -> None:
        """Accept no new connections; open ones stay.

        Connections that wait to be accepted count as open: their clients may have sent a request already, and the
        system would reset them with the listener.
        """
        listener, self._listener = self._listener, None
        if listener is None:
            return
        listening_sockets, self._listening_sockets = self._listening_sockets, []
        for listening_socket in listening_sockets:
            with contextlib.suppress(
                OSError
            ):  # a system without socket filters: then a few connections may be reset
                drop_new_connections(listening_socket)
        listener.close()
        waiting: list[socket.socket] = []
        for listening_socket in listening_sockets:
            with listening_socket:  # it kept the socket open after the loop closed its own
                while (accepted := _accept_pending(listening_socket)) is not None:
                    waiting.append(accepted)
        await asyncio.gather(*map(self._connect, waiting))

    def close_idle(self) -> None:
        """Close the connections without a request in flight or unread."""
        for connection in self._http.connections:
            if isinstance(connection, HttpConnection):
                connection.close_if_idle()

    async def close(self, timeout_s: float) -> None:
        """Close all connections, giving requests in flight up to ``timeout_s``."""
        await self.stop_listening()
        await self._http.shutdown(timeout_s)
        await self.tasks.close(timeout_s)

    # -- for connections (see `ConnectionOwner`) --

    @property
    def header_timeout_s(self) -> float:
        """Seconds within which the head of a request must arrive."""
        return self.requests.options.header_timeout_s

    def _accept(self) -> web.RequestHandler:
        """The protocol of a connection that the loop has accepted; further pending connections are accepted too.

        libuv accepts one in each iteration of the loop. While many bodies are read an iteration takes tens of
        milliseconds, and the last of some hundred clients would wait for seconds until its request is read.
        """
        left = _ACCEPTED_MAX
        for listening_socket in self._listening_sockets:
            while left > 0 and (accepted := _accept_pending(listening_socket)) is not None:
                self.tasks.start(self._connect(accepted), name="connect")
                left -= 1
        return self._http()

    async def _connect(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._http, accepted, **self._tls)
        except OSError as error:
            _log.debug("connection_lost_early", reason=str(error))
            accepted.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.in_flight += 1
        try:
            response = await self.requests.handle(request)
            if request.body_exists and not response.prepared and is_mostly_unread(request):
                connection = request.protocol
                assert isinstance(connection, HttpConnection), "it was made by `_Connections`"
                with contextlib.suppress(
                    ConnectionError
                ):  # the client disconnected, which the library detects next
                    await response.prepare(request)
                    await response.write_eof()
                    connection.drop_rest()
            return response
        finally:
            self.in_flight -= 1


def _accept_pending(listening_socket: socket.socket) -> socket.socket | None:
    """A pending connection; None when there is none, or this process can open no more files."""
    try:
        return listening_socket.accept()[0]
    except OSError:
        return None


class _Connections(web.Server):
    """Makes an `HttpConnection` for each client."""

    def __init__(self, handler: Any, owner: HttpServer, **kwargs: Any) -> None:
        super().__init__(handler, **kwargs)
        self._owner = owner
        self._connection_kwargs = {k: v for k, v in kwargs.items() if k != "handler_cancellation"}

    def __call__(self) -> web.RequestHandler:
        keepalive_timeout_s = self._owner.requests.options.keep_alive_timeout_s
        return HttpConnection(
            self,
            self._owner,
            loop=self._loop,
            keepalive_timeout=keepalive_timeout_s,
            **self._connection_kwargs,
        )
