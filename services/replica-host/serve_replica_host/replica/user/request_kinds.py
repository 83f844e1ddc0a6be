"""Calls the user's code for each kind of request.

Why apart from `UserExecutor`: that one starts and ends requests of any kind; this one handles each kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

import msgspec
import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.websockets import WebSocketDisconnect

from serve_common.errors import BadField, UserCodeRaised
from serve_common.protocol.frames import RequestKind
from serve_replica_host.replica.io.flow import BodyReader
from serve_replica_host.replica.io.request import (
    Ended,
    Failed,
    IoEvent,
    ReplicaRequest,
    Taken,
    WholeResponseEvent,
    is_cancellation,
)
from serve_replica_host.replica.io.response_stream import (
    TEXT,
    NotAResponse,
    PlainStream,
    ResponseStream,
    WholeResponse,
    to_response,
)
from serve_replica_host.replica.telemetry.traces import error_line, user_traceback
from serve_replica_host.replica.user.asgi import (
    CallerGone,
    HttpSender,
    LazyRequest,
    http_scope,
    websocket_scope,
)
from serve_replica_host.replica.user.code import Lifespan, UserCode, UserCodeUnusable, on_response_started

_log = structlog.get_logger(__name__)

_FORBIDDEN: Final = 403
_SERVER_ERROR: Final = (500, [(b"content-type", b"text/plain; charset=utf-8")], b"Internal Server Error")
"""The response of ASGI servers when an application fails without one."""
_CALLER_GONE_ERRORS: Final = (CallerGone, ClientDisconnect, WebSocketDisconnect)
"""Exceptions of frameworks when the caller is gone."""


@final
class RequestKinds:
    """Calls the user's code; all methods run on the user loop, in the task of their request."""

    def __init__(self, code: UserCode, io_queue: Callable[[IoEvent], object]) -> None:
        self._code = code
        self._io_queue = io_queue

    async def handle(self, exchange: ReplicaRequest) -> IoEvent:
        """Run the request; returns the outcome that ends it. Raises what the user's code raises, and `BadField`."""
        code = self._code
        kind = exchange.head.kind
        if kind is RequestKind.HTTP:
            if code.asgi is not None:
                return await self._run_asgi(exchange, code.asgi)
            try:
                method = code.method("")
            except BadField as error:  # the code is at fault, and not the client
                raise UserCodeUnusable(error.reason) from error
            request: LazyRequest | None = None
            arguments: tuple[LazyRequest, ...] = ()
            if method.takes_argument:
                request = LazyRequest(exchange.head, _Receive(exchange, self._io_queue))
                arguments = (request,)
            if method.is_async:
                result = await method.function(*arguments)
            elif method.blocks:
                result = await code.run_plain(method.function, *arguments)
            else:
                result = method.function(*arguments)
            response = to_response(result)
            if type(response) is WholeResponse:
                return WholeResponseEvent(exchange, response.status, response.headers, response.body)
            return await self._stream(exchange, response, request)
        if kind is RequestKind.PYTHON:
            # Here, because it needs cloudpickle, which a replica without handles need not load.
            from serve_replica_host.replica.user.python_calls import handle_call  # noqa: PLC0415

            return await handle_call(code, exchange, self._io_queue)
        if kind is RequestKind.CALL:
            return await self._call(exchange)
        return await self._run_websocket(exchange)

    # -- HTTP -----------------------------------------------------------------------------------------------------

    async def _stream(self, exchange: ReplicaRequest, response: Any, request: LazyRequest | None) -> IoEvent:
        if type(response) is PlainStream:
            stream = ResponseStream(exchange, self._io_queue)
            stream.open(200, TEXT, soon=False)
            on_response_started()
            await self._code.run_plain(stream.run_plain, response.iterator, "utf-8")
            stream.end()
            return stream.outcome()
        if _streams_plainly(response):
            stream = ResponseStream(exchange, self._io_queue)
            stream.open(response.status_code, response.raw_headers)
            on_response_started()
            await stream.run(response.body_iterator, response.charset)
            stream.end()
            if exchange.reader is not None:
                exchange.reader.leave()
            if response.background is not None:
                await response.background()
            return stream.outcome()
        if request is None:
            request = LazyRequest(exchange.head, _Receive(exchange, self._io_queue))
        sender = HttpSender(exchange, self._io_queue, make_reader(exchange, self._io_queue))
        await response(request.scope, request.receive, sender)
        return sender.outcome()

    async def _run_asgi(self, exchange: ReplicaRequest, asgi: Lifespan) -> IoEvent:
        reader = make_reader(exchange, self._io_queue)
        sender = HttpSender(exchange, self._io_queue, reader)
        try:
            await asgi.application(http_scope(exchange.head, asgi.state), reader, sender)
        except BaseException as error:
            if is_cancellation(exchange, error):
                raise
            if _is_caller_gone(exchange, error):
                return Ended(exchange)
            log_raised(exchange, error)
            if not sender.has_started:
                return WholeResponseEvent(exchange, *_SERVER_ERROR)
            if not sender.is_whole:
                line = error_line(error)
                return Failed(exchange, UserCodeRaised.error_code, UserCodeRaised.status_hint, line)
        return sender.outcome()

    async def _run_websocket(self, exchange: ReplicaRequest) -> IoEvent:
        asgi, socket = self._code.asgi, exchange.socket
        if asgi is None:
            return WholeResponseEvent(exchange, _FORBIDDEN, [], b"this deployment takes no WebSockets")
        has_raised = False
        try:
            await asgi.application(websocket_scope(exchange.head, asgi.state), socket.receive, socket.send)
        except BaseException as error:
            if is_cancellation(exchange, error):
                raise
            has_raised = True
            if not _is_caller_gone(exchange, error):
                log_raised(exchange, error)
        ended: IoEvent | None = socket.end(has_raised=has_raised)
        return WholeResponseEvent(exchange, *_SERVER_ERROR) if ended is None else ended

    # -- plain calls ----------------------------------------------------------------------------------------------

    async def _call(self, exchange: ReplicaRequest) -> IoEvent:
        call = exchange.head.call
        name = "" if call is None else call.method_name
        if name.startswith("_") and name != "__call__":  # callers over NATS are no code of the application
            raise BadField("method_name", f"{name!r} is private")
        arguments = (_argument(exchange),) if self._code.method(name).takes_argument else ()
        response = to_response(await self._code.call(*arguments, method_name=name))
        if isinstance(response, WholeResponse):
            return WholeResponseEvent(exchange, response.status, response.headers, response.body)
        raise NotAResponse("a plain call cannot be answered by a stream")


def log_raised(exchange: ReplicaRequest, error: BaseException) -> None:
    """Log an exception of the user's code, and record it in the trace."""
    if exchange.trace is not None:
        exchange.trace.code_raised(error, error_line(error))
    _log.error(
        "user_code_raised",
        request_id=exchange.head.request_id,
        method=exchange.head.method,
        path=exchange.head.path,
        error=error_line(error),
        traceback=user_traceback(error),
    )


def _is_caller_gone(exchange: ReplicaRequest, error: BaseException) -> bool:
    """True when ``error`` only means that the caller is gone, which is not a failure."""
    has_ended = exchange.is_dropped or exchange.head.kind is RequestKind.WEBSOCKET
    return has_ended and isinstance(error, _CALLER_GONE_ERRORS)


@final
class _Receive:
    """ASGI's ``receive``, by a reader that is created on first use."""

    __slots__ = ("_exchange", "_io_queue")

    def __init__(self, exchange: ReplicaRequest, io_queue: Callable[[IoEvent], object]) -> None:
        self._exchange = exchange
        self._io_queue = io_queue

    async def __call__(self) -> Any:
        return await make_reader(self._exchange, self._io_queue)()

    async def rest(self) -> bytes | None:
        """As `BodyReader.rest`."""
        return await make_reader(self._exchange, self._io_queue).rest()


def make_reader(exchange: ReplicaRequest, io_queue: Callable[[IoEvent], object]) -> BodyReader:
    """The reader of the request's body, created on first use."""
    reader = exchange.reader
    if reader is None:
        if exchange.is_body_streamed:
            reader = BodyReader(None, lambda frames: io_queue(Taken(exchange, frames)))
        else:
            reader = BodyReader(exchange.body)
        exchange.reader = reader
    return reader


def _streams_plainly(response: Response) -> bool:
    """True when ``response`` is sent by sending the items of its iterator, without overridden methods."""
    kind: Any = type(response)
    return kind is StreamingResponse or (
        isinstance(response, StreamingResponse)
        and kind.__call__ is StreamingResponse.__call__
        and kind.stream_response is StreamingResponse.stream_response
    )


def _argument(exchange: ReplicaRequest) -> Any:
    """The argument of a plain call: None if empty, bytes unless the content type is JSON. Raises `BadField`."""
    body = exchange.body
    if not body:
        return None
    for name, value in exchange.head.headers:
        if name == b"content-type" and b"json" not in value.lower():
            return body
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadField("body", f"is not JSON: {error}") from error
