"""Regular path of one HTTP request: read its head, build the request to its endpoint, dispatch it, write the response.

Why some properties of a head are read from what aiohttp stores: its public forms of them cost more than everything else
this proxy does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, cast, final
from urllib.parse import quote

import msgspec
import structlog
from aiohttp import HttpVersion11, hdrs, web

from serve_common.clock import SystemClock
from serve_common.config.backend import EndpointOptions, ErrorFormat, HttpOptions
from serve_common.dispatch.admission import CLIENT_GONE, Endpoint, RequestStats, can_repeat
from serve_common.dispatch.calls import RequestSpec
from serve_common.dispatch.request_body import RequestBody
from serve_common.dispatch.upstream import ACCEPTED as SWITCHED
from serve_common.errors import ServeError
from serve_common.protocol.frames import CallHead, RequestKind
from serve_common.runtime.tasks import TaskOwner
from serve_proxy.core.headers import (
    RequestHeaders,
    as_bytes,
    earliest_deadline,
    forward,
    get_header_value,
    is_host,
    is_only_chunked,
    read_checked_headers,
    read_request_headers,
    use_host,
)
from serve_proxy.core.problems import BadRequest, BodiesFull, Problem, UnknownCoding, build_problem
from serve_proxy.http.bodies import body_need, check_announced, feed_body, receive_body
from serve_proxy.http.middlewares import MiddlewareRequestState
from serve_proxy.http.raw_bodies import CountingConnection
from serve_proxy.http.responses import problem_response, respond, whole_bytes
from serve_proxy.http.websockets import HttpSockets
from serve_proxy.shell.ingress import Ingress
from serve_proxy.shell.request_observers import AccessLog, RequestTraces

_WEBSOCKET: Final = RequestKind.WEBSOCKET
_DEFAULT_SHARD_KEY: Final = EndpointOptions().shard_key_header
_CLOCK: Final = SystemClock()


def check_head(request: web.BaseRequest) -> None:
    """Reject invalid heads that the parser accepts; close the connection where its bytes are ambiguous.

    Raises `BadRequest` and `UnknownCoding`; the rest of the connection can then not be trusted.
    """
    message = request._message  # noqa: SLF001 - not public
    if message.version.major != 1:  # the parser lets 0.9 and 2.0 pass, when nothing follows
        request._version = HttpVersion11  # noqa: SLF001 - the response would use the other one
        raise BadRequest("version", "only HTTP/1.0 and HTTP/1.1 are spoken here")
    if message.chunked:
        if not is_only_chunked(message.raw_headers):
            raise UnknownCoding("transfer-encoding", "only chunked is understood here")
        is_last = message.version < HttpVersion11  # intermediaries may not support chunks (RFC 9112, 6.1)
    elif hdrs.TRANSFER_ENCODING in message.headers:
        raise UnknownCoding("transfer-encoding", "only chunked is understood here")
    else:
        is_last = False
    if not (is_host(as_bytes(message.headers.get(hdrs.HOST, ""))) and is_host(get_authority(request))):
        raise BadRequest("host", "is no name or address")
    if message.upgrade:
        upgrade = ",".join(message.headers.getall(hdrs.UPGRADE, ()))
        if not is_socket_wanted(request, as_bytes(upgrade)):
            is_last = True  # the parser drops the bytes after it
    if is_last:
        request._message = message._replace(should_close=True)  # noqa: SLF001 - `keep_alive` reads it there


def is_socket_wanted(request: web.BaseRequest, upgrade: bytes) -> bool:
    """True for an upgrade to a WebSocket; ``upgrade`` is the header. The parser has then stopped at this request."""
    return upgrade.strip().lower() == b"websocket" and request._message.upgrade  # noqa: SLF001 - not public


def get_peer(request: web.BaseRequest) -> str:
    """Address of the client as ``host:port``."""
    name = request.protocol.peername
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else ""


def get_authority(request: web.BaseRequest) -> bytes:
    """The authority of an absolute-form target, as clients of forward proxies send it; otherwise empty."""
    if request.raw_path.startswith("/"):
        return b""
    return as_bytes(request._message.url.raw_authority)  # noqa: SLF001 - the request's own form has lost it


def get_target(request: web.BaseRequest) -> str:
    """Path and query as the client sent them, in ASCII."""
    target = request.raw_path
    if not target.startswith("/"):
        target = request.rel_url.raw_path_qs  # the absolute form, which clients send to proxies
    if not target.isascii():
        target = quote(target.encode("utf-8", "surrogateescape"), safe="/?#[]@!$&'()*+,;=:%~")
    return target


def build_request_spec(
    endpoint: Endpoint,
    headers: RequestHeaders,
    *,
    method: str,
    path: str,
    query: str,
    body: bytes | RequestBody,
    request_id: str,
    now: float,
    deadline: float,
    peer: str,
    scheme: str,
    root_path: str,
    kind: RequestKind = RequestKind.HTTP,
) -> RequestSpec:
    """Build the request to ``endpoint``.

    ``now`` and ``deadline``, the latest that the options allow, are loop time. ``headers`` are modified, for the
    requests of one connection. ``peer`` is needed for headers without `sender` only. ``scheme`` is http or https,
    ``root_path`` that of the HTTP options. Raises `BadField` naming an invalid header, `DeadlineExceeded` when the
    client's own deadline has passed.

    Both the fast path and the regular path use it, so that headers and deadlines mean the same on either.
    """
    options = endpoint.options
    if headers.has_slo or options.relative_slo_ms is not None:
        if headers.timeout_s is not None and options.error_format is ErrorFormat.TEXT:
            deadline = now + _TIMEOUT_S_MAX  # the header replaces the option, as in Ray Serve
        deadline = earliest_deadline(
            headers, deadline, options.relative_slo_ms, now=now, wall_now=_CLOCK.now()
        )
    if options.shard_key_header == _DEFAULT_SHARD_KEY:
        shard_key = headers.shard_key
    else:
        shard_key = get_header_value(headers, options.shard_key_header)
    backend = get_header_value(headers, options.backend_header) if options.backend_header else b""
    if headers.sender is None:
        headers.sender = forward(headers, peer, scheme)
    client, scheme = headers.sender
    if kind is _WEBSOCKET:
        scheme = "wss" if scheme == "https" else "ws"
    model_id = headers.model_id
    upload = None
    if isinstance(body, RequestBody):
        upload, body = body, b""
    route = endpoint.route
    if root_path:
        path, route = root_path + path, root_path if route == "/" else root_path + route
    spec = RequestSpec(
        endpoint=endpoint,
        kind=kind,
        method=method,
        path=path,
        route=route,
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
        backend_tag=endpoint.select_backend(backend) if backend else None,
        # What a socket's handler has begun is no GET, whatever its handshake is.
        is_repeatable=kind is not _WEBSOCKET
        and can_repeat(method, has_idempotency_key=headers.has_idempotency_key),
        outlives_client=headers.outlives_client,
        deadline=deadline,
    )
    observer = headers.observer
    if observer is None:
        return spec
    observer.on_request(spec)
    return msgspec.structs.replace(spec, trace=observer)


_log = structlog.get_logger(__name__)
_TIMEOUT_S_MAX: Final = 86_400.0
"""Upper limit of a time-out that a request asks for, that of `HttpOptions.request_timeout_s`."""


@final
class _RequestState:
    """State of one request, and what is counted of it."""

    __slots__ = (
        "deadline",
        "ended",
        "error_format",
        "exchange",
        "options",
        "path",
        "problem",
        "query",
        "request_id",
        "stats",
        "status",
    )

    def __init__(
        self,
        path: str,
        query: str,
        options: HttpOptions,
        exchange: MiddlewareRequestState | None,
        stats: RequestStats,
    ) -> None:
        self.path = path
        self.query = query
        self.options = options
        self.exchange = exchange
        self.request_id = ""
        self.deadline = 0.0
        self.stats = stats
        self.status = CLIENT_GONE
        self.ended = 0.0
        """When it counts as ended, if before its actual end, by time.perf_counter; 0 otherwise."""
        self.error_format = ErrorFormat.PROBLEM
        """That of the endpoint, once it is known."""
        self.problem: Problem | None = None
        """The error response, when this process failed the request."""


@final
class EndpointHandler:
    """Dispatches requests to endpoints, and writes their responses."""

    def __init__(
        self, ingress: Ingress, new_request_id: Callable[[], str], forwarded_hops: int, scheme: str
    ) -> None:
        self._scheme = scheme
        self.sockets: Final = HttpSockets(ingress)
        self._ingress = ingress
        self._new_request_id = new_request_id
        self._forwarded_hops = forwarded_hops
        self._now = asyncio.get_running_loop().time
        self._memory = ingress.memory
        self._tasks = TaskOwner("uploads")

    async def close(self, timeout_s: float) -> None:
        """Cancel the remaining uploads and sockets."""
        await self.sockets.close(timeout_s)
        await self._tasks.close(timeout_s)

    async def handle(
        self,
        request: web.BaseRequest,
        path: str,
        query: str,
        options: HttpOptions,
        *,
        observer: RequestTraces | AccessLog | None,
        exchange: MiddlewareRequestState | None,
    ) -> web.StreamResponse:
        """The response of the endpoint for ``path``.

        With an ``exchange``, its creator counts and observes the request; otherwise it is counted here, and observed by
        ``observer``.
        """
        started_at = time.perf_counter()  # the loop's own time stands still within an iteration
        headers = self._read_headers(request, is_checked=exchange is not None)
        state = _RequestState(path, query, options, exchange, self._ingress.routes.unmatched)
        if exchange is None:
            state.request_id = headers.request_id or self._new_request_id()
            state.deadline = self._now() + options.request_timeout_s
            if observer is not None:
                peer = get_peer(request)
                observer.start(
                    headers,
                    request.method,
                    path,
                    self._scheme,
                    state.request_id,
                    peer=peer,
                    body=request.content,
                )
        else:
            state.request_id, state.deadline = exchange.request_id, exchange.deadline
            headers.observer = exchange.observer
            headers.traceparent = exchange.traceparent or headers.traceparent
        response: web.StreamResponse | None = None
        try:
            response = await self._handle_endpoint(request, headers, state)
        except ServeError as error:
            limit_s = state.deadline - started_at
            problem = state.problem = build_problem(error, state.error_format, state.request_id, limit_s)
            state.status = problem.status
            response = problem_response(problem, state.request_id)
        except (asyncio.CancelledError, ConnectionError):
            if state.status != SWITCHED:
                state.status = CLIENT_GONE
            raise
        except Exception as error:  # noqa: BLE001 - the client must get a response; it is logged
            _log.exception("request_failed", request_id=state.request_id, path=path[:200])
            state.status = 500
            problem = state.problem = Problem(
                status=500, code="internal", message=f"the proxy failed: {type(error).__name__}"
            )
            response = problem_response(problem, state.request_id)
        finally:
            if exchange is None:
                ended = state.ended or time.perf_counter()
                state.stats.add(request.method, state.status, ended - started_at)
                if headers.observer is not None:
                    headers.observer.ended(state.status, state.problem, whole_bytes(request, response))
            else:
                exchange.stats = state.stats
                exchange.problem = state.problem
        return response

    def _read_headers(self, request: web.BaseRequest, *, is_checked: bool) -> RequestHeaders:
        if is_checked:
            headers = read_checked_headers(request.raw_headers)
        else:
            headers = read_request_headers(request.raw_headers, self._forwarded_hops)
        authority = get_authority(request)
        if authority:
            use_host(headers, authority)
        return headers

    async def _handle_endpoint(
        self, request: web.BaseRequest, headers: RequestHeaders, state: _RequestState
    ) -> web.StreamResponse:
        method, options = request.method, state.options
        endpoint = self._ingress.admit(method, state.path)
        state.stats = endpoint.stats
        state.error_format = endpoint.options.error_format
        if not request.body_exists:
            return await self._handle_admitted(request, headers, state, endpoint)
        check_announced(request, options.body_bytes_max)
        need_bytes = body_need(request.content, request.content_length, is_copied=bool(endpoint.shadows))
        if not self._memory.admit(need_bytes):
            raise BodiesFull
        try:
            return await self._handle_admitted(request, headers, state, endpoint)
        finally:
            self._memory.leave(need_bytes)

    async def _handle_admitted(
        self, request: web.BaseRequest, headers: RequestHeaders, state: _RequestState, endpoint: Endpoint
    ) -> web.StreamResponse:
        """Respond to a request whose body, if it has one, was admitted."""
        method, options = request.method, state.options
        is_socket = is_socket_wanted(request, headers.upgrade)
        body: bytes | RequestBody = b""
        if is_socket:
            self.sockets.check(request)
        elif request.body_exists:
            body = await receive_body(
                request,
                options,
                state.deadline,
                self._memory,
                is_welcomed=state.exchange is not None,
                is_copied=bool(endpoint.shadows),
            )
        spec = build_request_spec(
            endpoint,
            headers,
            method=method,
            path=state.path,
            query=state.query,
            body=body,
            request_id=state.request_id,
            now=self._now(),
            deadline=state.deadline,
            peer=get_peer(request),
            scheme=self._scheme,
            root_path=options.root_path,
            kind=RequestKind.WEBSOCKET if is_socket else RequestKind.HTTP,
        )
        if spec.upload is None:
            return await self._forward(request, spec, state)
        connection = cast("CountingConnection", request.protocol)
        connection.pause_body()
        feeding = feed_body(request, connection, spec.upload, options, self._memory)
        feeder = self._tasks.start(feeding, name="upload")
        try:
            return await self._forward(request, spec, state)
        finally:
            feeder.cancel()
            connection.end_raw_body()

    async def _forward(
        self, request: web.BaseRequest, spec: RequestSpec, state: _RequestState
    ) -> web.StreamResponse:
        """Dispatch the request, and write the response."""
        call, upstream = await self._ingress.send(spec)
        state.status = upstream.status
        if state.exchange is not None:
            state.exchange.started()
        rate_min = state.options.body_rate_min
        if upstream.socket is None:
            return await respond(
                self._ingress,
                request,
                call,
                upstream,
                spec.request_id,
                rate_min=rate_min,
                has_middlewares=state.exchange is not None,
            )
        state.ended = time.perf_counter()  # the lifetime of a socket is not a request's duration
        try:
            return await self.sockets.serve(request, spec, upstream, upstream.socket, rate_min)
        finally:
            self._ingress.abandon(call)
