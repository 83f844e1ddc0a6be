"""One client's connection: aiohttp's, with the fast path of simple requests built in."""

from __future__ import annotations

import asyncio
import contextlib
import select
import uuid
from collections.abc import Sequence
from typing import Any, Final, Protocol

import structlog
from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.http_parser import RawRequestMessage
from aiohttp.http_writer import StreamWriter
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import _ErrInfo

from serve_common.dispatch.admission import CLIENT_GONE
from serve_common.dispatch.calls import Call, Response
from serve_common.dispatch.errors import HeadersTooLarge
from serve_common.errors import ServeError
from serve_common.runtime.tasks import OwnedTask, TaskOwner
from serve_proxy.core.problems import BadRequest, HeadTooSlow, Problem, problem_of
from serve_proxy.http.fast_path import FastExchange
from serve_proxy.http.requests import HttpRequests
from serve_proxy.http.responses import SERVER_NAME, problem_response
from serve_proxy.shell.access_log import AccessLog

_REASON_LENGTH_MAX = 200


def problem_of_unread(error: BaseException | None, message: str | None) -> Problem | None:
    """What was wrong with it; None when ``error`` is of another kind. ``message`` says more than the library's own."""
    if isinstance(error, HeadTooSlow):
        return problem_of(error)
    if isinstance(error, LineTooLong):
        return problem_of(HeadersTooLarge("a line of the request's head is too long"))
    if isinstance(error, HttpProcessingError):
        reason = (message or str(error)).partition("\n")[0][:_REASON_LENGTH_MAX]
        return problem_of(BadRequest("request", reason))
    return None


_log = structlog.get_logger(__name__)

_HEAD_END: Final = b"\r\n\r\n"
_LINGERS_S: Final = 30.0
"""How long what a client still sends is dropped at most, once its request was answered."""
_LINGERS_IDLE_S: Final = 5.0
"""How long such a client may send nothing, nor close its connection."""
_DROPPED_BYTES_MAX: Final = 64 * 1024 * 1024
"""How much of it is dropped; a client that has more to send must look for its answer before."""
_DROPS_EVERY_S: Final = 0.005
"""So often one read of a body that nobody wants is dropped, so that the bodies that are wanted get their turn."""
_BARREN_MAX: Final = 16
"""Parts of what has come at once that may end where a head might and be none, before the rest is parsed in one."""


class ConnectionOwner(Protocol):
    """What connections need of their server; `HttpServer`."""

    in_flight: int
    """Requests that have not been answered."""

    @property
    def tasks(self) -> TaskOwner:
        """Of the requests that need one."""
        ...

    @property
    def requests(self) -> HttpRequests:
        """The long way, and what both have in common."""
        ...

    @property
    def header_timeout_s(self) -> float:
        """See `HttpOptions`."""
        ...

    def take_simple(
        self, connection: HttpConnection, message: RawRequestMessage, payload: StreamReader
    ) -> FastExchange | None:
        """See `http_fast.take_simple`."""
        ...

    def refuse_full(
        self, connection: HttpConnection, message: RawRequestMessage, payload: StreamReader
    ) -> bool:
        """See `http_fast.refuse_full`."""
        ...

    async def respond(
        self, request: web.BaseRequest, call: Call, answer: Response, request_id: str
    ) -> web.StreamResponse:
        """See `http_answers.respond`."""
        ...


class HttpConnection(web.RequestHandler):
    """One client's connection; what is not HTTP gets the same form of error as everything else.

    Requests on the short way (`http_fast`) are begun here, in the order in which they came: one is begun only while no
    other is under way, and what comes behind it waits. aiohttp's own task for the connection meanwhile waits for a
    message, and gets everything that must take the long way.
    """

    __slots__ = (
        "_drop_bytes_left",
        "_fast",
        "_head_timer",
        "_http",
        "_last_bytes",
        "_last_payload",
        "_linger_timer",
        "_peer",
        "_stream_task",
        "_unparsed",
    )

    def __init__(self, manager: web.Server, owner: ConnectionOwner, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._http = owner
        self._fast: FastExchange | None = None
        """The request on the short way that is under way."""
        self._stream_task: OwnedTask | None = None
        self._peer = ""
        self._last_payload: StreamReader = EMPTY_PAYLOAD
        self._head_timer: asyncio.TimerHandle | None = None
        """Runs while the head of a request has come in part."""
        self._last_bytes = b""
        """Of what came last, when it may be a part of a head's end."""
        self._unparsed = b""
        """What has come behind as many requests as may wait."""
        self._drop_bytes_left: int | None = None
        """After `drop_rest`, what may still be read."""
        self._linger_timer: asyncio.TimerHandle | None = None

    @property
    def peer(self) -> str:
        """See `http_fast.Connection`."""
        if not self._peer:
            name = self.peername
            self._peer = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else ""
        return self._peer

    # -- the short way --

    def data_received(self, data: bytes) -> None:
        """Parse, and begin what may take the short way."""
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
                self._wait_for_head()
            return
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        message, payload = messages[-1]
        self._last_payload = payload
        waiter = self._waiter
        if (
            len(messages) == 1
            and is_understood
            and not upgraded
            and self._fast is None
            and not self._paused
            and not self._messages
            and waiter is not None
            and not waiter.done()
            and not self._unparsed
            and (
                self._begin_fast(message, payload)
                if payload.is_eof()
                else self._http.refuse_full(self, message, payload)
            )
        ):
            return
        self._request_count += len(messages)
        self._messages.extend(messages)
        if payload.total_bytes and not payload.is_eof() and not upgraded:
            # Whoever wants the body reads on; until then it takes memory that nobody granted. The parser is not told,
            # as `pause_reading` would: it holds nothing back now, and would stop inside what comes next, which may hold
            # a good request before one that is not understood.
            self._reading_paused = True
            self._pause_transport_reading()
        if self._fast is None:
            self._wake()
        if not self._buffer_paused and len(self._messages) >= self._max_msg_queue_size:
            self._pause_reading_for_buffer()
        self._upgraded = upgraded
        if upgraded and tail:
            self._message_tail = tail

    def _parse(self, data: bytes) -> tuple[Sequence[Any], bool, bytes, bool]:
        """The requests in ``data``, whether one of them wants an upgrade, what came behind that, and whether all was
        understood; what was not is the last of them.

        The parser forgets what it has found when it meets what it does not understand, so it is given no more at once
        than to the next place where a head might end.
        """
        parser = self._parser
        assert parser is not None, "it lives as long as the connection"
        if self._unparsed:
            data, self._unparsed = self._unparsed + data, b""
        end = self._end_begun_before(data)
        messages: list[Any] = []
        found: Sequence[Any]
        at, barren, whole = 0, 0, len(data)
        try:
            while True:
                if not end:
                    found_at = data.find(_HEAD_END, at) if barren < _BARREN_MAX else -1
                    end = found_at + len(_HEAD_END) if found_at >= 0 else whole
                if end >= whole:
                    found, upgraded, tail = parser.feed_data(data[at:] if at else data)
                    return [*messages, *found] if messages else found, upgraded, tail, True
                found, upgraded, tail = parser.feed_data(data[at:end])
                at, end = end, 0
                if upgraded:
                    return [*messages, *found], True, tail + data[at:], True
                if found:
                    messages += found
                    self._last_payload = found[-1][1]
                    if len(self._messages) + len(messages) >= self._max_msg_queue_size:
                        self._unparsed = data[at:]
                        return messages, False, b"", True
                else:
                    barren += 1
        except HttpProcessingError as error:
            if not self._last_payload.is_eof():  # the parser does not tell the body that it was in
                self._last_payload.set_exception(web.RequestPayloadError(error.message))
            messages.append((_ErrInfo(status=400, exc=error, message=error.message), EMPTY_PAYLOAD))
            return messages, False, b"", False

    def _end_begun_before(self, data: bytes) -> int:
        """Where in ``data`` that ends which may be the end of a head and has come in part before; 0 when nowhere."""
        if not data:  # reading goes on after a pause
            return 0
        last = self._last_bytes
        self._last_bytes = (last + data)[1 - len(_HEAD_END) :] if data.endswith((b"\r", b"\n")) else b""
        if not last:
            return 0
        begun_at = (last + data[: len(_HEAD_END) - 1]).find(_HEAD_END)
        return begun_at + len(_HEAD_END) - len(last) if begun_at >= 0 else 0

    def finish_fast(self, answer: bytes, *, closes: bool) -> None:
        """See `http_fast.Connection`."""
        self._fast = None
        self._http.in_flight -= 1
        transport = self.transport
        if transport is None:
            return
        transport.write(answer)
        self._after_fast(closes=closes)

    def refuse_fast(self, answer: bytes) -> None:
        """See `http_fast.Connection`."""
        if self.transport is not None:
            self.transport.write(answer)
            self.drop_rest()

    def stream_fast(self, exchange: FastExchange, call: Call, answer: Response) -> None:
        """See `http_fast.Connection`."""
        self._stream_task = self._http.tasks.start(self._stream(exchange, call, answer), name="stream")

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client is gone: whatever it asked for is given up."""
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        fast, self._fast = self._fast, None
        if fast is not None:
            self._http.in_flight -= 1
            fast.client_gone()
            if self._stream_task is not None:
                self._stream_task.cancel()
        super().connection_lost(exc)

    def _begin_fast(self, message: RawRequestMessage, payload: StreamReader) -> bool:
        exchange = self._http.take_simple(self, message, payload)
        if exchange is None:
            return False
        self._request_count += 1
        if self._parser is not None:
            self._parser.message_consumed()
        self._fast = exchange
        self._http.in_flight += 1
        exchange.begin(self._http.requests)
        return True

    def _after_fast(self, *, closes: bool) -> None:
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

    async def _stream(self, exchange: FastExchange, call: Call, answer: Response) -> None:
        """Write an answer in pieces by the long way's means."""
        closes, status = True, CLIENT_GONE
        try:
            task = asyncio.current_task()
            assert task is not None
            writer = StreamWriter(self, self._loop)
            request = web.BaseRequest(exchange.message, exchange.payload, self, writer, task, self._loop)
            response = await self._http.respond(request, call, answer, exchange.request_id)
            status = response.status
            if not response.prepared:  # it has no body after all, and only its caller writes those
                response.headers["Server"] = SERVER_NAME
                await response.prepare(request)
                await response.write_eof()
            closes = not response.keep_alive
        except ServeError as error:  # before it has begun
            if self._fast is exchange:
                exchange.fail(error)
        except ConnectionError as error:
            # The client left, or the answer broke off and took the connection along.
            _log.debug("stream_ended_early", request_id=exchange.request_id, reason=str(error))
        finally:
            self._stream_task = None
            if self._fast is exchange:
                self._fast = None
                self._http.in_flight -= 1
                exchange.count(status)
                self._after_fast(closes=closes)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # -- time --

    def _process_keepalive(self) -> None:
        # aiohttp's task waits, but the connection is not idle; or is no longer, for after a moment in which nothing ran
        # timers come before what has come meanwhile.
        if self._fast is not None or self._has_unread():
            self._keepalive_handle = self._loop.call_later(self._keepalive_timeout, self._process_keepalive)
            return
        super()._process_keepalive()

    def _wait_for_head(self) -> None:
        """The head of a request has come in part."""
        if self._head_timer is None:
            self._head_timer = self._loop.call_later(self._http.header_timeout_s, self._end_slow_head)

    def _end_slow_head(self) -> None:
        """The client sends its head a drop at a time, to hold the connection; what came before is answered first."""
        self._head_timer = None
        if self._fast is not None or self._request_in_progress or self._messages:
            self._wait_for_head()
            return
        error = HeadTooSlow("the head of the request did not come in time")
        self._messages.append((_ErrInfo(status=408, exc=error, message=str(error)), EMPTY_PAYLOAD))
        self._wake()

    # -- the end --

    def drop_rest(self) -> None:
        """The answer to a request whose body still comes was written, and says that it is the last one.

        Were the connection closed now it would be reset, and its client, which is still sending, might lose the answer.
        Were it left unread, a client that sends all before it reads would wait. So what comes is dropped, until the
        client closes its end, or pauses, or has sent too much or for too long.
        """
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        self._force_close = True  # aiohttp parses no more, and leaves the transport to whoever has closed it
        if self._waiter is not None:
            self._waiter.cancel()
        # It may be broken, or somebody still reads it: then nothing is held.
        with contextlib.suppress(RuntimeError, web.RequestPayloadError):
            self._last_payload.read_nowait()
        self._unparsed = b""
        self._drop_bytes_left = _DROPPED_BYTES_MAX
        transport.write_eof()
        self._drop(0)
        self._linger(self._loop.time() + _LINGERS_S)

    def _drop(self, size: int) -> None:
        assert self._drop_bytes_left is not None, "it drops"
        self._drop_bytes_left -= size
        self._pause_transport_reading()
        if self._drop_bytes_left > 0:
            self._loop.call_later(_DROPS_EVERY_S, self._resume_transport_reading)

    def _linger(self, until: float) -> None:
        before = self._drop_bytes_left

        def look() -> None:
            if self._drop_bytes_left == before or self._loop.time() >= until:
                self.force_close()
            else:
                self._linger(until)

        self._linger_timer = self._loop.call_later(_LINGERS_IDLE_S, look)

    def close_if_idle(self) -> None:
        """Close it when no request is under way and none waits to be read: closing would reset that one."""
        transport, waiter = self.transport, self._waiter
        if transport is None or waiter is None or waiter.done() or self._messages or self._fast is not None:
            return
        if not self._has_unread():
            self.force_close()

    def _has_unread(self) -> bool:
        """True when the client has sent something, or its end, that was not read yet."""
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
        """Answer a request that could not be parsed, or whose handler failed."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun, so no error can be sent")
        request_id = uuid.uuid4().hex
        problem = problem_of_unread(exc, message)
        if problem is None:
            _log.error("connection_failed", exc_info=exc)
            problem = Problem(status=status, code="internal", message="the proxy failed")
        elif isinstance(self._http.requests.following, AccessLog):
            # What stands in for the request knows neither method nor path.
            self._http.requests.following.refused("", "", request_id, self.peer, problem)
        response = problem_response(problem, request_id)
        response.headers["Server"] = SERVER_NAME
        response.force_close()
        request._version = HttpVersion11  # noqa: SLF001 - what stands in for an unparsable request claims 1.0
        return response
