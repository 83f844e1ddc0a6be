"""HTTP for clients: aiohttp's low-level server, which only parses and writes.

Why not a `web.Application`: its own routing, middlewares and access log cost a quarter of the throughput, and the
routes here change while it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import uuid
from typing import Any, Final, final

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from serve_proxy.adapters.http_answers import problem_response
from serve_proxy.adapters.http_requests import HttpRequests
from serve_proxy.core.problems import BadRequest, Problem, problem_of

_log = structlog.get_logger(__name__)

KEEPALIVE_TIMEOUT_S: Final = 75.0
BACKLOG: Final = 1024
_QUIET: Final = logging.getLogger("serve_proxy.http")
_QUIET.disabled = True
"""aiohttp logs a traceback for every malformed request; what clients get wrong is counted and answered instead."""


@final
class HttpServer:
    """Listens, and hands each HTTP request on."""

    def __init__(self, requests: HttpRequests) -> None:
        self.in_flight = 0
        """Requests that have not been answered."""
        self._requests = requests
        self._loop = asyncio.get_running_loop()
        self._http = _Connections(
            self._handle,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=KEEPALIVE_TIMEOUT_S,
            logger=_QUIET,
        )
        self._listener: asyncio.Server | None = None

    @property
    def connections(self) -> int:
        """Open connections of clients."""
        return len(self._http.connections)

    async def start(self, host: str, port: int) -> str:
        """Listen; returns the address as host:port. Raises OSError when the port is taken."""
        self._listener = await self._loop.create_server(self._http, host, port, backlog=BACKLOG)
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
        waiting: list[socket.socket] = []
        with contextlib.ExitStack() as stack:
            # Own descriptors keep the sockets open after the loop has let go of them.
            doubles = [
                stack.enter_context(socket.socket(fileno=os.dup(bound.fileno())))
                for bound in listener.sockets
            ]
            listener.close()
            for double in doubles:
                double.settimeout(0)
                with contextlib.suppress(BlockingIOError):  # that was the last one
                    while True:
                        waiting.append(double.accept()[0])
        for accepted in waiting:
            try:
                await self._loop.connect_accepted_socket(self._http, accepted)
            except OSError as error:
                _log.debug("connection_lost_in_drain", reason=str(error))
                accepted.close()

    def close_idle(self) -> None:
        """Close the connections on which nothing was asked and nothing has come."""
        for connection in self._http.connections:
            if isinstance(connection, _Connection):
                connection.close_if_idle()

    async def close(self, timeout_s: float) -> None:
        """Close all connections, giving requests in flight up to ``timeout_s``."""
        await self.stop_listening()
        await self._http.shutdown(timeout_s)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.in_flight += 1
        try:
            return await self._requests.handle(request)
        finally:
            self.in_flight -= 1


class _Connection(web.RequestHandler):
    """One client's connection; what is not HTTP gets the same form of error as everything else."""

    __slots__ = ()

    def close_if_idle(self) -> None:
        """Close it when no request is under way and none waits to be read: closing would reset that one."""
        transport, waiter = self.transport, self._waiter
        if transport is None or waiter is None or waiter.done() or self._messages:
            return
        poll = select.poll()
        poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        if not poll.poll(0):
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer a request that could not be parsed, or whose handler failed."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun, so no error can be sent")
        if isinstance(exc, HttpProcessingError):
            problem = problem_of(BadRequest("request", (message or str(exc)).partition("\n")[0][:200]))
        else:
            _log.error("connection_failed", exc_info=exc)
            problem = Problem(status=status, code="internal", message="the proxy failed")
        response = problem_response(problem, uuid.uuid4().hex)
        response.force_close()
        return response


class _Connections(web.Server):
    """Makes a `_Connection` for each client."""

    def __init__(self, handler: Any, **kwargs: Any) -> None:
        super().__init__(handler, **kwargs)
        self._connection_kwargs = {k: v for k, v in kwargs.items() if k != "handler_cancellation"}

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._connection_kwargs)
