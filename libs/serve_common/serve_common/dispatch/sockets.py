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
from serve_common.protocol.frames import WINDOW_MESSAGES, CloseHead, Head, MessageHead, split_body

MESSAGE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Largest message, in either direction."""
UNREAD_MESSAGES_MAX: Final = WINDOW_MESSAGES + 1
"""Limit of unread frames; a replica that sends more violates the window."""


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
        "_credit",
        "_credit_owed",
        "_failure",
        "_frames",
        "_grant_credit",
        "_on_end",
        "_receiver",
        "_send_frame",
        "_sender",
        "_sequence",
        "next_sequence",
    )

    def __init__(
        self,
        send_frame: Callable[[Head, bytes | memoryview], None],
        grant_credit: Callable[[int], None],
        on_end: Callable[[], None],
    ) -> None:
        """``send_frame`` sends a frame to the replica, and raises a `ServeError` when the bus does not take it.

        ``grant_credit`` allows the replica so many more frames. ``on_end`` is called when the client has closed the
        socket; nothing more is sent in either direction.
        """
        self.next_sequence = 1
        """Sequence number of the frame that must come next."""
        self._send_frame = send_frame
        self._grant_credit = grant_credit
        self._on_end = on_end
        self._frames: deque[tuple[MessageHead, memoryview]] = deque()
        self._credit_owed = 0
        self._credit = WINDOW_MESSAGES
        self._sequence = 0
        self._closed: SocketClosed | None = None
        self._failure: Exception | None = None
        self._receiver: asyncio.Future[None] | None = None
        self._sender: asyncio.Future[None] | None = None

    # -- for the client's side --

    async def receive(self) -> SocketMessage | SocketClosed:
        """The replica's next message, or how the socket was closed, by either side.

        Raises the `ServeError` that ended it otherwise, after the messages that came before.
        """
        pieces: list[memoryview] = []
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
        pieces = split_body(data)
        for piece in pieces:
            while self._credit <= 0 and not self._is_ended:
                self._sender = asyncio.get_running_loop().create_future()
                try:
                    await self._sender
                finally:
                    self._sender = None
            if self._is_ended:
                return False
            self._credit -= 1
            self._sequence += 1
            self._send_frame(MessageHead(self._sequence, is_text, piece is pieces[-1]), piece)
        return True

    def close(self, code: int, reason: str) -> None:
        """Notify the replica that the client has closed; does nothing when the socket has ended."""
        if not self._is_ended:
            self._closed = SocketClosed(code, reason)
            self._wake()
            self._send_frame(CloseHead(code, reason), b"")
            self._on_end()

    @property
    def _is_ended(self) -> bool:
        return self._closed is not None or self._failure is not None

    def _took_one(self) -> None:
        self._credit_owed += 1
        if self._credit_owed * 2 >= WINDOW_MESSAGES and not self._is_ended:
            owed, self._credit_owed = self._credit_owed, 0
            self._grant_credit(owed)

    # -- for the bus' side --

    @property
    def unread_frames(self) -> int:
        """Number of frames that wait to be received."""
        return len(self._frames)

    def add(self, head: MessageHead, piece: memoryview) -> None:
        """Append a frame, in sequence."""
        self.next_sequence += 1
        self._frames.append((head, piece))
        self._wake()

    def allow(self, frames: int) -> None:
        """The replica accepts ``frames`` more frames."""
        self._credit = min(self._credit + max(frames, 0), WINDOW_MESSAGES)
        self._wake()

    def closed(self, code: int, reason: str) -> None:
        """The replica has closed."""
        if not self._is_ended:
            self._closed = SocketClosed(code, reason)
            self._wake()

    def fail(self, failure: Exception) -> None:
        """End the socket with an error."""
        if not self._is_ended:
            self._failure = failure
            self._wake()

    def _wake(self) -> None:
        for waiter in (self._receiver, self._sender):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
