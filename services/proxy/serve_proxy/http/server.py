"""HTTP for clients: aiohttp's low-level server, which only parses and writes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import socket
import struct
from typing import Any, Final, final

import structlog
from aiohttp import web
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader

from serve_common.dispatch.calls import Call, Response
from serve_common.runtime.tasks import TaskOwner
from serve_proxy.http.bodies import is_mostly_unread
from serve_proxy.http.connection import HttpConnection
from serve_proxy.http.fast_path import FastExchange, refuse_full, take_simple
from serve_proxy.http.requests import HttpRequests
from serve_proxy.http.responses import respond
from serve_proxy.shell.ingress import Ingress

_SO_ATTACH_FILTER: Final = 26
"""Linux, asm-generic/socket.h."""
_SYN, _ACK, _FLAGS_AT = 0x02, 0x10, 13
"""RFC 9293, 3.1: a filter of a TCP socket sees segments from their header on."""
_PROGRAM: Final = (
    # Classic BPF (linux/filter.h) as (code, jump if true, jump if false, constant).
    (0x30, 0, 0, _FLAGS_AT),  # load the byte of flags
    (0x54, 0, 0, _SYN | _ACK),  # keep these two
    (0x15, 0, 1, _SYN),  # a SYN that answers nothing: it opens a connection
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # take
)


def let_nobody_in(listener: socket.socket) -> None:
    """From now on no connection begins on a listening TCP socket; those that have begun may be accepted.

    Raises OSError where the system has no such filters.
    """
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in _PROGRAM))
    described = struct.pack("HL", len(_PROGRAM), ctypes.addressof(program))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)


_log = structlog.get_logger(__name__)

_LINGERING_S: Final = 2.0
"""How long the rest of a body is read that nobody wants, so that its client reads the answer."""
_READ_BYTES_MAX: Final = 128 * 1024
"""Of a body that its reader has not taken yet, in the library's buffer: it stops reading at twice as much, which is
what comes at once; with less it would stop after every read."""
BACKLOG: Final = 1024
_ACCEPTED_MAX: Final = 256
"""Connections that are accepted in one turn of the loop; the next one reads what each of them has sent."""
_QUIET: Final = logging.getLogger("serve_proxy.http")
_QUIET.disabled = True
"""aiohttp logs a traceback for every malformed request; what clients get wrong is counted and answered instead."""


@final
class HttpServer:
    """Listens, and hands each HTTP request on."""

    def __init__(self, requests: HttpRequests, ingress: Ingress) -> None:
        self.in_flight = 0
        """Requests that have not been answered."""
        self.tasks: Final = TaskOwner("http")
        self.requests: Final = requests
        self._ingress = ingress
        self._loop = asyncio.get_running_loop()
        self._http = _Connections(
            self._handle,
            self,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            lingering_time=_LINGERING_S,
            read_bufsize=_READ_BYTES_MAX,
            logger=_QUIET,
        )
        self._listener: asyncio.Server | None = None
        self._doors: list[socket.socket] = []
        """The listener's sockets, by descriptors of our own."""

    @property
    def connections(self) -> int:
        """Open connections of clients."""
        return len(self._http.connections)

    async def start(self, host: str, port: int, reuse_port: bool = False) -> str:  # noqa: FBT001, FBT002 - as asyncio
        """Listen; returns the address as host:port. Raises OSError when the port is taken.

        With ``reuse_port`` other processes may listen there too, and the system spreads connections over them.
        """
        self._listener = await self._loop.create_server(
            self._accept, host, port, backlog=BACKLOG, reuse_port=reuse_port
        )
        for listening in self._listener.sockets:
            door = socket.socket(fileno=os.dup(listening.fileno()))
            door.settimeout(0)
            self._doors.append(door)
        bound = self._listener.sockets[0].getsockname()
        return f"{bound[0]}:{bound[1]}"

    async def stop_listening(self) -> None:
        """Take no new connections; those that are open stay.

        Connections that wait to be accepted count as open: their clients may have sent a request already, and the
        system would reset them with the listener.
        """
        listener, self._listener = self._listener, None
        if listener is None:
            return
        doors, self._doors = self._doors, []
        for door in doors:
            with contextlib.suppress(OSError):  # a system without filters: then the gap is small
                let_nobody_in(door)
        listener.close()
        waiting: list[socket.socket] = []
        for door in doors:
            with door:  # it has kept the socket open after the loop has let go of it
                while (accepted := _accept_waiting(door)) is not None:
                    waiting.append(accepted)
        for accepted in waiting:
            await self._connect(accepted)

    def close_idle(self) -> None:
        """Close the connections on which nothing was asked and nothing has come."""
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
        """See `HttpOptions`."""
        return self.requests.options.header_timeout_s

    def take_simple(
        self, connection: HttpConnection, message: RawRequestMessage, payload: StreamReader
    ) -> FastExchange | None:
        """See `http_fast.take_simple`."""
        return take_simple(connection, self.requests, self._ingress, message, payload)

    def refuse_full(
        self, connection: HttpConnection, message: RawRequestMessage, payload: StreamReader
    ) -> bool:
        """See `http_fast.refuse_full`."""
        return refuse_full(connection, self.requests, self._ingress, message, payload)

    async def respond(
        self, request: web.BaseRequest, call: Call, answer: Response, request_id: str
    ) -> web.StreamResponse:
        """See `http_answers.respond`."""
        rate_min = self.requests.options.body_rate_min
        return await respond(self._ingress, request, call, answer, request_id, rate_min=rate_min)

    def _accept(self) -> web.RequestHandler:
        """The protocol of a connection that the loop has accepted; those that wait behind it are accepted too.

        libuv accepts one in each turn of the loop. While many bodies are read a turn takes tens of milliseconds, and
        the last of some hundred clients would wait for seconds until its request is looked at.
        """
        left = _ACCEPTED_MAX
        for door in self._doors:
            while left > 0 and (accepted := _accept_waiting(door)) is not None:
                self.tasks.start(self._connect(accepted), name="connect")
                left -= 1
        return self._http()

    async def _connect(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._http, accepted)
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
                with contextlib.suppress(ConnectionError):  # the client is gone, which the library sees next
                    await response.prepare(request)
                    await response.write_eof()
                    connection.drop_rest()
            return response
        finally:
            self.in_flight -= 1


def _accept_waiting(door: socket.socket) -> socket.socket | None:
    """A connection that waits to be accepted; None when there is none, or this process may open no more."""
    try:
        return door.accept()[0]
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
