"""WebSockets: a client's socket connected to a replica's.

Why the replica is connected before the handshake is answered: it may refuse, and a refusal is an HTTP response with a
reason; a socket that is accepted and closed at once gives none.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from typing import Any, Final, final

import structlog
from aiohttp import WSMsgType, web
from aiohttp._websocket.reader import WebSocketDataQueue
from aiohttp.http_websocket import WebSocketError, WebSocketReader, WebSocketWriter, WSCloseCode

from serve_common.dispatch.calls import RequestSpec, Response
from serve_common.dispatch.errors import ResponseUnusable, get_error_type
from serve_common.dispatch.sockets import MESSAGE_BYTES_MAX, ReplicaSocket, SocketClosed
from serve_common.errors import ServeError, TransientError
from serve_common.runtime.tasks import TaskOwner
from serve_proxy.core.headers import REQUEST_ID, as_text, read_response_head
from serve_proxy.core.problems import ProxyDraining, UpgradeRefused
from serve_proxy.http.bodies import MinRateGuard
from serve_proxy.http.response_heads import SERVER_NAME
from serve_proxy.http.streamed_responses import READS_TOO_SLOWLY
from serve_proxy.shell.ingress import Ingress
from serve_proxy.shell.request_observers import LoggedRequest

_log = structlog.get_logger(__name__)
# It warns of every client that offers protocols to an application that wants none.
logging.getLogger("aiohttp.websocket").setLevel(logging.ERROR)

HEARTBEAT_S: Final = 40.0
"""Seconds of silence before a client is sent a ping; it has half as long to answer, so a dead one frees its slot."""
CLOSE_TIMEOUT_S: Final = 5.0
"""Seconds that a client may take to answer a close."""
LINGER_S: Final = 2.0
"""Seconds for which messages are discarded after an error, so that the client can read the close frame."""
REASON_BYTES_MAX: Final = 123
"""Maximum size of the reason in a close frame."""

NORMAL: Final = 1000
GOING_AWAY: Final = 1001
NO_STATUS: Final = 1005
ABNORMAL: Final = 1006
BAD_TEXT: Final = 1007
INTERNAL: Final = 1011
TRY_LATER: Final = 1013
_FRAME_HEAD_BYTES_MAX: Final = 10
_LENGTH_BYTES: Final = {126: 2, 127: 8}
_MASK_BYTES: Final = 4
_SENDABLE: Final = frozenset({1000, 1001, 1002, 1003, *range(1007, 1015), *range(3000, 5000)})


def check_handshake(request: web.BaseRequest) -> None:
    """Raise `UpgradeRefused` for an invalid or unsupported WebSocket handshake."""
    headers = request.headers
    if headers.get("Sec-WebSocket-Version", "").strip() != "13":
        reason = "only version 13 is spoken here"
        raise UpgradeRefused(
            "Sec-WebSocket-Version", reason, status=426, headers=(("Sec-WebSocket-Version", "13"),)
        )
    keys = headers.getall("Sec-WebSocket-Key", [])
    try:
        is_good = len(keys) == 1 and len(base64.b64decode(keys[0].strip(), validate=True)) == 16
    except binascii.Error:
        is_good = False
    if not is_good:
        raise UpgradeRefused("Sec-WebSocket-Key", "must be 16 bytes in base64")


@final
class HttpSockets:
    """The open WebSockets of this process."""

    def __init__(self, ingress: Ingress) -> None:
        self._ingress = ingress
        self._tasks = TaskOwner("sockets")
        self._open: set[ReplicaSocket] = set()
        self._is_leaving = False

    def __len__(self) -> int:
        return len(self._open)

    async def leave(self, grace_s: float) -> None:
        """After ``grace_s`` seconds close all sockets with `GOING_AWAY`, and from then on each new one."""
        await asyncio.sleep(grace_s)
        self._is_leaving = True
        for socket in list(self._open):
            _close(socket, GOING_AWAY, "this proxy is shutting down")

    def check(self, request: web.BaseRequest) -> None:
        """Validate a handshake. Raises `ProxyDraining` while draining, and as `check_handshake`."""
        if self._ingress.is_draining:
            raise ProxyDraining("this proxy is shutting down")
        check_handshake(request)

    async def serve(
        self,
        request: web.BaseRequest,
        spec: RequestSpec,
        upstream: Response,
        socket: ReplicaSocket,
        rate_min: int,
    ) -> web.StreamResponse:
        """Answer the handshake, and forward messages until one side closes. Raises `ResponseUnusable` before that."""
        response = _accept(request, upstream, spec.request_id)
        self._open.add(socket)
        try:
            await response.prepare(request)
            if isinstance(spec.trace, LoggedRequest):
                spec.trace.talks(response)
            if self._is_leaving:
                _close(socket, GOING_AWAY, "this proxy is shutting down")
            reader = self._tasks.start(_from_client(response, socket), name="socket")
            try:
                await self._to_client(request, response, socket, spec.request_id, rate_min)
            finally:
                reader.cancel()
        finally:
            self._open.discard(socket)
        return response

    async def close(self, timeout_s: float) -> None:
        """Cancel the remaining sockets."""
        await self._tasks.close(timeout_s)

    async def _to_client(
        self,
        request: web.BaseRequest,
        response: _ClientSocket,
        socket: ReplicaSocket,
        request_id: str,
        rate_min: int,
    ) -> None:
        transport = request.transport

        def taken_bytes() -> int | None:
            unsent_bytes = 0 if transport is None else transport.get_write_buffer_size()
            return response.sent_message_bytes - unsent_bytes if unsent_bytes else None

        def cut_off() -> None:
            _log.warning("client_reads_too_slowly", request_id=request_id)
            response.failure = READS_TOO_SLOWLY
            if transport is not None:
                transport.abort()

        with MinRateGuard(rate_min, taken_bytes, cut_off):
            try:
                while True:
                    event = await socket.receive()
                    if isinstance(event, SocketClosed):
                        break
                    response.sent_messages += 1
                    response.sent_message_bytes += len(event.data)
                    await response.send_frame(
                        event.data, WSMsgType.TEXT if event.is_text else WSMsgType.BINARY
                    )
            except ServeError as error:
                _log.info("socket_failed", request_id=request_id, reason=str(error))
                response.failure = response.failure or get_error_type(error)
                event = SocketClosed(self._get_code(error), str(error))
                _close(socket, event.code, event.reason)  # when the error is on this side
            except (
                ConnectionError
            ):  # the client has closed or disconnected meanwhile, and its task reports that
                event = SocketClosed(NORMAL, "")
        response.last_code = event.code
        code = event.code if event.code in _SENDABLE else NORMAL if event.code == NO_STATUS else INTERNAL
        await response.close(code=code, message=_cut(event.reason))
        if response.has_failed:
            request.protocol.resume_reading(resume_parser=False)
            await asyncio.sleep(LINGER_S)  # ends with the connection

    def _get_code(self, error: ServeError) -> int:
        if isinstance(error, TransientError):
            return GOING_AWAY if self._ingress.is_draining else TRY_LATER
        return INTERNAL


def _accept(request: web.BaseRequest, upstream: Response, request_id: str) -> _ClientSocket:
    try:
        headers = as_text(read_response_head(200, upstream.headers).forwarded)
    except ValueError as error:
        raise ResponseUnusable(f"the replica's answer cannot be sent: {error}") from error
    protocol = ""
    passed = []
    for name, value in headers:
        if name.lower() == "sec-websocket-protocol":
            protocol = value
        elif not name.lower().startswith("sec-websocket-"):
            passed.append((name, value))
    offered = ",".join(request.headers.getall("Sec-WebSocket-Protocol", []))
    if protocol and protocol not in [offer.strip() for offer in offered.split(",")]:
        raise ResponseUnusable(f"the replica chose the protocol {protocol[:80]!r}, which was not offered")
    response = _ClientSocket(
        protocols=(protocol,) if protocol else (),
        compress=False,
        max_msg_size=MESSAGE_BYTES_MAX + 1,  # the library takes one byte less
        autoclose=False,
        heartbeat=HEARTBEAT_S,
        decode_text=False,
        timeout=CLOSE_TIMEOUT_S,
    )
    for name, value in passed:
        response.headers.add(name, value)
    response.headers[REQUEST_ID.lower()] = request_id
    response.headers["Server"] = SERVER_NAME
    return response


async def _from_client(response: _ClientSocket, socket: ReplicaSocket) -> None:
    """Forward the client's messages until it closes; the task that sends reports how the socket ended."""
    try:
        while True:
            message = await response.receive()
            if message.type is WSMsgType.BINARY:
                response.received_messages += 1
                response.received_message_bytes += len(message.data)
                is_open = await socket.send(message.data, is_text=False)
            elif message.type is WSMsgType.TEXT:
                if not _is_text(message.data):
                    response.has_failed = True
                    socket.close(BAD_TEXT, "a text message is not UTF-8")
                    return
                response.received_messages += 1
                response.received_message_bytes += len(message.data)
                is_open = await socket.send(message.data, is_text=True)
            else:
                _end(response, socket, message.type, message.data, message.extra)
                return
            if not is_open:
                return
    except ServeError as error:
        _log.debug("socket_not_heard", reason=str(error))  # the receiving task gets the same error


def _end(
    response: _ClientSocket, socket: ReplicaSocket, kind: WSMsgType, data: object, extra: object
) -> None:
    if kind is WSMsgType.CLOSE:
        socket.close(int(str(data or NO_STATUS)), str(extra or ""))
    elif kind is WSMsgType.ERROR:
        response.has_failed = True
        code = data.code if isinstance(data, WebSocketError) else ABNORMAL
        socket.close(code, str(data)[:REASON_BYTES_MAX])
    else:  # closed on this side, or the connection is gone
        socket.close(ABNORMAL, "")


def _close(socket: ReplicaSocket, code: int, reason: str) -> None:
    try:
        socket.close(code, reason)
    except ServeError as error:
        _log.debug("socket_not_heard", reason=str(error))


def _is_text(data: bytes) -> bool:
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _cut(reason: str) -> bytes:
    return reason.encode()[:REASON_BYTES_MAX].decode("utf-8", "ignore").encode()


@final
class MaskedFrames:
    """Parses a client's frames, and refuses unmasked ones (RFC 6455, 5.1), which the library does not.

    Frames before an unmasked one are processed.
    """

    __slots__ = ("_head", "_is_refused", "_left_bytes", "_queue", "_reader")

    def __init__(self, reader: WebSocketReader, queue: WebSocketDataQueue) -> None:
        """``queue`` is where ``reader`` puts messages."""
        self._reader = reader
        self._queue = queue
        self._head = b""
        """The first bytes of a frame whose head is incomplete."""
        self._left_bytes = 0
        """Bytes missing from a partly received frame: of its masking key and payload."""
        self._is_refused = False

    def feed_eof(self) -> None:
        """Signal the end of the connection to the reader."""
        self._reader.feed_eof()

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Feed bytes to the reader, up to an unmasked frame."""
        if self._is_refused:
            return False, b""
        at, came = self._left_bytes, len(data)
        while at < came:
            head = self._head + data[at : at + _FRAME_HEAD_BYTES_MAX - len(self._head)]
            if len(head) > 1 and not head[1] & 0x80:
                return self._refuse(data[:at])
            length = head[1] & 0x7F if len(head) > 1 else 0
            extra = _LENGTH_BYTES.get(length, 0)
            if len(head) < 2 + extra:
                self._head, self._left_bytes = head, 0
                return self._reader.feed_data(data)
            if extra:
                length = int.from_bytes(head[2 : 2 + extra], "big")
            at += 2 + extra - len(self._head) + _MASK_BYTES + length
            self._head = b""
        self._left_bytes = at - came
        return self._reader.feed_data(data)

    def _refuse(self, before: bytes) -> tuple[bool, bytes]:
        self._is_refused = True
        self._reader.feed_data(before)
        self._queue.set_exception(
            WebSocketError(WSCloseCode.PROTOCOL_ERROR, "a client's frames must be masked")
        )
        return False, b""


class _ClientSocket(web.WebSocketResponse[bool]):
    """aiohttp's socket, but the connection stays until the request ends: a reset would lose the close frame.

    Also an `OpenSocket`.
    """

    has_failed = False
    """The client has violated the protocol."""
    received_messages = 0
    received_message_bytes = 0
    sent_messages = 0
    sent_message_bytes = 0
    last_code = 0
    failure = ""

    def _post_start(self, request: web.BaseRequest, protocol: str | None, writer: WebSocketWriter) -> None:
        connection = request.protocol
        came, connection._message_tail = connection._message_tail, b""  # noqa: SLF001 - it would be parsed at once
        super()._post_start(request, protocol, writer)
        assert self._parser is not None
        assert self._reader is not None
        frames: Any = MaskedFrames(self._parser, self._reader)
        connection._payload_parser = frames  # noqa: SLF001 - `set_parser` takes one only once
        if came:
            frames.feed_data(came)

    def _close_transport(self) -> None:
        """The connection is closed at the end of the request."""

    def _handle_ping_pong_exception(self, exc: BaseException) -> None:
        super()._handle_ping_pong_exception(exc)
        if self._req is not None and self._req.transport is not None:
            self._req.transport.abort()
