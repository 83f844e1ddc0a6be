"""One HTTP request: read, asked of an endpoint, and its answer written.

Why two ways through: without middlewares a request goes straight to its answer; with them it takes a detour whose cost
only those who want it pay.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, NamedTuple, final

import msgspec
import structlog
from aiohttp import web

from serve_common.adapters.system_clock import SystemClock
from serve_common.dispatch.admission import Endpoint
from serve_common.dispatch.calls import Ask
from serve_common.dispatch.incoming import ACCEPTED as SWITCHED
from serve_common.dispatch.request_body import RequestBody, UploadRoom
from serve_common.dispatch.retry import can_repeat
from serve_common.dispatch.tallies import CLIENT_GONE, EndpointTally
from serve_common.errors import ServeError
from serve_common.names import BackendTag
from serve_common.tasks import TaskOwner
from serve_common.tracing.http_spans import note_route
from serve_common.values import EndpointOptions, HttpOptions
from serve_common.wires.frames import CallHead, Kind
from serve_proxy.adapters.http_answers import SERVER_NAME, problem_response, respond
from serve_proxy.adapters.http_body import feed_body, is_mostly_unread, receive_body
from serve_proxy.adapters.http_chain import EXCHANGE, Exchange
from serve_proxy.adapters.http_sockets import HttpSockets
from serve_proxy.adapters.http_targets import authority_of, check_head, is_socket_wanted, peer_of, target_of
from serve_proxy.adapters.middlewares import Handler, Middleware, compose
from serve_proxy.adapters.own_paths import OWN_PREFIX, answer_own_path
from serve_proxy.core.callers import forward
from serve_proxy.core.deadlines import earliest_deadline
from serve_proxy.core.headers import REQUEST_ID, RequestHeaders, read_request_headers, use_host, value_of
from serve_proxy.core.problems import Problem, problem_of
from serve_proxy.shell.ingress import Ingress
from serve_proxy.shell.request_traces import RequestTraces, end_request

_log = structlog.get_logger(__name__)

_WEBSOCKET: Final = Kind.WEBSOCKET
_DEFAULT_SHARD_KEY: Final = EndpointOptions().shard_key_header


class _InForce(NamedTuple):
    """What holds for a request from its arrival to its end, whatever changes meanwhile."""

    options: HttpOptions
    chain: Handler | None
    """All middlewares around the way to the endpoint; None when there are none."""


@final
class _Visit:
    """One request on its way to the endpoint and back, and what is to be counted of it."""

    __slots__ = (
        "deadline",
        "ended",
        "exchange",
        "options",
        "path",
        "problem",
        "query",
        "request_id",
        "status",
        "tally",
    )

    def __init__(
        self, path: str, query: str, options: HttpOptions, exchange: Exchange | None, tally: EndpointTally
    ) -> None:
        self.path = path
        self.query = query
        self.options = options
        self.exchange = exchange
        self.request_id = ""
        self.deadline = 0.0
        self.tally = tally
        self.status = CLIENT_GONE
        self.ended = 0.0
        """When it counts as ended, if that is before its end; by time.perf_counter."""
        self.problem: Problem | None = None
        """What it is answered with, when this process has failed it."""


@final
class HttpRequests:
    """Turns each HTTP request into a call, and the call's answer into the HTTP answer."""

    def __init__(
        self,
        ingress: Ingress,
        options: HttpOptions,
        *,
        new_request_id: Callable[[], str],
        traces: RequestTraces | None = None,
    ) -> None:
        """``traces`` is None where nothing is traced."""
        self._ingress = ingress
        self.new_request_id: Final = new_request_id
        self.traces: Final = traces
        self._loop = asyncio.get_running_loop()
        self._in_force = _InForce(options, None)
        self._clock = SystemClock()
        self._room = UploadRoom()
        self._tasks = TaskOwner("uploads")
        self.sockets: Final = HttpSockets(ingress)

    async def close(self, timeout_s: float) -> None:
        """End what is left of uploads and sockets."""
        await self.sockets.close(timeout_s)
        await self._tasks.close(timeout_s)

    @property
    def options(self) -> HttpOptions:
        """In force for requests that arrive now."""
        return self._in_force.options

    @property
    def has_middlewares(self) -> bool:
        """True when requests that arrive now meet any."""
        return self._in_force.chain is not None

    def ask_of(
        self,
        endpoint: Endpoint,
        headers: RequestHeaders,
        *,
        method: str,
        path: str,
        query: str,
        body: bytes | RequestBody,
        request_id: str,
        deadline: float | None,
        peer: str,
        scheme: str = "http",
        kind: Kind = Kind.HTTP,
    ) -> Ask:
        """What a request asks of ``endpoint``; without a ``deadline`` it is what the options in force allow.

        ``headers`` are used up: call it once. ``scheme`` is http or https. Raises `BadRequest` naming a header that
        cannot be understood, `DeadlineExceeded` when the client's own deadline has passed.
        """
        options = endpoint.options
        now = self._loop.time()
        if deadline is None:
            deadline = now + self._in_force.options.request_timeout_s
        if headers.has_slo or options.relative_slo_ms is not None:
            deadline = earliest_deadline(
                headers, deadline, options.relative_slo_ms, now=now, wall_now=self._clock.now()
            )
        if options.shard_key_header == _DEFAULT_SHARD_KEY:
            shard_key = headers.shard_key
        else:
            shard_key = value_of(headers, options.shard_key_header)
        backend = value_of(headers, options.backend_header) if options.backend_header else b""
        client, scheme = forward(headers, peer, scheme)
        if kind is _WEBSOCKET:
            scheme = "wss" if scheme == "https" else "ws"
        model_id = headers.model_id
        upload = None
        if isinstance(body, RequestBody):
            upload, body = body, b""
        ask = Ask(
            endpoint=endpoint,
            kind=kind,
            method=method,
            path=path,
            route=endpoint.route,
            query=query,
            headers=headers.forwarded,
            body=body,
            upload=upload,
            request_id=request_id,
            traceparent=headers.traceparent,
            client=client,
            scheme=scheme,
            call=CallHead(model_id=model_id.decode("utf-8", "replace")) if model_id else None,
            shard_key=shard_key.decode("latin-1") if shard_key else "",
            backend_tag=_backend_of(endpoint, backend) if backend else None,
            is_repeatable=can_repeat(method, has_idempotency_key=headers.has_idempotency_key),
            deadline=deadline,
        )
        trace = headers.trace
        if trace is None:
            return ask
        note_route(trace, method, endpoint.route, endpoint.tag)
        return msgspec.structs.replace(ask, trace=trace)

    def use(self, options: HttpOptions, middlewares: tuple[Middleware, ...]) -> None:
        """Treat requests that arrive from now on so; the first middleware is the outermost."""

        async def innermost(request: web.BaseRequest) -> web.StreamResponse:
            # A middleware may hand on another request than it was given.
            path, _, query = target_of(request).partition("?")
            return await self._answer(request, path, query, options, request.get(EXCHANGE))

        self._in_force = _InForce(options, compose(middlewares, innermost) if middlewares else None)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        try:
            check_head(request)
        except ServeError as error:
            return self._refuse(request, problem_of(error))
        path, _, query = target_of(request).partition("?")
        if path.startswith(OWN_PREFIX):
            request_id = read_request_headers(request.raw_headers).request_id or self.new_request_id()
            response: web.StreamResponse = answer_own_path(self._ingress, request.method, path, request_id)
            response.headers[REQUEST_ID] = request_id
        else:
            if not self._ingress.is_open:
                await self._ingress.wait_open()
            options, chain = self._in_force
            if chain is None:
                response = await self._answer(request, path, query, options, None)
            else:
                response = await self._answer_through(chain, request, options)
        if not response.prepared:
            response.headers["Server"] = SERVER_NAME
            if self._ingress.is_draining or (request.body_exists and is_mostly_unread(request)):
                response.force_close()
        return response

    def _refuse(self, request: web.BaseRequest, problem: Problem) -> web.Response:
        """Answer a request whose bytes cannot be trusted, and the connection with it."""
        self._ingress.routes.unmatched.add(request.method, problem.status, 0.0)
        response = problem_response(problem, self.new_request_id())
        response.headers["Server"] = SERVER_NAME
        response.force_close()
        return response

    # -- with middlewares --

    async def _answer_through(
        self, chain: Handler, request: web.BaseRequest, options: HttpOptions
    ) -> web.StreamResponse:
        began = time.perf_counter()
        read = read_request_headers(request.raw_headers)
        request_id = read.request_id or self.new_request_id()
        deadline = self._loop.time() + options.request_timeout_s
        exchange = Exchange(request_id, deadline, self._ingress.routes.unmatched)
        if self.traces is not None:
            path = target_of(request).partition("?")[0]
            self.traces.begin(read, request.method, path, _scheme_of(request), request_id)
            exchange.trace, exchange.traceparent = read.trace, read.traceparent
        status = CLIENT_GONE
        try:
            response = await exchange.run(chain, request, options)
            if not response.prepared:
                response.headers[REQUEST_ID] = request_id
            status = response.status
            return response
        finally:
            exchange.tally.add(request.method, status, time.perf_counter() - began)
            if exchange.trace is not None:
                end_request(exchange.trace, status, exchange.problem)

    # -- the endpoint's answer --

    async def _answer(
        self,
        request: web.BaseRequest,
        path: str,
        query: str,
        options: HttpOptions,
        exchange: Exchange | None,
    ) -> web.StreamResponse:
        """The answer of the endpoint for ``path``; with an ``exchange``, whoever made that counts the request."""
        began = time.perf_counter()  # the loop's own time stands still within an iteration
        headers = read_request_headers(request.raw_headers)
        authority = authority_of(request)
        if authority:
            use_host(headers, authority)
        visit = _Visit(path, query, options, exchange, self._ingress.routes.unmatched)
        if exchange is None:
            visit.request_id = headers.request_id or self.new_request_id()
            visit.deadline = self._loop.time() + options.request_timeout_s
            if self.traces is not None:
                self.traces.begin(headers, request.method, path, _scheme_of(request), visit.request_id)
        else:
            visit.request_id, visit.deadline = exchange.request_id, exchange.deadline
            headers.trace = exchange.trace
            headers.traceparent = exchange.traceparent or headers.traceparent
        try:
            return await self._answer_endpoint(request, headers, visit)
        except ServeError as error:
            problem = visit.problem = problem_of(error)
            visit.status = problem.status
            return problem_response(problem, visit.request_id)
        except (asyncio.CancelledError, ConnectionError):
            if visit.status != SWITCHED:
                visit.status = CLIENT_GONE
            raise
        except Exception as error:  # noqa: BLE001 - the client is owed an answer; it is logged
            _log.exception("request_failed", request_id=visit.request_id, path=path[:200])
            visit.status = 500
            problem = visit.problem = Problem(
                status=500, code="internal", message=f"the proxy failed: {type(error).__name__}"
            )
            return problem_response(problem, visit.request_id)
        finally:
            if exchange is None:
                ended = visit.ended or time.perf_counter()
                visit.tally.add(request.method, visit.status, ended - began)
                if headers.trace is not None:
                    end_request(headers.trace, visit.status, visit.problem)
            else:
                exchange.tally = visit.tally
                exchange.problem = visit.problem

    async def _answer_endpoint(
        self, request: web.BaseRequest, headers: RequestHeaders, visit: _Visit
    ) -> web.StreamResponse:
        method, options = request.method, visit.options
        endpoint = self._ingress.admit(method, visit.path)
        visit.tally = endpoint.tally
        is_socket = is_socket_wanted(request, headers.upgrade)
        body: bytes | RequestBody = b""
        if is_socket:
            self.sockets.check(request)
        elif request.body_exists:
            body = await receive_body(
                request,
                options,
                visit.deadline,
                self._room,
                is_welcomed=visit.exchange is not None,
                is_copied=bool(endpoint.shadows),
            )
        ask = self.ask_of(
            endpoint,
            headers,
            method=method,
            path=visit.path,
            query=visit.query,
            body=body,
            request_id=visit.request_id,
            deadline=visit.deadline,
            peer=peer_of(request),
            scheme=_scheme_of(request),
            kind=Kind.WEBSOCKET if is_socket else Kind.HTTP,
        )
        if ask.upload is None:
            return await self._pass_on(request, ask, visit)
        feeding = self._tasks.start(feed_body(request, ask.upload, options), name="upload")
        try:
            return await self._pass_on(request, ask, visit)
        finally:
            feeding.cancel()

    async def _pass_on(self, request: web.BaseRequest, ask: Ask, visit: _Visit) -> web.StreamResponse:
        """Ask, and write the answer."""
        call, answer = await self._ingress.ask(ask)
        visit.status = answer.status
        if visit.exchange is not None:
            visit.exchange.begun()
        rate_min = visit.options.body_rate_min
        if answer.socket is None:
            return await respond(self._ingress, request, call, answer, ask.request_id, rate_min=rate_min)
        visit.ended = time.perf_counter()  # how long a socket lasts is no request's duration
        try:
            return await self.sockets.serve(request, answer, answer.socket, ask.request_id, rate_min)
        finally:
            self._ingress.abandon(call)


def _scheme_of(request: web.BaseRequest) -> str:
    return "https" if request.secure else "http"


def _backend_of(endpoint: Endpoint, value: bytes) -> BackendTag | None:
    """The endpoint's backend of that name; None when it has none."""
    tag = BackendTag(value.decode("latin-1"))
    return tag if tag in endpoint.split.backend_tags else None
