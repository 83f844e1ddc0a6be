"""HTTP for clients: aiohttp's low-level server, which only parses and writes.

Why not a `web.Application`: its own routing, middlewares and access log cost a quarter of the throughput, and the
routes here change while it runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from typing import Any, Final, NoReturn, final
from urllib.parse import quote

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict

from serve_common.errors import ServeError
from serve_common.values import HttpOptions
from serve_proxy.adapters.http_body import read_body
from serve_proxy.adapters.own_paths import OWN_PREFIX, answer_own_path
from serve_proxy.core.headers import REQUEST_ID, read_request_headers, read_response_head
from serve_proxy.core.problems import (
    AnswerUnusable,
    BadRequest,
    Problem,
    encode_problem,
    problem_of,
)
from serve_proxy.core.retry import can_repeat
from serve_proxy.core.tallies import CLIENT_GONE
from serve_proxy.shell.calls import Answer, AnswerBody, Ask, Call
from serve_proxy.shell.ingress import Ingress

_log = structlog.get_logger(__name__)

KEEPALIVE_TIMEOUT_S: Final = 75.0
BACKLOG: Final = 1024
_SERVER_NAME: Final = "muster"
_QUIET: Final = logging.getLogger("serve_proxy.http")
_QUIET.disabled = True
"""aiohttp logs a traceback for every malformed request; what clients get wrong is counted and answered instead."""


@final
class HttpServer:
    """Listens, and turns each HTTP request into a call."""

    def __init__(self, ingress: Ingress, options: HttpOptions, *, new_request_id: Callable[[], str]) -> None:
        self.in_flight = 0
        """Requests that have not been answered."""
        self._ingress = ingress
        self._options = options
        self._new_request_id = new_request_id
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

    def stop_listening(self) -> None:
        """Take no new connections; those that are open stay."""
        if self._listener is not None:
            self._listener.close()

    async def close(self, timeout_s: float) -> None:
        """Close all connections, giving requests in flight up to ``timeout_s``."""
        self.stop_listening()
        await self._http.shutdown(timeout_s)

    # -- one request --

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.in_flight += 1
        try:
            path, _, query = _target(request).partition("?")
            if path.startswith(OWN_PREFIX):
                response: web.StreamResponse = answer_own_path(self._ingress, request.method, path)
                read = read_request_headers(request.raw_headers)
                response.headers[REQUEST_ID] = read.request_id or self._new_request_id()
            else:
                response = await self._answer(request, path, query)
            response.headers["Server"] = _SERVER_NAME
            if self._ingress.is_draining:
                response.force_close()
            return response
        finally:
            self.in_flight -= 1

    async def _answer(self, request: web.BaseRequest, path: str, query: str) -> web.StreamResponse:
        began = time.perf_counter()  # the loop's own time stands still within an iteration
        method = request.method
        headers = read_request_headers(request.raw_headers)
        request_id = headers.request_id or self._new_request_id()
        tally = self._ingress.routes.unmatched
        status = CLIENT_GONE
        try:
            if not self._ingress.routes.is_filled:
                await self._ingress.wait_filled()
            endpoint = self._ingress.admit(method, path)
            tally = endpoint.tally
            deadline = self._loop.time() + self._options.request_timeout_s
            body = (
                await read_body(request, self._options.body_bytes_max, deadline)
                if request.body_exists
                else b""
            )
            call, answer = await self._ingress.ask(
                Ask(
                    endpoint=endpoint,
                    method=method,
                    path=path,
                    route=endpoint.route,
                    query=query,
                    headers=headers.forwarded,
                    body=body,
                    request_id=request_id,
                    traceparent=headers.traceparent,
                    is_repeatable=can_repeat(method, has_idempotency_key=headers.has_idempotency_key),
                    deadline=deadline,
                )
            )
            status = answer.status
            return await self._respond(request, call, answer, request_id)
        except ServeError as error:
            problem = problem_of(error)
            status = problem.status
            return problem_response(problem, request_id)
        except (asyncio.CancelledError, ConnectionError):
            status = CLIENT_GONE
            raise
        except Exception as error:  # noqa: BLE001 - the client is owed an answer; it is logged
            _log.exception("request_failed", request_id=request_id, path=path[:200])
            status = 500
            problem = Problem(
                status=500, code="internal", message=f"the proxy failed: {type(error).__name__}"
            )
            return problem_response(problem, request_id)
        finally:
            tally.add(method, status, time.perf_counter() - began)

    async def _respond(
        self, request: web.BaseRequest, call: Call, answer: Answer, request_id: str
    ) -> web.StreamResponse:
        try:
            forwarded, content_length = read_response_head(answer.status, answer.headers)
        except ValueError as error:
            self._ingress.abandon(call)
            raise AnswerUnusable(f"the replica's answer cannot be sent: {error}") from error
        headers = CIMultiDict(forwarded)
        headers[REQUEST_ID] = request_id
        if answer.stream is None:
            if request.method == "HEAD" and content_length is not None and not answer.body:
                headers["Content-Length"] = str(content_length)
            return web.Response(status=answer.status, headers=headers, body=bytes(answer.body))
        if request.method == "HEAD" or answer.status in (204, 304):
            self._ingress.abandon(call)
            if content_length is not None:
                headers["Content-Length"] = str(content_length)
            return web.Response(status=answer.status, headers=headers)
        response = web.StreamResponse(status=answer.status, headers=headers)
        response.content_length = content_length
        response.headers["Server"] = _SERVER_NAME
        if self._ingress.is_draining:
            response.force_close()
        try:
            async with asyncio.timeout_at(call.ask.deadline):
                await self._stream(request, response, answer.stream, content_length)
        except TimeoutError as error:
            _log.warning("client_reads_too_slowly", request_id=request_id)
            _break_off(request, error)
        finally:
            self._ingress.abandon(call)
        return response

    async def _stream(
        self,
        request: web.BaseRequest,
        response: web.StreamResponse,
        body: AnswerBody,
        content_length: int | None,
    ) -> None:
        """Write pieces as they come. An answer that breaks off closes the connection: nothing else can tell."""
        await response.prepare(request)
        written_bytes = 0
        try:
            while (piece := await body.read()) is not None:
                if piece:
                    await response.write(piece)
                    written_bytes += len(piece)
            if content_length is not None and written_bytes != content_length:
                raise AnswerUnusable(f"the replica promised {content_length} bytes and sent {written_bytes}")
        except ServeError as error:
            _log.warning("answer_broke_off", reason=str(error), written_bytes=written_bytes)
            _break_off(request, error)
        await response.write_eof()


def _break_off(request: web.BaseRequest, cause: Exception) -> NoReturn:
    """Close the connection in the middle of an answer."""
    if request.transport is not None:
        request.transport.abort()
    raise ConnectionResetError("the answer broke off") from cause


def _target(request: web.BaseRequest) -> str:
    """Path and query as the client sent them, in ASCII."""
    target = request.raw_path
    if not target.startswith("/"):
        target = request.rel_url.raw_path_qs  # the absolute form, which clients send to proxies
    if not target.isascii():
        target = quote(target.encode("utf-8", "surrogateescape"), safe="/?#[]@!$&'()*+,;=:%~")
    return target


def problem_response(problem: Problem, request_id: str) -> web.Response:
    """An error as HTTP."""
    headers = CIMultiDict(problem.headers)
    headers["Content-Type"] = "application/json"
    headers[REQUEST_ID] = request_id
    return web.Response(status=problem.status, headers=headers, body=encode_problem(problem, request_id))


class _Connection(web.RequestHandler):
    """One client's connection; what is not HTTP gets the same form of error as everything else."""

    __slots__ = ()

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
