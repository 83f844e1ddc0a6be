"""The short way of a simple request: parsed, sent and answered in the callbacks of the two connections.

Why: aiohttp makes two tasks' switches, a request, a response and a writer for every request, which together cost more
than the rest of this proxy. A request that is whole, wants nothing special and meets no middleware needs none of them.
Everything else takes the long way, `HttpRequests`, on the same connection and in the same order.
"""

from __future__ import annotations

import time
from functools import lru_cache
from http import HTTPStatus
from typing import Final, Protocol, final

import structlog
from aiohttp import HttpVersion11, hdrs
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader

from serve_common.dispatch.admission import CLIENT_GONE, RequestStats
from serve_common.dispatch.calls import Call, Response
from serve_common.dispatch.errors import ResponseUnusable
from serve_common.errors import ServeError
from serve_proxy.core.headers import (
    REQUEST_ID,
    RequestHeaders,
    is_host,
    is_only_chunked,
    read_request_headers,
    read_response_head,
)
from serve_proxy.core.problems import BodiesFull, Problem, problem_of
from serve_proxy.http.bodies import COPIED_BYTES_MAX, body_need
from serve_proxy.http.endpoint import ask_of
from serve_proxy.http.requests import OWN_PREFIX, HttpRequests
from serve_proxy.http.responses import SERVER_NAME, WATCHED_BYTES_MIN, problem_lines
from serve_proxy.shell.ingress import Ingress

_log = structlog.get_logger(__name__)

_CACHED_HEADERS_MAX: Final = 8
"""Of one answer, for its head to be worth keeping."""
COUNTED_BYTES_MIN: Final = 16 * 1024
"""Smaller bodies cost less than the rest of their requests, whose number has limits of its own."""
_BODILESS: Final = frozenset({204, 304})
_TAIL: Final = f"\r\nserver: {SERVER_NAME}\r\n{REQUEST_ID.lower()}: ".encode()


class Connection(Protocol):
    """What a request on the short way needs of its client's connection."""

    @property
    def peer(self) -> str:
        """Address of the client as ``host:port``."""
        ...

    def finish_fast(self, answer: bytes, *, closes: bool) -> None:
        """Write the whole answer, and take up what came behind the request."""
        ...

    def refuse_fast(self, answer: bytes) -> None:
        """Write the whole answer to a request whose body still comes, and take up nothing else."""
        ...

    def stream_fast(self, exchange: FastExchange, call: Call, answer: Response) -> None:
        """Write an answer that comes in pieces; the exchange is told when it has ended."""
        ...


@final
class FastExchange:
    """One request on the short way, from its last byte to its answer."""

    __slots__ = (
        "_began",
        "_connection",
        "_headers",
        "_ingress",
        "_is_done",
        "_is_refused",
        "_need_bytes",
        "_tally",
        "call",
        "message",
        "payload",
        "request_id",
    )

    def __init__(
        self,
        connection: Connection,
        ingress: Ingress,
        message: RawRequestMessage,
        payload: StreamReader,
        headers: RequestHeaders,
    ) -> None:
        """``headers`` are the message's."""
        self.message: Final = message
        self.payload: Final = payload
        self.request_id = ""
        self.call: Call | None = None
        """While it is under way."""
        self._is_done = False
        self._is_refused = False
        """Its body still comes, and is not wanted."""
        self._need_bytes = 0
        """What was reserved for the body."""
        self._connection = connection
        self._headers = headers
        self._ingress = ingress
        self._began = time.perf_counter()  # the loop's own time stands still within an iteration
        self._tally = ingress.routes.unmatched

    def begin(self, requests: HttpRequests) -> None:
        """Ask; the answer may be written before this returns."""
        path, _, query = self.message.path.partition("?")
        body = self.payload.read_nowait()
        message = self.message
        read = self._headers
        self._follow(requests, path)
        try:
            endpoint = self._ingress.admit(message.method, path)
            self._tally = endpoint.tally
            if len(body) >= COUNTED_BYTES_MIN:
                if not self._ingress.room.admit(len(body)):
                    raise BodiesFull  # noqa: TRY301 - as what `admit` and `ask_of` raise
                self._need_bytes = len(body)
            now = requests.now()
            ask = ask_of(
                endpoint,
                read,
                method=message.method,
                path=path,
                query=query,
                body=body,
                request_id=self.request_id,
                now=now,
                deadline=now + requests.options.request_timeout_s,
                peer=self._connection.peer,
            )
        except ServeError as error:
            self.fail(error)
            return
        except Exception as error:  # noqa: BLE001 - the client is owed an answer; it is logged
            _log.exception("request_failed", request_id=self.request_id, path=path[:200])
            reason = f"the proxy failed: {type(error).__name__}"
            self._finish_problem(Problem(status=500, code="internal", message=reason))
            return
        call = self._ingress.begin(ask, self._take_answer, self._take_error)
        if not self._is_done:
            self.call = call

    def refuse(self, requests: HttpRequests, tally: RequestStats, error: ServeError) -> None:
        """Answer before the body has come; it counts in ``tally``."""
        self._follow(requests, self.message.path.partition("?")[0])
        self._tally = tally
        self._is_refused = True
        self.fail(error)

    def _follow(self, requests: HttpRequests, path: str) -> None:
        read, message = self._headers, self.message
        self.request_id = read.request_id or requests.new_request_id()
        if requests.following is not None:
            peer = self._connection.peer
            requests.following.begin(
                read, message.method, path, "http", self.request_id, peer=peer, body=self.payload
            )

    def client_gone(self) -> None:
        """Nobody waits for the answer any more."""
        if self.call is not None:
            self._ingress.abandon(self.call)
        self.count(CLIENT_GONE)

    def count(self, status: int, sent: bytes | memoryview = b"") -> None:
        """The request has ended with this status; ``sent`` is the body of a whole answer."""
        # The call holds this exchange by its callbacks: together they would be left to the garbage collector.
        self.call = None
        self._is_done = True
        if self._need_bytes:
            self._ingress.room.leave(self._need_bytes)
            self._need_bytes = 0
        self._tally.add(self.message.method, status, time.perf_counter() - self._began)
        if self._headers.follower is not None:
            self._headers.follower.ended(status, None, len(sent))

    def _take_answer(self, call: Call, answer: Response) -> None:
        if answer.stream is not None or len(answer.body) > WATCHED_BYTES_MIN:
            self._connection.stream_fast(self, call, answer)
            return
        status = answer.status
        headers = tuple(answer.headers)
        try:
            if len(headers) <= _CACHED_HEADERS_MAX:
                head, is_bodiless = _answer_head(status, headers)
            else:
                head, is_bodiless = _answer_head.__wrapped__(status, headers)
        except ValueError as error:
            self.fail(ResponseUnusable(f"the replica's answer cannot be sent: {error}"))
            return
        if is_bodiless:
            self._finish(status, head, b"", b"")
        else:
            body = answer.body
            self._finish(status, head, b"%d" % len(body), body)

    def _take_error(self, _call: Call, error: ServeError) -> None:
        self.fail(error)

    def fail(self, error: ServeError) -> None:
        """There is no answer."""
        self._finish_problem(problem_of(error))

    def _finish_problem(self, problem: Problem) -> None:
        lines, body = problem_lines(problem, self.request_id)
        head = _status_line(problem.status) + lines + b"content-length: "
        if self._headers.follower is not None:
            self._headers.follower.ended(problem.status, problem, len(body))
        self._finish(problem.status, head, b"%d" % len(body), body)

    def _finish(self, status: int, head: bytes, length: bytes, body: bytes | memoryview) -> None:
        """``head`` ends where the length belongs, or, for an answer that has none, with its last header."""
        self.count(status, body)
        closes = self._is_refused or self._ingress.is_draining
        answer = b"".join(
            (
                head,
                length,
                _date_line(rfc822_formatted_time()),
                _TAIL,
                self.request_id.encode(),
                b"\r\nconnection: close\r\n\r\n" if closes else b"\r\n\r\n",
                body,
            )
        )
        if self._is_refused:
            self._connection.refuse_fast(answer)
        else:
            self._connection.finish_fast(answer, closes=closes)


def refuse_full(
    connection: Connection,
    requests: HttpRequests,
    ingress: Ingress,
    message: RawRequestMessage,
    payload: StreamReader,
) -> bool:
    """Answer a request at once whose body still comes and finds no room; False, with nothing done, for all others.

    Those take the long way, which lets them in. It refuses too, but only when its tasks have had their turn, and until
    then holds what has come of the body: for hundreds of uploads at once there is neither the time nor the memory.
    """
    room = ingress.room
    if room.admits(COPIED_BYTES_MAX):  # more than any needs
        return False
    announced = None if message.chunked else int(message.headers.get(hdrs.CONTENT_LENGTH, 0))
    if announced is not None and announced > requests.options.body_bytes_max:
        return False
    try:
        endpoint = ingress.admit(message.method, message.path.partition("?")[0])
    except ServeError:
        return False
    need_bytes = body_need(payload, announced, is_copied=bool(endpoint.shadows))
    if room.admits(need_bytes):
        return False
    exchange = take_simple(connection, requests, ingress, message, payload)
    if exchange is None:
        return False
    room.admit(need_bytes)  # which counts that it was refused
    exchange.refuse(requests, endpoint.tally, BodiesFull())
    return True


def take_simple(
    connection: Connection,
    requests: HttpRequests,
    ingress: Ingress,
    message: RawRequestMessage,
    payload: StreamReader,
) -> FastExchange | None:
    """The exchange to `begin`, when ``message`` may go the short way and its body is whole, or to `refuse`."""
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
    return FastExchange(connection, ingress, message, payload, headers)


@lru_cache(maxsize=256)
def _status_line(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return b"HTTP/1.1 %d %b\r\n" % (status, phrase.encode())


@lru_cache(maxsize=512)
def _answer_head(status: int, headers: tuple[tuple[bytes, bytes], ...]) -> tuple[bytes, bool]:
    """Status line and headers, up to where the length belongs; and whether the answer has no body by its status.

    The same few heads come again and again. Raises ValueError for one that would break the answer apart.
    """
    forwarded, content_length = read_response_head(status, headers)
    lines = [_status_line(status)]
    lines += [b"%b: %b\r\n" % header for header in forwarded]
    if status not in _BODILESS:
        lines.append(b"content-length: ")
        return b"".join(lines), False
    if status == HTTPStatus.NOT_MODIFIED and content_length is not None:
        lines.append(b"content-length: %d\r\n" % content_length)
    return b"".join(lines)[:-2], True


@lru_cache(maxsize=2)
def _date_line(date: str) -> bytes:
    return f"\r\ndate: {date}".encode()
