"""What is on its way out: cut into frames, never more of them ahead than the router allows.

Why classes of their own: the windows are counted here and nowhere else, and they can be tested without a bus.
"""

from __future__ import annotations

from collections import deque
from typing import Final, final

from serve_common.wires.frames import (
    FRAME_BODY_BYTES_MAX,
    WINDOW_FRAMES,
    WINDOW_MESSAGES,
    CloseHead,
    MessageHead,
)

CREDIT_MAX: Final = 1_000_000
"""Of frames at once; more than any router can mean."""
MESSAGE_COST_BYTES: Final = 64
"""Counted for each WebSocket message beside its data: empty ones need memory too."""


@final
class OutgoingBody:
    """What is still to be sent of one answer; its first piece travelled with the head."""

    __slots__ = ("_credit", "_is_ended", "_is_sent", "_pieces", "_sequence", "_unsent_bytes")

    def __init__(self) -> None:
        self._pieces: deque[bytes | memoryview] = deque()
        self._unsent_bytes = 0
        self._credit = WINDOW_FRAMES - 1  # the head's frame is one of them
        self._sequence = 1
        self._is_ended = False
        self._is_sent = False

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait for credit."""
        return self._unsent_bytes

    @property
    def has_credit(self) -> bool:
        """True while a frame may leave."""
        return self._credit > 0

    def add(self, data: bytes | memoryview, *, last: bool) -> None:
        """Append to the body; nothing may be added after ``last``."""
        assert not self._is_ended, "the body has ended"
        self._is_ended = last
        if data:
            self._pieces.append(data)
            self._unsent_bytes += len(data)

    def allow(self, frames: int) -> None:
        """The router takes so many frames more."""
        self._credit = min(self._credit + max(frames, 0), CREDIT_MAX)

    def first_body(self) -> bytes:
        """What goes with the head of the answer."""
        return bytes(self._take()) if self._pieces else b""

    def next_frame(self) -> tuple[int, bool, bytes | memoryview] | None:
        """Sequence, whether it is the last one, and the piece that may be sent now; None to wait.

        Small pieces that had to wait leave together.
        """
        if self._is_sent or self._credit <= 0 or (not self._pieces and not self._is_ended):
            return None
        body: bytes | memoryview = self._take() if self._pieces else b""
        self._credit -= 1
        sequence, self._sequence = self._sequence, self._sequence + 1
        self._is_sent = self._is_ended and not self._pieces
        return sequence, self._is_sent, body

    def _take(self) -> bytes | memoryview:
        pieces = self._pieces
        if len(pieces) == 1 and self._unsent_bytes <= FRAME_BODY_BYTES_MAX:
            self._unsent_bytes = 0
            return pieces.popleft()
        taken: list[bytes | memoryview] = []
        space = FRAME_BODY_BYTES_MAX
        while pieces and space > 0:
            piece = pieces.popleft()
            if len(piece) > space:
                view = memoryview(piece)
                pieces.appendleft(view[space:])
                piece = view[:space]
            taken.append(piece)
            space -= len(piece)
        body = taken[0] if len(taken) == 1 else b"".join(taken)  # the frame copies it anyway
        self._unsent_bytes -= len(body)
        return body


@final
class OutgoingMessages:
    """What is still to be sent of a WebSocket's messages, and its close at the end."""

    __slots__ = ("_close", "_credit", "_messages", "_offset", "_sequence")

    def __init__(self) -> None:
        self._messages: deque[tuple[bytes, bool]] = deque()
        self._offset = 0
        self._credit = WINDOW_MESSAGES
        self._sequence = 1
        self._close: CloseHead | None = None

    @property
    def has_credit(self) -> bool:
        """True while a frame may leave."""
        return self._credit > 0

    @property
    def sent_frames(self) -> int:
        """Frames that have left."""
        return self._sequence - 1

    @property
    def has_unsent(self) -> bool:
        """True while something waits for credit."""
        return bool(self._messages)

    def add(self, data: bytes, *, is_text: bool) -> None:
        """Append a whole message; nothing may be added after `close`."""
        assert self._close is None, "the socket is closed"
        self._messages.append((data, is_text))

    def close(self, code: int, reason: str) -> None:
        """End it, after the messages that wait."""
        self._close = CloseHead(code, reason)

    def allow(self, frames: int) -> None:
        """The router takes so many frames more."""
        self._credit = min(self._credit + max(frames, 0), CREDIT_MAX)

    def next_frame(self) -> tuple[MessageHead | CloseHead, bytes | memoryview] | None:
        """A head and its body that may be sent now; None to wait. A `CloseHead` is the last."""
        if not self._messages:
            return None if self._close is None else (self._close, b"")
        if self._credit <= 0:
            return None
        data, is_text = self._messages[0]
        body: bytes | memoryview = data
        last = len(data) - self._offset <= FRAME_BODY_BYTES_MAX
        if self._offset or not last:
            body = memoryview(data)[self._offset : self._offset + FRAME_BODY_BYTES_MAX]
        if last:
            self._messages.popleft()
            self._offset = 0
        else:
            self._offset += FRAME_BODY_BYTES_MAX
        self._credit -= 1
        sequence, self._sequence = self._sequence, self._sequence + 1
        return MessageHead(sequence, is_text, last), body
