"""ASGI interfaces for HTTP requests and WebSockets."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, final
from urllib.parse import unquote

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Scope

from serve_common.errors import UserCodeRaised
from serve_common.protocol.frames import WINDOW_MESSAGES, Headers, RequestHead
from serve_common.protocol.streams import CREDIT_PARTS
from serve_replica_host.replica.io.flow import MESSAGE_COST_BYTES, BodyReader
from serve_replica_host.replica.io.request import (
    Closed,
    Ended,
    Failed,
    IoEvent,
    Opened,
    ReplicaRequest,
    SocketReceived,
    SocketSent,
    Taken,
    WholeResponseEvent,
)
from serve_replica_host.replica.io.response_frames import STATUS_SWITCHING
from serve_replica_host.replica.io.response_stream import ResponseStream, is_full, wait_writable
from serve_replica_host.replica.user.code import on_response_started

_REQUEST_ID: Final = b"x-request-id"


class CallerGone(OSError):
    """The caller is gone; frameworks handle it by its base class."""


@final
class HttpSender:
    """ASGI's ``send`` for HTTP; runs on the user loop.

    Why the head waits for the body's first part: most applications send both in one go, and one frame costs half of
    two. If the body takes longer the head is sent in the loop's next iteration, so that a client of server-sent events
    receives it at once.
    """

    def __init__(
        self, exchange: ReplicaRequest, io_queue: Callable[[IoEvent], object], reader: BodyReader
    ) -> None:
        self._exchange = exchange
        self._io_queue = io_queue
        self._reader = reader
        self._stream: ResponseStream | None = None
        self._is_ended = False

    @property
    def has_started(self) -> bool:
        """True once the application has started its response."""
        return self._stream is not None

    @property
    def is_whole(self) -> bool:
        """True once the application has sent its complete response."""
        return self._is_ended

    async def __call__(self, message: Message) -> None:
        """Process a message. Raises `CallerGone`, and RuntimeError for messages that ASGI does not allow."""
        if self._exchange.is_dropped:
            raise CallerGone("the caller is gone")
        kind = message["type"].removeprefix("websocket.")
        if kind == "http.response.start":
            if self._stream is not None:
                raise RuntimeError("the answer was begun already")
            self._stream = ResponseStream(self._exchange, self._io_queue)
            self._stream.open(message["status"], as_headers(message.get("headers", ())))
            on_response_started()
        elif kind == "http.response.body":
            await self._take_body(message)

    async def _take_body(self, message: Message) -> None:
        stream = self._stream
        if stream is None:
            raise RuntimeError("a body was sent before the head of the answer")
        if self._is_ended:
            raise RuntimeError("a body was sent after the end of the answer")
        data = message.get("body", b"")
        if type(data) is not bytes:
            data = bytes(data)
        if message.get("more_body", False):
            if data and stream.put(data):
                await stream.wait()
            return
        self._is_ended = True
        stream.end(data)
        self._reader.leave()

    def outcome(self) -> IoEvent:
        """The outcome that ends the work; `Ended` when the response was complete."""
        if self._is_ended:
            return Ended(self._exchange)
        if self._stream is not None:
            return self._stream.outcome()
        message = "the application returned without an answer"
        return Failed(self._exchange, UserCodeRaised.error_code, UserCodeRaised.status_hint, message)


def as_headers(raw: Any) -> Headers:
    """Convert an application's headers to those of frames, with lower-case names."""
    return [(bytes(name).lower(), bytes(value)) for name, value in raw]


_ASGI: Final = {"version": "3.0", "spec_version": "2.4"}
_NO_STATE: Final[Mapping[str, Any]] = {}


def http_scope(head: RequestHead, state: Mapping[str, Any] = _NO_STATE) -> Scope:
    """ASGI's scope of an HTTP request; ``state`` is that of the lifespan."""
    scope = _scope("http", head, state)
    scope["method"] = head.method
    return scope


def websocket_scope(head: RequestHead, state: Mapping[str, Any] = _NO_STATE) -> Scope:
    """ASGI's scope of a WebSocket."""
    scope = _scope("websocket", head, state)
    scope["scheme"] = {"http": "ws", "https": "wss"}.get(head.scheme, head.scheme)
    offered = b",".join(value for name, value in head.headers if name == b"sec-websocket-protocol")
    scope["subprotocols"] = [word.strip() for word in offered.decode("latin-1").split(",") if word.strip()]
    scope["extensions"] = {"websocket.http.response": {}}
    return scope


def _scope(kind: str, head: RequestHead, state: Mapping[str, Any]) -> dict[str, Any]:
    path = head.path
    return {
        "type": kind,
        "asgi": _ASGI.copy(),
        "http_version": "1.1",
        "scheme": head.scheme,
        "path": unquote(path) if "%" in path else path,
        "raw_path": path.encode("latin-1", "replace"),
        # In ASGI the path is the complete one, and root_path the prefix consumed by routing.
        "root_path": "" if head.route == "/" else head.route,
        "query_string": head.query.encode("latin-1", "replace"),
        "headers": _headers(head),
        "client": _address(head.client),
        "server": _server(head),
        "state": dict(state),
    }


def _headers(head: RequestHead) -> Headers:
    """The request's headers with the id that it has in logs and response, whatever the client sent."""
    headers = [header for header in head.headers if header[0] != _REQUEST_ID]
    if head.request_id:
        headers.append((_REQUEST_ID, head.request_id.encode("latin-1", "replace")))
    return headers


def _address(text: str) -> tuple[str, int] | None:
    host, _, port = text.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdigit() else None


def _server(head: RequestHead) -> tuple[str, int] | None:
    """Host and port to which the client connected; the proxy's own address is of no use to user code."""
    for name, value in head.headers:
        if name == b"host":
            text = value.decode("latin-1")
            default = 443 if head.scheme in ("https", "wss") else 80
            return _address(text) or (text.strip("[]"), default)
    return None


class RestReceive(Protocol):
    """ASGI's ``receive``, which can also read the whole rest of a body."""

    async def __call__(self) -> Message:
        """The next message."""

    async def rest(self) -> bytes | None:
        """As `BodyReader.rest`."""


class LazyRequest(Request):
    """A Starlette `Request` that is initialized on first access, because many handlers ignore it."""

    def __init__(self, head: RequestHead, receive: RestReceive) -> None:
        """Like `Request(http_scope(head), receive)`."""
        self._arguments = (head, receive)

    def __getattr__(self, name: str) -> Any:
        # Called only for missing attributes.
        if "scope" in self.__dict__:
            raise AttributeError(name)
        head, receive = self._arguments
        super().__init__(http_scope(head), receive)
        return getattr(self, name)

    async def body(self) -> bytes:
        """As of Starlette, without a copy of each part before they are joined."""
        if not hasattr(self, "_body"):
            if self._stream_consumed:
                raise RuntimeError("Stream consumed")
            rest = await self._arguments[1].rest()
            if rest is None:
                self._is_disconnected = True
                raise ClientDisconnect
            self._stream_consumed = True
            self._body = rest
        return self._body


MESSAGE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Maximum size of a client's message."""
LEAVE_S: Final = 5.0
"""Seconds that an application may continue after its client is gone."""
_CREDIT_EVERY: Final = WINDOW_MESSAGES // CREDIT_PARTS
_NORMAL: Final = 1000
_TOO_BIG: Final = 1009
_INTERNAL: Final = 1011
_FORBIDDEN: Final = 403


@final
class AsgiSocket:
    """One WebSocket; all methods run on the user loop. `receive` and `send` implement ASGI.

    Why credit is granted for messages that were received by the application: one that reads slowly then slows down its
    client, and no buffer grows. The parts of one message are joined here, up to a limit.
    """

    def __init__(self, exchange: ReplicaRequest, io_queue: Callable[[IoEvent], object]) -> None:
        self._exchange = exchange
        exchange.pieces = deque()  # the writer is notified of sent bytes only while it waits in `room`
        self._io_queue = io_queue
        self._received: deque[tuple[Message, int]] = deque([({"type": "websocket.connect"}, 0)])
        self._disconnect_message: Message | None = None
        self._changed = asyncio.Event()
        self._partial: list[bytes] = []
        self._partial_bytes = 0
        self._taken_frames = 0
        self._written_bytes = 0
        self._is_accepted = False
        self._is_ended = False
        """True when nothing can be sent any more."""
        self._denial: HttpSender | None = None

    # -- from the bus side ----------------------------------------------------------------------------------------

    def feed(self, received: SocketReceived) -> None:
        """Process a message, or a part of one."""
        if self._disconnect_message is not None:
            return
        self._partial.append(received.data)
        self._partial_bytes += len(received.data)
        if self._partial_bytes > MESSAGE_BYTES_MAX:
            self._close(_TOO_BIG, f"a message may have {MESSAGE_BYTES_MAX} bytes")
            self.leave(_TOO_BIG, "")
        elif received.last:
            data = b"".join(self._partial) if len(self._partial) > 1 else received.data
            self._partial.clear()
            self._partial_bytes = 0
            self._add(data, is_text=received.is_text)
        else:
            self._send_credit(1)

    def leave(self, close_code: int, reason: str) -> None:
        """The client is gone; messages received before can still be read."""
        if self._disconnect_message is None:
            self._disconnect_message = {"type": "websocket.disconnect", "code": close_code, "reason": reason}
            self._is_ended = True
            self._changed.set()

    def _add(self, data: bytes, *, is_text: bool) -> None:
        if not is_text:
            self._received.append(({"type": "websocket.receive", "bytes": data}, 1))
        else:
            try:
                text = data.decode()
            except UnicodeDecodeError:
                self._close(1007, "a text message is not UTF-8")
                self.leave(1007, "")
                return
            self._received.append(({"type": "websocket.receive", "text": text}, 1))
        self._changed.set()

    # -- ASGI -----------------------------------------------------------------------------------------------------

    async def receive(self) -> Message:
        """The next message; at the end ``websocket.disconnect``, repeatedly."""
        while not self._received:
            if self._disconnect_message is not None:
                return self._disconnect_message
            self._changed.clear()
            await self._changed.wait()
        message, frames = self._received.popleft()
        if frames:
            self._send_credit(frames)
        return message

    async def send(self, message: Message) -> None:
        """Process a message. Raises `CallerGone` when the client is gone, RuntimeError if ASGI forbids it now."""
        kind = message["type"]
        if kind.startswith("websocket.http.response."):
            await self._deny(message)
        elif self._is_ended:
            if self._disconnect_message is not None or self._exchange.is_dropped:
                raise CallerGone("the client is gone")
            raise RuntimeError(f"{kind} after the close of the WebSocket")
        elif kind == "websocket.accept" and not self._is_accepted:
            self._accept(message)
        elif kind == "websocket.close":
            self._close(message.get("code") or _NORMAL, message.get("reason") or "")
        elif kind == "websocket.send" and self._is_accepted:
            await self._send_message(message)
        else:
            raise RuntimeError(f"{kind} is not allowed now")

    def end(self, *, has_raised: bool) -> IoEvent | None:
        """The outcome after the application has returned; None if it has not answered the handshake."""
        if self._denial is not None:
            return self._denial.outcome()
        if self._is_ended:
            return Ended(self._exchange)
        if not self._is_accepted:
            return None
        self._close(_INTERNAL if has_raised else _NORMAL, "")
        return Ended(self._exchange)

    def _accept(self, message: Message) -> None:
        headers = as_headers(message.get("headers") or ())
        subprotocol: Any = message.get("subprotocol")
        if subprotocol:
            headers.append((b"sec-websocket-protocol", subprotocol.encode("latin-1")))
        self._is_accepted = True
        on_response_started()
        self._io_queue(Opened(self._exchange, STATUS_SWITCHING, headers))

    async def _send_message(self, message: Message) -> None:
        text = message.get("text")
        data: bytes = bytes(message["bytes"]) if text is None else text.encode()
        self._written_bytes += len(data) + MESSAGE_COST_BYTES
        self._io_queue(SocketSent(self._exchange, data, text is not None))
        if is_full(self._exchange, self._written_bytes):
            await wait_writable(self._exchange, self._written_bytes)

    def _close(self, code: int, reason: str) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        if self._is_accepted:
            self._io_queue(Closed(self._exchange, code, reason))
        else:
            self._io_queue(WholeResponseEvent(self._exchange, _FORBIDDEN, [], b""))
        if self._disconnect_message is None:
            self._disconnect_message = {"type": "websocket.disconnect", "code": code, "reason": reason}
            self._changed.set()

    async def _deny(self, message: Message) -> None:
        """Send an HTTP response instead of an accept."""
        if self._is_accepted or (self._is_ended and self._denial is None):
            raise RuntimeError(f"{message['type']} is not allowed now")
        if self._denial is None:
            self._denial = HttpSender(self._exchange, self._io_queue, BodyReader(b""))
            self._is_ended = True
        await self._denial(message)

    def _send_credit(self, frames: int) -> None:
        self._taken_frames += frames
        if self._taken_frames >= _CREDIT_EVERY:
            self._io_queue(Taken(self._exchange, self._taken_frames))
            self._taken_frames = 0
