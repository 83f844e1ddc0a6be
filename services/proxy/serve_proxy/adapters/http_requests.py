"""One HTTP request: read, asked of an endpoint, and its answer written.

Why two ways through: without middlewares a request goes straight to its answer; with them it takes a detour whose cost
only those who want it pay.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, NamedTuple, final
from urllib.parse import quote

import structlog
from aiohttp import web

from serve_common.dispatch.calls import Ask
from serve_common.dispatch.retry import can_repeat
from serve_common.dispatch.tallies import CLIENT_GONE, EndpointTally
from serve_common.errors import ServeError
from serve_common.values import HttpOptions
from serve_proxy.adapters.http_answers import SERVER_NAME, as_response, problem_response, respond
from serve_proxy.adapters.http_body import check_announced, let_continue, read_body, read_body_once
from serve_proxy.adapters.middlewares import Handler, Middleware, compose
from serve_proxy.adapters.own_paths import OWN_PREFIX, answer_own_path
from serve_proxy.core.headers import REQUEST_ID, read_request_headers
from serve_proxy.core.problems import Problem, problem_of
from serve_proxy.shell.ingress import Ingress

_log = structlog.get_logger(__name__)

_MIDDLEWARE_GRACE_S: Final = 0.5
"""What middlewares get beyond the deadline, so that a late answer is told by what waited for it."""


class _InForce(NamedTuple):
    """What holds for a request from its arrival to its end, whatever changes meanwhile."""

    options: HttpOptions
    chain: Handler | None
    """All middlewares around the way to the endpoint; None when there are none."""


@final
class _Exchange:
    """What a request with middlewares carries through them."""

    __slots__ = ("deadline", "request_id", "tally")

    def __init__(self, request_id: str, deadline: float, tally: EndpointTally) -> None:
        self.request_id = request_id
        self.deadline = deadline
        self.tally = tally
        """Where it counts; its endpoint's once that is known."""


_EXCHANGE: Final = web.RequestKey("muster.exchange", _Exchange)


@final
class HttpRequests:
    """Turns each HTTP request into a call, and the call's answer into the HTTP answer."""

    def __init__(self, ingress: Ingress, options: HttpOptions, *, new_request_id: Callable[[], str]) -> None:
        self._ingress = ingress
        self._new_request_id = new_request_id
        self._loop = asyncio.get_running_loop()
        self._in_force = _InForce(options, None)

    def use(self, options: HttpOptions, middlewares: tuple[Middleware, ...]) -> None:
        """Treat requests that arrive from now on so; the first middleware is the outermost."""

        async def innermost(request: web.BaseRequest) -> web.StreamResponse:
            # A middleware may hand on another request than it was given.
            path, _, query = _target(request).partition("?")
            return await self._answer(request, path, query, options, request.get(_EXCHANGE))

        self._in_force = _InForce(options, compose(middlewares, innermost) if middlewares else None)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        path, _, query = _target(request).partition("?")
        if path.startswith(OWN_PREFIX):
            response: web.StreamResponse = answer_own_path(self._ingress, request.method, path)
            read = read_request_headers(request.raw_headers)
            response.headers[REQUEST_ID] = read.request_id or self._new_request_id()
        else:
            if not self._ingress.is_open:
                await self._ingress.wait_open()
            options, chain = self._in_force
            if chain is None:
                response = await self._answer(request, path, query, options, None)
            else:
                response = await self._answer_through(chain, request, options)
        response.headers["Server"] = SERVER_NAME
        if self._ingress.is_draining:
            response.force_close()
        return response

    # -- with middlewares --

    async def _answer_through(
        self, chain: Handler, request: web.BaseRequest, options: HttpOptions
    ) -> web.StreamResponse:
        began = time.perf_counter()
        request_id = read_request_headers(request.raw_headers).request_id or self._new_request_id()
        deadline = self._loop.time() + options.request_timeout_s
        exchange = _Exchange(request_id, deadline, self._ingress.routes.unmatched)
        status = CLIENT_GONE
        try:
            response = await self._call_chain(chain, request, options, exchange)
            if not response.prepared:
                response.headers[REQUEST_ID] = request_id
            status = response.status
            return response
        finally:
            exchange.tally.add(request.method, status, time.perf_counter() - began)

    async def _call_chain(
        self, chain: Handler, request: web.BaseRequest, options: HttpOptions, exchange: _Exchange
    ) -> web.StreamResponse:
        given = request.clone(client_max_size=options.body_bytes_max)
        given[_EXCHANGE] = exchange
        try:
            check_announced(request, options.body_bytes_max)
        except ServeError as error:
            return problem_response(problem_of(error), exchange.request_id)
        await let_continue(request)  # a middleware may want the body
        scope = asyncio.timeout_at(exchange.deadline + _MIDDLEWARE_GRACE_S)
        try:
            async with scope:
                response = await chain(given)
            if not isinstance(response, web.StreamResponse):
                raise TypeError(f"a middleware returned {type(response).__name__}, no response")  # noqa: TRY301 - a failure like what it raises
            if request.writer.output_size > 0 and not response.prepared:
                raise RuntimeError("a middleware returned a response after another one had begun")  # noqa: TRY301 - as above
        except web.HTTPException as answer:
            if request.writer.output_size == 0:
                return as_response(answer)
            return self._fail(request, exchange, answer, is_late=False)
        except Exception as error:
            transport = request.transport
            if isinstance(error, ConnectionError) and (transport is None or transport.is_closing()):
                raise  # the client's own connection, not one that a middleware made
            return self._fail(request, exchange, error, is_late=scope.expired())
        return response

    def _fail(
        self, request: web.BaseRequest, exchange: _Exchange, error: Exception, *, is_late: bool
    ) -> web.Response:
        _log.error(
            "middleware_failed", request_id=exchange.request_id, path=request.raw_path[:200], exc_info=error
        )
        if request.writer.output_size > 0:
            # What was written still goes out, and then the connection is closed.
            raise ConnectionResetError("a middleware failed after the answer had begun") from error
        if is_late:
            problem = Problem(
                status=504, code="deadline_exceeded", message="the middlewares did not answer in time"
            )
        else:
            message = f"a middleware failed: {type(error).__name__}"
            problem = Problem(status=500, code="middleware_failed", message=message)
        return problem_response(problem, exchange.request_id)

    # -- the endpoint's answer --

    async def _answer(
        self,
        request: web.BaseRequest,
        path: str,
        query: str,
        options: HttpOptions,
        exchange: _Exchange | None,
    ) -> web.StreamResponse:
        """The answer of the endpoint for ``path``; with an ``exchange``, whoever made that counts the request."""
        began = time.perf_counter()  # the loop's own time stands still within an iteration
        method = request.method
        headers = read_request_headers(request.raw_headers)
        if exchange is None:
            request_id = headers.request_id or self._new_request_id()
            deadline = self._loop.time() + options.request_timeout_s
        else:
            request_id, deadline = exchange.request_id, exchange.deadline
        tally = self._ingress.routes.unmatched
        status = CLIENT_GONE
        try:
            endpoint = self._ingress.admit(method, path)
            tally = endpoint.tally
            if not request.body_exists:
                body = b""
            elif exchange is None:
                body = await read_body(request, options.body_bytes_max, deadline)
            else:
                body = await read_body_once(request, options.body_bytes_max, deadline)
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
            return await respond(self._ingress, request, call, answer, request_id)
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
            if exchange is None:
                tally.add(method, status, time.perf_counter() - began)
            else:
                exchange.tally = tally


def _target(request: web.BaseRequest) -> str:
    """Path and query as the client sent them, in ASCII."""
    target = request.raw_path
    if not target.startswith("/"):
        target = request.rel_url.raw_path_qs  # the absolute form, which clients send to proxies
    if not target.isascii():
        target = quote(target.encode("utf-8", "surrogateescape"), safe="/?#[]@!$&'()*+,;=:%~")
    return target
