"""Handles HTTP requests by the options in force, and serves the proxy's internal routes.

Why two ways: without middlewares a request goes straight to its endpoint; only with them does it pay for the chain and
for the copy of the request that it passes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, final

import msgspec
from aiohttp import web

from serve_common.config.backend import HttpOptions
from serve_common.dispatch.admission import CLIENT_GONE
from serve_common.dispatch.errors import MethodNotAllowed, NoRoute
from serve_common.errors import ServeError
from serve_proxy.core.access_line import AccessLine
from serve_proxy.core.headers import REQUEST_ID, get_client, read_request_headers
from serve_proxy.core.problems import Problem, build_problem
from serve_proxy.http.bodies import is_mostly_unread
from serve_proxy.http.endpoint import EndpointHandler, check_head, get_peer, get_target
from serve_proxy.http.middlewares import EXCHANGE, Handler, Middleware, MiddlewareRequestState, compose
from serve_proxy.http.response_heads import SERVER_NAME
from serve_proxy.http.responses import problem_response, whole_bytes
from serve_proxy.shell.ingress import Ingress
from serve_proxy.shell.request_observers import AccessLog, RequestTraces

OWN_PREFIX: Final = "/-/"
ROUTES_PATH: Final = "/-/routes"
"""Requests to it pass the middlewares, as all others do; health checks do not."""


def serve_internal_path(ingress: Ingress, method: str, path: str, request_id: str) -> web.Response:
    """Serve ``/-/healthz`` and ``/-/routes``; every other path below the prefix is 404."""
    if path not in ("/-/healthz", ROUTES_PATH):
        missing = NoRoute(path, ingress.routes.table.error_format)
        return problem_response(build_problem(missing), request_id)
    if method not in ("GET", "HEAD"):
        return problem_response(build_problem(MethodNotAllowed(method, "GET, HEAD")), request_id)
    if path == ROUTES_PATH:
        body = msgspec.json.encode(ingress.routes.table.routes())
        return web.Response(body=body, content_type="application/json")
    reason = ingress.routing_error()
    if reason is None:
        return web.Response(text="success")  # as Ray Serve's, which programs compare
    return web.Response(status=503, text=f"{reason}\n", headers={"Retry-After": "1"})


@final
class HttpRequests:
    """Turns each HTTP request into a call, and the call's response into the HTTP response."""

    def __init__(
        self,
        ingress: Ingress,
        options: HttpOptions,
        *,
        new_request_id: Callable[[], str],
        forwarded_hops: int = 0,
        traces: RequestTraces | None = None,
        log_request: Callable[[AccessLine], None] | None = None,
        scheme: str = "http",
    ) -> None:
        """``traces`` is None if tracing is off; ``log_request`` receives the access log's lines, if there is one.

        ``scheme`` is that of all connections: http or https.
        """
        self.scheme: Final = scheme
        """Scheme of all connections."""
        self.options = options
        """The options for requests that arrive now."""
        self.observer: RequestTraces | AccessLog | None = None
        """Attaches observers to requests that arrive now; None when they are not observed."""
        self.new_request_id: Final = new_request_id
        self.now: Final = asyncio.get_running_loop().time
        self._ingress = ingress
        self._chain: Handler | None = None
        """The middlewares composed around the endpoint handler; None when there are none."""
        self.has_middlewares = False
        """True when requests that arrive now pass middlewares."""
        self._traces = traces
        self._access_log = None if log_request is None else AccessLog(log_request, traces)
        self.forwarded_hops: Final = forwarded_hops
        """Number of trusted proxies in front, as `ProxySettings.forwarded_hops`."""
        self._endpoints = EndpointHandler(ingress, new_request_id, forwarded_hops, scheme)
        self.sockets: Final = self._endpoints.sockets
        self.use(options, ())

    async def close(self, timeout_s: float) -> None:
        """Cancel the remaining uploads and sockets."""
        await self._endpoints.close(timeout_s)

    def use(self, options: HttpOptions, middlewares: tuple[Middleware, ...]) -> None:
        """Apply both to requests that arrive from now on; the first middleware is the outermost."""

        async def innermost(request: web.BaseRequest) -> web.StreamResponse:
            # A middleware may pass on another request than it received.
            path, _, query = get_target(request).partition("?")
            exchange = request.get(EXCHANGE)
            if path.startswith(OWN_PREFIX):
                request_id = self.new_request_id() if exchange is None else exchange.request_id
                return serve_internal_path(self._ingress, request.method, path, request_id)
            return await self._endpoints.handle(
                request, path, query, options, observer=self.observer, exchange=exchange
            )

        self.options = options
        self._chain = compose(middlewares, innermost) if middlewares else None
        self.has_middlewares = self._chain is not None
        self.observer = self._traces
        if options.access_log and self._access_log is not None:
            self.observer = self._access_log

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Respond to one request."""
        try:
            check_head(request)
        except ServeError as error:
            return self._refuse(request, build_problem(error))
        path, _, query = get_target(request).partition("?")
        if path.startswith(OWN_PREFIX) and (path != ROUTES_PATH or self._chain is None):
            request_id = read_request_headers(request.raw_headers).request_id or self.new_request_id()
            response: web.StreamResponse = serve_internal_path(
                self._ingress, request.method, path, request_id
            )
            response.headers[REQUEST_ID.lower()] = request_id
        else:
            if not self._ingress.is_open:
                await self._ingress.wait_open()
            options, chain = self.options, self._chain
            if chain is None:
                response = await self._endpoints.handle(
                    request, path, query, options, observer=self.observer, exchange=None
                )
            else:
                response = await self._handle_with_middlewares(chain, request, options)
        if not response.prepared:
            response.headers["Server"] = SERVER_NAME
            if self._ingress.is_draining or (request.body_exists and is_mostly_unread(request)):
                response.force_close()
        return response

    def _refuse(self, request: web.BaseRequest, problem: Problem) -> web.Response:
        """Respond to an invalid request, and close its connection."""
        self._ingress.routes.unmatched.add(request.method, problem.status, 0.0)
        request_id = self.new_request_id()
        if isinstance(self.observer, AccessLog):
            path = get_target(request).partition("?")[0]
            self.observer.refused(request.method, path, request_id, get_peer(request), problem)
        response = problem_response(problem, request_id)
        response.headers["Server"] = SERVER_NAME
        response.force_close()
        return response

    # -- with middlewares --

    async def _handle_with_middlewares(
        self, chain: Handler, request: web.BaseRequest, options: HttpOptions
    ) -> web.StreamResponse:
        started_at = time.perf_counter()
        read = read_request_headers(request.raw_headers, self.forwarded_hops)
        request_id = read.request_id or self.new_request_id()
        deadline = self.now() + options.request_timeout_s
        client = get_client(read.forwarded_for, get_peer(request))
        exchange = MiddlewareRequestState(request_id, deadline, self._ingress.routes.unmatched, client)
        if self.observer is not None:
            path = get_target(request).partition("?")[0]
            peer = get_peer(request)
            self.observer.start(
                read, request.method, path, self.scheme, request_id, peer=peer, body=request.content
            )
            exchange.observer, exchange.traceparent = read.observer, read.traceparent
        status, sent_bytes = CLIENT_GONE, 0
        try:
            response = await exchange.run(chain, request, options, self.forwarded_hops)
            if not response.prepared:
                response.headers[REQUEST_ID.lower()] = request_id
            status = response.status
            if exchange.observer is not None:
                sent_bytes = whole_bytes(request, response)
            return response
        finally:
            exchange.stats.add(request.method, status, time.perf_counter() - started_at)
            if exchange.observer is not None:
                exchange.observer.ended(status, exchange.problem, sent_bytes)
