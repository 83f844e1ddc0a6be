"""A WebSocket between a router and a replica: whole messages here, frames with flow control on the bus.

Why messages are assembled on this side: a client's library writes whole messages, and an incomplete message must not
reach the client.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, final

import msgspec

from serve_common.dispatch.errors import ResponseUnusable
from serve_common.protocol.frames import WINDOW_MESSAGES, CloseHead, CreditHead, Head, MessageHead
from serve_common.protocol.streams import IncomingStream, MessageQueue, OutgoingStream, RetainedBytes

MESSAGE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Largest message, in either direction."""


class SocketMessage(msgspec.Struct, frozen=True, gc=False):
    """A whole message; text is UTF-8."""

    is_text: bool
    data: bytes


class SocketClosed(msgspec.Struct, frozen=True, gc=False):
    """The close of the socket, by either side; codes of RFC 6455."""

    code: int
    reason: str


@final
class ReplicaSocket:
    """The replica's end of a WebSocket. One task may receive while another one sends."""

    __slots__ = (
        "_closed",
        "_failure",
        "_frames",
        "_grant_credit",
        "_messages",
        "_on_end",
        "_receiver",
        "_send_frame",
        "_sender",
        "incoming",
        "outgoing",
    )

    def __init__(
        self,
        send_frame: Callable[[Head, bytes | memoryview], None],
        grant_credit: Callable[[CreditHead], None],
        on_end: Callable[[], None],
        retained: RetainedBytes,
    ) -> None:
        """``send_frame`` sends a frame to the replica, and raises a `ServeError` when the bus does not take it.

        ``grant_credit`` sends a credit to the replica. ``on_end`` is called when the client has closed the socket;
        nothing more is sent in either direction. ``retained`` is what the sockets of this process hold together.
        """
        self.incoming: Final = IncomingStream(WINDOW_MESSAGES, first=1)
        self._messages: Final = MessageQueue(retained)
        self.outgoing: Final = OutgoingStream(self._messages, WINDOW_MESSAGES, first=1)
        self._send_frame = send_frame
        self._grant_credit = grant_credit
        self._on_end = on_end
        self._frames: deque[tuple[MessageHead, bytes | memoryview]] = deque()
        self._closed: SocketClosed | None = None
        self._failure: Exception | None = None
        self._receiver: asyncio.Future[None] | None = None
        self._sender: asyncio.Future[None] | None = None

    # -- for the client's side --

    async def receive(self) -> SocketMessage | SocketClosed:
        """The replica's next message, or how the socket was closed, by either side.

        Raises the `ServeError` that ended it otherwise, after the messages that came before.
        """
        pieces: list[bytes | memoryview] = []
        size = 0
        while True:
            while not self._frames:
                if self._failure is not None:
                    raise self._failure
                if self._closed is not None:
                    return self._closed
                self._receiver = asyncio.get_running_loop().create_future()
                try:
                    await self._receiver
                finally:
                    self._receiver = None
            head, piece = self._frames.popleft()
            self._took_one()
            size += len(piece)
            if size > MESSAGE_BYTES_MAX:
                raise ResponseUnusable(f"a message has more than {MESSAGE_BYTES_MAX} bytes")
            pieces.append(piece)
            if head.last:
                return SocketMessage(head.is_text, b"".join(pieces))

    async def send(self, data: bytes, *, is_text: bool) -> bool:
        """Send a message as the credit allows; False when the socket has ended before it was completely sent.

        Raises a `ServeError` when the bus does not take it; the socket has then ended.
        """
        if self._is_ended:
            return False
        end = self._messages.add(data, is_text=is_text)
        self._pump()
        while not self._is_ended and self.outgoing.sent < end:
            self._sender = asyncio.get_running_loop().create_future()
            try:
                await self._sender
            finally:
                self._sender = None
        return self.outgoing.sent >= end

    def close(self, code: int, reason: str) -> None:
        """Notify the replica that the client has closed; does nothing when the socket has ended."""
        if not self._is_ended:
            self._end(closed=SocketClosed(code, reason))
            self._send_frame(CloseHead(code, reason, self.outgoing.sent), b"")
            self._on_end()

    @property
    def _is_ended(self) -> bool:
        return self._closed is not None or self._failure is not None

    def _took_one(self) -> None:
        if self.incoming.process(1) and not self._is_ended:
            self._grant_credit(self.incoming.credit())

    def _pump(self) -> None:
        """Send what the credit allows."""
        while not self._is_ended and (frame := self.outgoing.next_frame()) is not None:
            self._send_frame(*frame)

    def release(self) -> None:
        """The call has ended: nothing is sent again."""
        self._messages.close()

    def _end(self, *, closed: SocketClosed | None = None, failure: Exception | None = None) -> None:
        self._closed, self._failure = closed, failure
        self._wake()

    # -- for the bus' side --

    def add(self, head: MessageHead, piece: bytes | memoryview) -> None:
        """Append the next frame."""
        self._frames.append((head, piece))
        self._wake()

    def allow(self, frames: int, limit: int) -> None:
        """The replica accepts more frames, as `OutgoingStream.allow` has it; or `OutgoingStream.resume` was called."""
        self.outgoing.allow(frames, limit)
        self._pump()
        self._wake()

    def closed(self, code: int, reason: str) -> None:
        """The replica has closed."""
        if not self._is_ended:
            self._end(closed=SocketClosed(code, reason))

    def fail(self, failure: Exception) -> None:
        """End the socket with an error."""
        if not self._is_ended:
            self._end(failure=failure)

    def _wake(self) -> None:
        for waiter in (self._receiver, self._sender):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
