"""A WebSocket as an ASGI application sees it.

Why credit per message that was taken: an application that reads slowly holds back its client, and nobody's memory
fills. The pieces of one message are put together here, up to a limit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, final

from starlette.types import Message

from serve_common.wires.frames import WINDOW_MESSAGES
from serve_replica_host.replica.answer_frames import STATUS_SWITCHING
from serve_replica_host.replica.answer_stream import is_full, room
from serve_replica_host.replica.asgi_http import CallerGone, HttpSender, as_headers
from serve_replica_host.replica.contexts import answer_begun
from serve_replica_host.replica.exchange import (
    Answered,
    Closed,
    Ended,
    Exchange,
    Heard,
    Opened,
    Said,
    Taken,
    ToBus,
)
from serve_replica_host.replica.incoming import CREDIT_PARTS
from serve_replica_host.replica.outgoing import MESSAGE_COST_BYTES
from serve_replica_host.replica.request_body import BodyReader

MESSAGE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Of one message of a client."""
LEAVE_S: Final = 5.0
"""How long an application may go on after its client has left."""
_CREDIT_EVERY: Final = WINDOW_MESSAGES // CREDIT_PARTS
_NORMAL: Final = 1000
_TOO_BIG: Final = 1009
_INTERNAL: Final = 1011
_FORBIDDEN: Final = 403


@final
class Socket:
    """One WebSocket; all methods run on the user loop. `receive` and `send` are ASGI's."""

    def __init__(self, exchange: Exchange, to_bus: Callable[[ToBus], object]) -> None:
        self._exchange = exchange
        exchange.pieces = deque()  # `room` is told of what leaves only when someone waits for it
        self._to_bus = to_bus
        self._came: deque[tuple[Message, int]] = deque([({"type": "websocket.connect"}, 0)])
        self._goodbye: Message | None = None
        self._changed = asyncio.Event()
        self._partial: list[bytes] = []
        self._partial_bytes = 0
        self._taken_frames = 0
        self._written_bytes = 0
        self._is_accepted = False
        self._is_ended = False
        """Nothing can be said any more."""
        self._denial: HttpSender | None = None

    # -- from the bus side ----------------------------------------------------------------------------------------

    def hear(self, heard: Heard) -> None:
        """A message, or a piece of one, came."""
        if self._goodbye is not None:
            return
        self._partial.append(heard.data)
        self._partial_bytes += len(heard.data)
        if self._partial_bytes > MESSAGE_BYTES_MAX:
            self._close(_TOO_BIG, f"a message may have {MESSAGE_BYTES_MAX} bytes")
            self.leave(_TOO_BIG, "")
        elif heard.last:
            data = b"".join(self._partial) if len(self._partial) > 1 else heard.data
            self._partial.clear()
            self._partial_bytes = 0
            self._add(data, is_text=heard.is_text)
        else:
            self._give_credit(1)

    def leave(self, close_code: int, reason: str) -> None:
        """The client is gone; what it said before can still be read."""
        if self._goodbye is None:
            self._goodbye = {"type": "websocket.disconnect", "code": close_code, "reason": reason}
            self._is_ended = True
            self._changed.set()

    def _add(self, data: bytes, *, is_text: bool) -> None:
        if not is_text:
            self._came.append(({"type": "websocket.receive", "bytes": data}, 1))
        else:
            try:
                text = data.decode()
            except UnicodeDecodeError:
                self._close(1007, "a text message is not UTF-8")
                self.leave(1007, "")
                return
            self._came.append(({"type": "websocket.receive", "text": text}, 1))
        self._changed.set()

    # -- ASGI -----------------------------------------------------------------------------------------------------

    async def receive(self) -> Message:
        """The next message; ``websocket.disconnect`` at the end, however often it is asked for."""
        while not self._came:
            if self._goodbye is not None:
                return self._goodbye
            self._changed.clear()
            await self._changed.wait()
        message, frames = self._came.popleft()
        if frames:
            self._give_credit(frames)
        return message

    async def send(self, message: Message) -> None:
        """Raises `CallerGone` when the client is gone, RuntimeError for what ASGI does not allow now."""
        kind = message["type"]
        if kind.startswith("websocket.http.response."):
            await self._deny(message)
        elif self._is_ended:
            if self._goodbye is not None or self._exchange.is_dropped:
                raise CallerGone("the client is gone")
            raise RuntimeError(f"{kind} after the close of the WebSocket")
        elif kind == "websocket.accept" and not self._is_accepted:
            self._accept(message)
        elif kind == "websocket.close":
            self._close(message.get("code") or _NORMAL, message.get("reason") or "")
        elif kind == "websocket.send" and self._is_accepted:
            await self._say(message)
        else:
            raise RuntimeError(f"{kind} is not allowed now")

    def end(self, *, has_raised: bool) -> ToBus | None:
        """The application has returned; None when it leaves a WebSocket that nobody has answered."""
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
        answer_begun()
        self._to_bus(Opened(self._exchange, STATUS_SWITCHING, headers))

    async def _say(self, message: Message) -> None:
        text = message.get("text")
        data: bytes = bytes(message["bytes"]) if text is None else text.encode()
        self._written_bytes += len(data) + MESSAGE_COST_BYTES
        self._to_bus(Said(self._exchange, data, text is not None))
        if is_full(self._exchange, self._written_bytes):
            await room(self._exchange, self._written_bytes)

    def _close(self, code: int, reason: str) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        if self._is_accepted:
            self._to_bus(Closed(self._exchange, code, reason))
        else:
            self._to_bus(Answered(self._exchange, _FORBIDDEN, [], b""))
        if self._goodbye is None:
            self._goodbye = {"type": "websocket.disconnect", "code": code, "reason": reason}
            self._changed.set()

    async def _deny(self, message: Message) -> None:
        """An answer as of HTTP in place of an accept."""
        if self._is_accepted or (self._is_ended and self._denial is None):
            raise RuntimeError(f"{message['type']} is not allowed now")
        if self._denial is None:
            self._denial = HttpSender(self._exchange, self._to_bus, BodyReader(b""))
            self._is_ended = True
        await self._denial(message)

    def _give_credit(self, frames: int) -> None:
        self._taken_frames += frames
        if self._taken_frames >= _CREDIT_EVERY:
            self._to_bus(Taken(self._exchange, self._taken_frames))
            self._taken_frames = 0
