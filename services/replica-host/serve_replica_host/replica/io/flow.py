"""Flow control of one request's frames in both directions: counted, and bounded by credit.

Sequences and windows are checked in these classes only, for bodies and for WebSocket messages alike, and can be tested
without a bus.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Final, final

from starlette.types import Message

from serve_common.protocol.frames import (
    FRAME_BODY_BYTES_MAX,
    UNKNOWN_BYTES,
    WINDOW_FRAMES,
    WINDOW_MESSAGES,
    CloseHead,
    MessageHead,
)

CREDIT_PARTS: Final = 4
"""Parts of the window: credit is granted for one part at once, which takes few messages and never stalls the router."""
_FRAMES_OVER_MAX: Final = 1
"""Tolerance for routers that do not count the request's first frame."""


class SequenceCheck(Enum):
    """How a frame's sequence number relates to the expected one."""

    NEXT = "next"
    DOUBLED = "doubled"
    LOST = "lost"
    """A frame before it was lost, such as when a NATS server fails."""
    TOO_MANY = "too many"
    """The router exceeds its credit."""


@final
class IncomingFrames:
    """Flow control of the incoming frames of one body, or of one WebSocket's messages."""

    __slots__ = (
        "_next_sequence",
        "_ungranted_frames",
        "_unprocessed_frames",
        "_window",
        "expected_bytes",
        "pieces",
        "received_bytes",
    )

    def __init__(self, expected_bytes: int, window: int) -> None:
        """``expected_bytes`` may be `UNKNOWN_BYTES`; ``window`` is how many frames may arrive without credit."""
        self.expected_bytes = expected_bytes
        self.received_bytes = 0
        self.pieces: list[bytes] = []
        """Parts received of a body that is collected."""
        self._window = window
        self._unprocessed_frames = 0
        self._ungranted_frames = 0
        self._next_sequence = 1

    def first(self) -> None:
        """Count the part of the body that arrived with the request's head."""
        self._unprocessed_frames += 1

    @property
    def taken_frames(self) -> int:
        """Frames received, except the request's first one."""
        return self._next_sequence - 1

    def take(self, sequence: int) -> SequenceCheck:
        """Check the sequence number of a received frame, and count the frame."""
        if sequence != self._next_sequence:
            return SequenceCheck.DOUBLED if sequence < self._next_sequence else SequenceCheck.LOST
        if self._unprocessed_frames > self._window + _FRAMES_OVER_MAX:
            return SequenceCheck.TOO_MANY
        self._next_sequence += 1
        self._unprocessed_frames += 1
        return SequenceCheck.NEXT

    def release(self, frames: int) -> int:
        """Mark ``frames`` as processed; returns the credit to grant now, 0 until a part of the window is free."""
        self._unprocessed_frames -= frames
        self._ungranted_frames += frames
        if self._ungranted_frames < self._window // CREDIT_PARTS:
            return 0
        granted, self._ungranted_frames = self._ungranted_frames, 0
        return granted

    def add(self, size_bytes: int) -> None:
        """Count received bytes of a body."""
        self.received_bytes += size_bytes

    def is_whole(self, *, last: bool) -> bool | None:
        """True when a body is complete, False when not; None when its size is not the announced one."""
        if self.expected_bytes == UNKNOWN_BYTES:
            return last
        missing_bytes = self.expected_bytes - self.received_bytes
        if missing_bytes == 0:
            return True
        return None if missing_bytes < 0 or last else False


CREDIT_MAX: Final = 1_000_000
"""Maximum credit in frames; more than any router grants."""
MESSAGE_COST_BYTES: Final = 64
"""Bytes counted for each WebSocket message besides its data: empty ones need memory too."""


@final
class OutgoingBody:
    """The unsent part of one response; its first part is sent with the head."""

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
        """True while a frame may be sent."""
        return self._credit > 0

    def add(self, data: bytes | memoryview, *, last: bool) -> None:
        """Append to the body; nothing may be added after ``last``."""
        assert not self._is_ended, "the body has ended"
        self._is_ended = last
        if data:
            self._pieces.append(data)
            self._unsent_bytes += len(data)

    def allow(self, frames: int) -> None:
        """Add credit for ``frames`` frames."""
        self._credit = min(self._credit + max(frames, 0), CREDIT_MAX)

    def first_body(self) -> bytes:
        """Take the part to be sent with the response's head."""
        return bytes(self._take()) if self._pieces else b""

    def next_frame(self) -> tuple[int, bool, bytes | memoryview] | None:
        """Sequence, whether it is the last one, and the data of the next frame; None if none may be sent now.

        Queued small parts are joined.
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
    """The unsent messages of a WebSocket, and its close frame."""

    __slots__ = ("_close", "_credit", "_messages", "_offset", "_sequence")

    def __init__(self) -> None:
        self._messages: deque[tuple[bytes, bool]] = deque()
        self._offset = 0
        self._credit = WINDOW_MESSAGES
        self._sequence = 1
        self._close: CloseHead | None = None

    @property
    def has_credit(self) -> bool:
        """True while a frame may be sent."""
        return self._credit > 0

    @property
    def sent_frames(self) -> int:
        """Frames sent so far."""
        return self._sequence - 1

    @property
    def has_unsent(self) -> bool:
        """True while messages wait for credit."""
        return bool(self._messages)

    def add(self, data: bytes, *, is_text: bool) -> None:
        """Append a whole message; nothing may be added after `close`."""
        assert self._close is None, "the socket is closed"
        self._messages.append((data, is_text))

    def close(self, code: int, reason: str) -> None:
        """Close the socket after the queued messages."""
        self._close = CloseHead(code, reason)

    def allow(self, frames: int) -> None:
        """Add credit for ``frames`` frames."""
        self._credit = min(self._credit + max(frames, 0), CREDIT_MAX)

    def next_frame(self) -> tuple[MessageHead | CloseHead, bytes | memoryview] | None:
        """The next frame's head and body; None if none may be sent now. A `CloseHead` is the last."""
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


_ACKNOWLEDGE_EVERY: Final = max(WINDOW_FRAMES // CREDIT_PARTS, 1)
"""Parts read before they are acknowledged: credit is granted for that many at once."""


@final
class BodyReader:
    """ASGI's ``receive`` for one request; all methods run on the user loop.

    Why credit is granted when a part is read and not when it arrives: a slow reader then slows down the client, and an
    upload of any size needs no more memory than the window.
    """

    __slots__ = ("_changed", "_is_gone", "_is_whole", "_on_taken", "_pieces", "_taken")

    def __init__(self, whole: bytes | None, on_taken: Callable[[int], object] | None = None) -> None:
        """``whole`` is None for a body still arriving; ``on_taken`` receives how many parts were read."""
        self._pieces: deque[bytes] = deque()
        self._is_whole = whole is not None
        if whole is not None:
            self._pieces.append(whole)
        self._on_taken = on_taken
        self._taken = 0
        self._is_gone = False
        self._changed: asyncio.Event | None = None

    def add(self, data: bytes, *, last: bool) -> None:
        """Append a part of the body."""
        if data or last:
            self._pieces.append(data)
        self._is_whole = last
        self._wake()

    def leave(self) -> None:
        """The caller is gone, or has its complete response."""
        self._is_gone = True
        self._wake()

    async def __call__(self) -> Message:
        """The next part of the body; after the last one, and when the caller is gone, ``http.disconnect``."""
        while not self._is_gone:
            if self._pieces:
                data = self._pieces.popleft()
                more = bool(self._pieces) or not self._is_whole
                self._taken += 1
                if self._on_taken is not None and self._taken >= _ACKNOWLEDGE_EVERY:
                    self._on_taken(self._taken)
                    self._taken = 0
                return {"type": "http.request", "body": data, "more_body": more}
            if self._changed is None:
                self._changed = asyncio.Event()
            self._changed.clear()
            await self._changed.wait()
        return {"type": "http.disconnect"}

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
