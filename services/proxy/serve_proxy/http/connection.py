"""One client's connection: aiohttp's, with the fast path for simple requests built in.

Why inside aiohttp's class: one connection may carry a simple request, then an upload, then an upgrade, and their
responses must be sent in the order of the requests. The private parts of aiohttp that are used here are pinned by
`requirements.lock` and exercised by the conformance tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import uuid
from collections.abc import Sequence
from typing import Any, Final, Protocol

import structlog
from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import _ErrInfo

from serve_common.dispatch.admission import CLIENT_GONE
from serve_common.dispatch.calls import Call, Response
from serve_common.runtime.tasks import OwnedTask, TaskOwner
from serve_proxy.core.problems import HeadTooSlow, Problem
from serve_proxy.http.fast_path import FastPathRequest, refuse_full, try_fast_path, try_known_head
from serve_proxy.http.known_heads import KnownHead
from serve_proxy.http.raw_bodies import CountingConnection
from serve_proxy.http.requests import HttpRequests
from serve_proxy.http.response_heads import SERVER_NAME, stream_head
from serve_proxy.http.responses import build_parse_problem, problem_response
from serve_proxy.http.streamed_responses import StreamedBody
from serve_proxy.shell.ingress import Ingress
from serve_proxy.shell.request_observers import AccessLog

_log = structlog.get_logger(__name__)

_HEAD_END: Final = b"\r\n\r\n"
_LINGER_TIMEOUT_S: Final = 30.0
"""Maximum seconds for which bytes are discarded after the response, while the client still sends."""
_LINGERS_IDLE_S: Final = 5.0
"""Seconds without bytes after which such a connection is closed."""
_DROPPED_BYTES_MAX: Final = 64 * 1024 * 1024
"""Maximum bytes discarded; a client with more to send must read its response before."""
_DROP_INTERVAL_S: Final = 0.005
"""Seconds between two reads of a body that is discarded, so that other bodies are read meanwhile."""
_EMPTY_PARTS_MAX: Final = 16
"""Parts of one read that may contain no complete head before the rest is parsed at once."""


class ConnectionOwner(Protocol):
    """What connections need from their server; implemented by `HttpServer`."""

    in_flight: int
    """Requests without a complete response."""
    gathered: list[tuple[HttpConnection, bytes, bool]] | None
    """Complete responses that are written at the end of a read, and whether they close; None outside of one."""

    @property
    def tasks(self) -> TaskOwner:
        """Owns the tasks of requests that need one."""
        ...

    @property
    def requests(self) -> HttpRequests:
        """The regular path, and the state shared with the fast path."""
        ...

    @property
    def ingress(self) -> Ingress:
        """Admits requests and sends them to their endpoints."""
        ...

    @property
    def header_timeout_s(self) -> float:
        """Seconds within which the head of a request must arrive."""
        ...


class HttpConnection(CountingConnection):
    """One client's connection; invalid HTTP gets the same error format as everything else.

    Requests on the fast path (`fast_path`) are started here, in the order of arrival: one is started only while no
    other is in flight, and requests behind it wait. aiohttp's own task for the connection meanwhile waits for a
    message, and gets every request that must take the regular path.
    """

    __slots__ = (
        "_drop_bytes_left",
        "_fast_path",
        "_head_timer",
        "_http",
        "_known_head",
        "_linger_timer",
        "_peer",
        "_stream_task",
        "_unparsed",
    )

    def __init__(self, manager: web.Server, owner: ConnectionOwner, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._http = owner
        self._fast_path: FastPathRequest | None = None
        """The request on the fast path that is in flight."""
        self._stream_task: OwnedTask | None = None
        self._peer = ""
        self._head_timer: asyncio.TimerHandle | None = None
        """Runs while the head of a request has arrived in part."""
        self._unparsed = b""
        """Bytes received after the maximum of queued requests."""
        self._known_head: KnownHead | None = None
        """The head of the last request; None when the next one must be parsed."""
        self._drop_bytes_left: int | None = None
        """After `drop_rest`, how many more bytes may be read; otherwise None."""
        self._linger_timer: asyncio.TimerHandle | None = None

    @property
    def peer(self) -> str:
        """Address of the client as ``host:port``; empty when unknown."""
        if not self._peer:
            name = self.peername
            self._peer = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else ""
        return self._peer

    # -- the fast path --

    def data_received(self, data: bytes) -> None:
        """Start a request with a known head, or else parse."""
        if self._known_head is not None:
            if not data or self._start_known(self._known_head, data):
                return
            self._known_head = None
        self._receive(data)

    def _receive(self, data: bytes) -> None:
        """Parse, and start requests that may take the fast path."""
        if self._payload_parser is not None or self._upgraded or self._force_close or self._close:
            if self._drop_bytes_left is None:
                super().data_received(data)
            else:
                self._drop(len(data))
            return
        was_between_requests = self._last_payload.is_eof()
        messages, upgraded, tail, is_understood = self._parse(data)
        if not messages:
            if was_between_requests and data.strip(b"\r\n"):
                self._start_head_timer()
            return
        if self._head_timer is not None:
            was_between_requests = False
            self._head_timer.cancel()
            self._head_timer = None
        message, payload = messages[-1]
        self._last_payload = payload
        waiter = self._waiter
        if (
            len(messages) == 1
            and is_understood
            and not upgraded
            and self._fast_path is None
            and not self._paused
            and not self._messages
            and waiter is not None
            and not waiter.done()
            and not self._unparsed
            and (
                self._start_fast_path(message, payload, data if was_between_requests else b"")
                if payload.is_eof()
                else refuse_full(self, self._http.requests, self._http.ingress, message, payload)
            )
        ):
            return
        self._request_count += len(messages)
        self._messages.extend(messages)
        if payload.total_bytes and not payload.is_eof() and not upgraded:
            # The reader of the body resumes reading; until then it takes memory that was not admitted. The parser is
            # not paused, as `pause_reading` would: it buffers nothing now, and would stop inside the next bytes, which
            # may hold a valid request before an invalid one.
            self._reading_paused = True
            self._pause_transport_reading()
        if self._fast_path is None:
            self._wake()
        if not self._buffer_paused and len(self._messages) >= self._max_msg_queue_size:
            self._pause_reading_for_buffer()
        self._upgraded = upgraded
        if upgraded and tail:
            self._message_tail = tail

    def _parse(self, data: bytes) -> tuple[Sequence[Any], bool, bytes, bool]:
        """The requests in ``data``, whether one of them wants an upgrade, the bytes after it, and whether all of it was
        valid; an invalid request is the last one, as an error.

        The parser discards the requests that it has found when the next one is invalid, so it is fed up to the next
        possible end of a head at a time.
        """
        if self._rest_bytes:
            data = self._take_counted(data)
            if not data:
                return (), False, b"", True
        if self._unparsed:
            data, self._unparsed = self._unparsed + data, b""
        return self._parse_heads(data)

    def _parse_heads(self, data: bytes) -> tuple[Sequence[Any], bool, bytes, bool]:
        parser = self._parser
        assert parser is not None, "it lives as long as the connection"
        end = self._find_split_head_end(data)
        messages: list[Any] = []
        found: Sequence[Any]
        at, empty_parts, whole = 0, 0, len(data)
        try:
            while True:
                if not end:
                    found_at = data.find(_HEAD_END, at) if empty_parts < _EMPTY_PARTS_MAX else -1
                    end = found_at + len(_HEAD_END) if found_at >= 0 else whole
                if end >= whole:
                    found, upgraded, tail = parser.feed_data(data[at:] if at else data)
                    if found:
                        self._starts_counted_body(*found[-1])
                    return [*messages, *found] if messages else found, upgraded, tail, True
                found, upgraded, tail = parser.feed_data(data[at:end])
                at, end = end, 0
                if upgraded:
                    return [*messages, *found], True, tail + data[at:], True
                if found:
                    messages += found
                    self._last_payload = found[-1][1]
                    if self._starts_counted_body(*found[-1]):
                        found, upgraded, tail, is_understood = self._parse(data[at:])
                        return [*messages, *found], upgraded, tail, is_understood
                    if len(self._messages) + len(messages) >= self._max_msg_queue_size:
                        self._unparsed = data[at:]
                        return messages, False, b"", True
                else:
                    empty_parts += 1
        except HttpProcessingError as error:
            if not self._last_payload.is_eof():  # the parser does not fail the body that it was in
                self._last_payload.set_exception(web.RequestPayloadError(error.message))
            messages.append((_ErrInfo(status=400, exc=error, message=error.message), EMPTY_PAYLOAD))
            return messages, False, b"", False

    def _find_split_head_end(self, data: bytes) -> int:
        """Index in ``data`` after a head's end that started in the previous read; 0 when there is none."""
        if not data:  # reading resumes after a pause
            return 0
        last = self._last_bytes
        self._last_bytes = (last + data)[1 - len(_HEAD_END) :] if data.endswith((b"\r", b"\n")) else b""
        if not last:
            return 0
        start_at = (last + data[: len(_HEAD_END) - 1]).find(_HEAD_END)
        return start_at + len(_HEAD_END) - len(last) if start_at >= 0 else 0

    def finish_fast_path(self, data: bytes, *, closes: bool) -> None:
        """Write the complete response, and go on with the requests behind it."""
        if self._http.gathered is not None:
            self._http.gathered.append((self, data, closes))
        elif self._fast_path is not None and self.transport is not None:
            self._fast_path = None
            self._http.in_flight -= 1
            self.transport.write(data)
            self._after_fast_path(closes=closes)

    def refuse_fast_path(self, data: bytes) -> None:
        """Write the complete response to a request whose body is not read, and discard the rest."""
        if self.transport is not None:
            self.transport.write(data)
            self.drop_rest()

    def stream_fast_path(
        self,
        exchange: FastPathRequest,
        call: Call,
        upstream: Response,
        start: bytes,
        content_length: int | None,
    ) -> None:
        """Write the head and what there is of the body; a task writes the rest."""
        http, transport = self._http, self.transport
        if transport is None:
            return  # the client is gone, and its call was cancelled
        closes = http.ingress.is_draining
        body = StreamedBody(
            self, transport, call, upstream, content_length, is_chunked=content_length is None
        )
        # This runs while a link is read, which must not end because this client has: the task sees that.
        with contextlib.suppress(ConnectionError):
            body.start(stream_head(start, content_length, exchange.request_id, closes=closes))
        sending = self._finish_stream(exchange, call, body, upstream.status, closes=closes)
        self._stream_task = http.tasks.start(sending, name="stream")

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client disconnected: its request is cancelled."""
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        fast_path, self._fast_path = self._fast_path, None
        if fast_path is not None:
            self._http.in_flight -= 1
            fast_path.client_gone()
            if self._stream_task is not None:
                self._stream_task.cancel()
        super().connection_lost(exc)

    def _start_fast_path(self, message: RawRequestMessage, payload: StreamReader, data: bytes) -> bool:
        """``data`` is what has just been received, unless it began with a part of another request."""
        exchange = try_fast_path(self, self._http.requests, self._http.ingress, message, payload)
        if exchange is None:
            return False
        if self._request_count and data:  # a connection of one request would remember it for nothing
            scheme = self._http.requests.scheme
            self._known_head = KnownHead.remember(data, message, exchange.headers, self.peer, scheme)
        if self._parser is not None:
            self._parser.message_consumed()
        self._start(exchange)
        return True

    def _start_known(self, known: KnownHead, data: bytes) -> bool:
        """Start the request in ``data`` without parsing it; False when it must be parsed."""
        if self._fast_path is not None or self._paused or self._close or self._force_close:
            return False
        exchange = try_known_head(self, self._http.requests, self._http.ingress, known, data)
        if exchange is None:
            return False
        self._start(exchange)
        return True

    def _start(self, exchange: FastPathRequest) -> None:
        self._request_count += 1
        self._fast_path = exchange
        self._http.in_flight += 1
        exchange.start(self._http.requests)

    def _after_fast_path(self, *, closes: bool) -> None:
        if closes:
            self.close()
            if self.transport is not None:
                self.transport.close()
            return
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        if self._keepalive_handle is None:
            self._keepalive_handle = self._loop.call_at(
                self._next_keepalive_close_time, self._process_keepalive
            )
        if self._messages:
            self._wake()

    async def _finish_stream(
        self, exchange: FastPathRequest, call: Call, body: StreamedBody, status: int, *, closes: bool
    ) -> None:
        http, is_whole = self._http, False
        try:
            await body.finish(http.requests.options.body_rate_min)
            is_whole = True
        except ConnectionError as error:
            # The client disconnected, or the response broke off and the connection was closed.
            _log.debug("stream_ended_early", request_id=exchange.request_id, reason=str(error))
        finally:
            http.ingress.abandon(call)
            self._stream_task = None
            if self._fast_path is exchange:
                self._fast_path = None
                http.in_flight -= 1
                exchange.count(status if is_whole else CLIENT_GONE)
                self._after_fast_path(closes=closes or not is_whole)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # -- time --

    def _process_keepalive(self) -> None:
        # aiohttp's task waits, but the connection is not idle; or is no longer, because after the loop was blocked
        # timers run before the bytes that arrived meanwhile are read.
        if self._fast_path is not None or self._has_unread():
            self._keepalive_handle = self._loop.call_later(self._keepalive_timeout, self._process_keepalive)
            return
        super()._process_keepalive()

    def _start_head_timer(self) -> None:
        """Start the timer of a head that has arrived in part."""
        if self._head_timer is None:
            self._head_timer = self._loop.call_later(self._http.header_timeout_s, self._time_out_head)

    def _time_out_head(self) -> None:
        """Time out a head that arrives too slowly; requests before it are answered first."""
        self._head_timer = None
        if self._fast_path is not None or self._request_in_progress or self._messages:
            self._start_head_timer()
            return
        error = HeadTooSlow("the head of the request did not come in time")
        self._messages.append((_ErrInfo(status=408, exc=error, message=str(error)), EMPTY_PAYLOAD))
        self._wake()

    # -- the end --

    def drop_rest(self) -> None:
        """Discard the rest of a body whose request was answered with ``Connection: close``.

        Closing the connection now would reset it, and its client, which is still sending, might lose the response.
        Not reading would block a client that sends everything before it reads. So the bytes are discarded until the
        client closes its end, or pauses, or has sent too much or for too long.
        """
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        self._force_close = True  # aiohttp stops parsing, and does not close the transport
        self.end_raw_body()
        if self._waiter is not None:
            self._waiter.cancel()
        # It may be broken, or still have a reader: then nothing is buffered.
        with contextlib.suppress(RuntimeError, web.RequestPayloadError):
            self._last_payload.read_nowait()
        self._unparsed = b""
        self._drop_bytes_left = _DROPPED_BYTES_MAX
        if transport.can_write_eof():  # TLS cannot: its client sees the end of the answer by its length
            transport.write_eof()
        self._drop(0)
        self._linger(self._loop.time() + _LINGER_TIMEOUT_S)

    def _drop(self, size: int) -> None:
        assert self._drop_bytes_left is not None, "it drops"
        self._drop_bytes_left -= size
        self._pause_transport_reading()
        if self._drop_bytes_left > 0:
            self._loop.call_later(_DROP_INTERVAL_S, self._resume_transport_reading)

    def _linger(self, until: float) -> None:
        before = self._drop_bytes_left

        def check() -> None:
            if self._drop_bytes_left == before or self._loop.time() >= until:
                self.force_close()
            else:
                self._linger(until)

        self._linger_timer = self._loop.call_later(_LINGERS_IDLE_S, check)

    def close_if_idle(self) -> None:
        """Close the connection if no request is in flight or unread: closing would reset that one."""
        transport, waiter = self.transport, self._waiter
        if (
            transport is None
            or waiter is None
            or waiter.done()
            or self._messages
            or self._fast_path is not None
        ):
            return
        if not self._has_unread():
            self.force_close()

    def _has_unread(self) -> bool:
        """True when bytes or an end of file from the client are unread."""
        transport = self.transport
        if transport is None:
            return False
        poll = select.poll()
        poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Respond to a request that could not be parsed, or whose handler failed."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun, so no error can be sent")
        request_id = str(uuid.uuid4())
        problem = build_parse_problem(exc, message)
        if problem is None:
            _log.error("connection_failed", exc_info=exc)
            problem = Problem(status=status, code="internal", message="the proxy failed")
        elif isinstance(self._http.requests.observer, AccessLog):
            # The placeholder for the request has neither method nor path.
            self._http.requests.observer.refused("", "", request_id, self.peer, problem)
        response = problem_response(problem, request_id)
        response.headers["Server"] = SERVER_NAME
        response.force_close()
        request._version = HttpVersion11  # noqa: SLF001 - the placeholder for an unparsable request has 1.0
        return response
