"""The fast path of a simple request: parsed, dispatched and answered in the callbacks of the two connections.

Why: aiohttp makes two task switches, a request, a response and a writer for every request, which together cost more
than the rest of this proxy. A request that is complete, has no special features and no middleware needs none of them.
Every other request takes the regular path, `HttpRequests`, on the same connection and in the same order.
"""

from __future__ import annotations

import time
from copy import copy
from typing import Final, Protocol, final

import structlog
from aiohttp import HttpVersion11, hdrs
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader

from serve_common.config.backend import ErrorFormat
from serve_common.dispatch.admission import CLIENT_GONE, Endpoint, RequestStats
from serve_common.dispatch.calls import Call, Response
from serve_common.dispatch.errors import ResponseUnusable
from serve_common.errors import ServeError
from serve_proxy.core.headers import (
    RequestHeaders,
    is_host,
    is_only_chunked,
    read_request_headers,
)
from serve_proxy.core.problems import BodiesFull, Problem, build_problem
from serve_proxy.http.bodies import COPIED_BYTES_MAX, body_need
from serve_proxy.http.endpoint import build_request_spec
from serve_proxy.http.known_heads import KnownBody, KnownHead
from serve_proxy.http.requests import OWN_PREFIX, HttpRequests
from serve_proxy.http.response_heads import response_end, response_start, status_line
from serve_proxy.http.responses import WATCHED_BYTES_MIN, problem_lines
from serve_proxy.shell.ingress import Ingress

_log = structlog.get_logger(__name__)

COUNTED_BYTES_MIN: Final = 16 * 1024
"""Bodies from this size on are counted against the memory limit; smaller ones are limited by the number of requests."""


class Connection(Protocol):
    """What a request on the fast path needs from its client's connection."""

    @property
    def peer(self) -> str:
        """Address of the client as ``host:port``."""
        ...

    def finish_fast_path(self, data: bytes, *, closes: bool) -> None:
        """Write the complete response, and go on with the requests behind it."""
        ...

    def refuse_fast_path(self, data: bytes) -> None:
        """Write the complete response to a request whose body is still arriving, and read no further request."""
        ...

    def stream_fast_path(
        self,
        exchange: FastPathRequest,
        call: Call,
        upstream: Response,
        start: bytes,
        content_length: int | None,
    ) -> None:
        """Write a streamed or large response; ``start`` is that of `response_start`. The exchange is notified when it
        has ended."""
        ...


@final
class FastPathRequest:
    """One request on the fast path, from its last byte to its response."""

    __slots__ = (
        "_connection",
        "_ingress",
        "_is_done",
        "_is_refused",
        "_need_bytes",
        "_started_at",
        "_stats",
        "_target",
        "call",
        "headers",
        "message",
        "payload",
        "request_id",
    )

    def __init__(
        self,
        connection: Connection,
        ingress: Ingress,
        message: RawRequestMessage,
        payload: StreamReader | KnownBody,
        *,
        target: str,
        headers: RequestHeaders,
    ) -> None:
        """``headers`` are those of ``message``; ``target`` may be another than its own, if its head is a known one."""
        self.message: Final = message
        self.payload: Final = payload
        self.headers: Final = headers
        self.request_id = ""
        self.call: Call | None = None
        """The call in flight; None before and after."""
        self._is_done = False
        self._is_refused = False
        """True when the request was refused while its body is still arriving."""
        self._need_bytes = 0
        """Bytes reserved for the body."""
        self._connection = connection
        self._target = target
        self._ingress = ingress
        self._started_at = time.perf_counter()  # the loop's own time stands still within an iteration
        self._stats = ingress.routes.unmatched

    def start(self, requests: HttpRequests) -> None:
        """Dispatch the request; the response may be written before this returns."""
        path, _, query = self._target.partition("?")
        body = self.payload.read_nowait()
        message = self.message
        read = self.headers
        self._attach_observer(requests, path)
        endpoint: Endpoint | None = None
        try:
            endpoint = self._ingress.admit(message.method, path)
            self._stats = endpoint.stats
            if len(body) >= COUNTED_BYTES_MIN:
                if not self._ingress.memory.admit(len(body)):
                    raise BodiesFull  # noqa: TRY301 - handled like what `admit` and `build_request_spec` raise
                self._need_bytes = len(body)
            now = requests.now()
            spec = build_request_spec(
                endpoint,
                read,
                method=message.method,
                path=path,
                query=query,
                body=body,
                request_id=self.request_id,
                now=now,
                deadline=now + requests.options.request_timeout_s,
                peer=self._connection.peer if read.sender is None else "",
                scheme=requests.scheme,
                root_path=requests.options.root_path,
            )
        except ServeError as error:
            self.fail(error, endpoint)
            return
        except Exception as error:  # noqa: BLE001 - the client must get a response; it is logged
            _log.exception("request_failed", request_id=self.request_id, path=path[:200])
            reason = f"the proxy failed: {type(error).__name__}"
            self._finish_problem(Problem(status=500, code="internal", message=reason))
            return
        call = self._ingress.start(spec, self._on_response, self._on_error)
        if not self._is_done:
            self.call = call

    def refuse(self, requests: HttpRequests, stats: RequestStats, error: ServeError) -> None:
        """Respond with ``error`` before the body has arrived; it is counted in ``stats``."""
        self._attach_observer(requests, self._target.partition("?")[0])
        self._stats = stats
        self._is_refused = True
        self.fail(error)

    def _attach_observer(self, requests: HttpRequests, path: str) -> None:
        read, message = self.headers, self.message
        self.request_id = read.request_id or requests.new_request_id()
        if requests.observer is not None:
            peer = self._connection.peer
            requests.observer.start(
                read, message.method, path, requests.scheme, self.request_id, peer=peer, body=self.payload
            )

    def client_gone(self) -> None:
        """The client disconnected: cancel the call."""
        if self.call is not None:
            self._ingress.abandon(self.call)
        self.count(CLIENT_GONE)

    def count(self, status: int, sent: bytes | memoryview = b"") -> None:
        """Count the request as ended with ``status``; ``sent`` is the body of a complete response."""
        # The call references this exchange by its callbacks: the cycle would need the garbage collector.
        self.call = None
        self._is_done = True
        if self._need_bytes:
            self._ingress.memory.leave(self._need_bytes)
            self._need_bytes = 0
        self._stats.add(self.message.method, status, time.perf_counter() - self._started_at)
        if self.headers.observer is not None:
            self.headers.observer.ended(status, None, len(sent))

    def _on_response(self, call: Call, upstream: Response) -> None:
        status = upstream.status
        try:
            start, is_bodiless, content_length = response_start(status, upstream.headers)
        except ValueError as error:
            self._ingress.abandon(call)
            reason = ResponseUnusable(f"the replica's answer cannot be sent: {error}")
            self.fail(reason, call.spec.endpoint)
            return
        body = upstream.body
        if is_bodiless:
            if upstream.stream is not None:
                self._ingress.abandon(call)
            self._finish(status, start, b"", b"")
        elif upstream.stream is not None:
            self._connection.stream_fast_path(self, call, upstream, start, content_length)
        elif len(body) > WATCHED_BYTES_MIN:
            self._connection.stream_fast_path(self, call, upstream, start, len(body))
        else:
            self._finish(status, start, b"%d" % len(body), body)

    def _on_error(self, call: Call, error: ServeError) -> None:
        self.fail(error, call.spec.endpoint, call.spec.deadline)

    def fail(self, error: ServeError, endpoint: Endpoint | None = None, deadline: float = 0.0) -> None:
        """Respond with ``error``, in the format of ``endpoint``; ``deadline`` was that of the call."""
        error_format = ErrorFormat.PROBLEM if endpoint is None else endpoint.options.error_format
        limit_s = deadline - self._started_at
        self._finish_problem(build_problem(error, error_format, self.request_id, limit_s))

    def _finish_problem(self, problem: Problem) -> None:
        lines, body = problem_lines(problem, self.request_id)
        head = status_line(problem.status) + lines + b"content-length: "
        if self.headers.observer is not None:
            self.headers.observer.ended(problem.status, problem, len(body))
        self._finish(problem.status, head, b"%d" % len(body), body)

    def _finish(self, status: int, head: bytes, length: bytes, body: bytes | memoryview) -> None:
        """``head`` ends where the length belongs, or, for a response without one, with its last header."""
        closes = self._is_refused or self._ingress.is_draining
        data = b"".join((head, length, response_end(self.request_id, closes=closes), body))
        if self._is_refused:
            self._connection.refuse_fast_path(data)
        else:
            self._connection.finish_fast_path(data, closes=closes)
        self.count(status, body)  # the client need not wait for it


def refuse_full(
    connection: Connection,
    requests: HttpRequests,
    ingress: Ingress,
    message: RawRequestMessage,
    payload: StreamReader,
) -> bool:
    """Refuse a request at once whose body is still arriving and does not fit into memory; False for all others.

    Those take the regular path, which admits them. It refuses too, but only once its tasks have run, and until then
    buffers the bytes received: with hundreds of uploads at once there is neither the time nor the memory for that.
    """
    memory = ingress.memory
    if memory.admits(COPIED_BYTES_MAX):  # more than any body needs
        return False
    announced = None if message.chunked else int(message.headers.get(hdrs.CONTENT_LENGTH, 0))
    if announced is not None and announced > requests.options.body_bytes_max:
        return False
    try:
        endpoint = ingress.admit(message.method, message.path.partition("?")[0])
    except ServeError:
        return False
    need_bytes = body_need(payload, announced, is_copied=bool(endpoint.shadows))
    if memory.admits(need_bytes):
        return False
    exchange = try_fast_path(connection, requests, ingress, message, payload)
    if exchange is None:
        return False
    memory.admit(need_bytes)  # which counts the refusal
    exchange.refuse(requests, endpoint.stats, BodiesFull())
    return True


def try_fast_path(
    connection: Connection,
    requests: HttpRequests,
    ingress: Ingress,
    message: RawRequestMessage,
    payload: StreamReader,
) -> FastPathRequest | None:
    """The exchange, for `start` or `refuse`, when ``message`` may take the fast path; otherwise None."""
    if (
        requests.has_middlewares
        or payload.total_bytes > requests.options.body_bytes_max
        or (message.should_close and payload.is_eof())
        or message.upgrade
        or message.version != HttpVersion11
        or message.method == hdrs.METH_HEAD
        or not ingress.is_open
        or ingress.is_draining
        or (message.chunked and not is_only_chunked(message.raw_headers))
    ):
        return None
    target = message.path
    if not target.isascii() or not target.startswith("/") or target.startswith(OWN_PREFIX):
        return None
    headers = read_request_headers(message.raw_headers, requests.forwarded_hops)
    if not is_host(headers.host) or headers.has_coding != message.chunked:
        return None
    return FastPathRequest(connection, ingress, message, payload, target=target, headers=headers)


def try_known_head(
    connection: Connection, requests: HttpRequests, ingress: Ingress, known: KnownHead, data: bytes
) -> FastPathRequest | None:
    """The exchange when ``data`` is a whole request with a known head; None when it must be parsed."""
    found = known.read(data)
    if found is None or requests.has_middlewares or not ingress.is_open or ingress.is_draining:
        return None
    target, body = found
    if target.startswith(OWN_PREFIX) or len(body) > requests.options.body_bytes_max:
        return None
    # An observer leaves itself and a traceparent there.
    headers = known.headers if requests.observer is None else copy(known.headers)
    payload = KnownBody(body) if body else EMPTY_PAYLOAD
    return FastPathRequest(connection, ingress, known.message, payload, target=target, headers=headers)
