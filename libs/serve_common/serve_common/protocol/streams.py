"""The frames of one request in one direction: one object for the end that sends, one for the end that receives.

Both ends of the data plane use them, in both directions, for bodies and for WebSocket messages. They do no I/O: who
sends gets frames from them, who receives asks them what a frame is.

The protocol. Frames are numbered from 0, which is the frame that opens the request or the response; a WebSocket's first
message is number 1. A receiver allows a window of frames beyond those that it has processed, and says so by the
*number* up to which frames may come (`CreditHead.limit`): a credit that is lost, doubled or late does no harm. A sender
holds a frame until it was processed. Each end may ask the other for what it lacks, by the number of the next frame that
it needs (`ProbeHead.received`, `AliveHead.received`), and the other goes on from there (go-back-N); frames that come
twice are dropped. So a connection that is cut loses nothing, whichever way the frames take afterwards, and no state is
needed for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sized
from enum import Enum
from typing import Final, Generic, Protocol, TypeVar, final

from serve_common.protocol.frames import (
    FRAME_BODY_BYTES_MAX,
    MESSAGE_PART_BYTES_MAX,
    BodyHead,
    CloseHead,
    CreditHead,
    MessageHead,
    split_body,
)

CREDIT_PARTS: Final = 4
"""Parts of a window. Credit is granted for one part at once: the window never runs dry, and few messages are needed."""
LARGE_FRAME_BYTES: Final = FRAME_BODY_BYTES_MAX // 2
"""Frames above this size take two places of a window: it bounds memory, and many small frames need few credits."""
CREDIT_MAX: Final = 1_000_000
"""Most frames that a sender lets itself be allowed beyond those it has sent."""
FRAMES_OVER_MAX: Final = 1
"""Tolerance for a sender that does not count its first frame."""
ON_BUS_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes of responses that a replica has on the bus for one router: they hide a round trip, and those of a dozen
replicas stay below the 64 MiB at which nats-server cuts off a router that reads too slowly."""
RECEIVED_EVERY_BYTES: Final = ON_BUS_BYTES_MAX // 4
"""Bytes after which a router says what it has received."""
RECEIVED_WITHIN_S: Final = 1.0
"""Seconds of a router's silence after which what is on the bus counts as lost, as by a cut connection."""
RETAINED_BYTES_MAX: Final = 32 * 1024 * 1024
"""Most bytes that the streams of one process hold together for sending again; what exceeds it is sent once only."""

Bytes = bytes | memoryview
BodyT_co = TypeVar("BodyT_co", bound=Sized, covariant=True)
"""What the bodies of a stream's frames are: bytes, or something with a length that stands for them."""


class SequenceCheck(Enum):
    """How a frame's number relates to the expected one."""

    NEXT = "next"
    DOUBLED = "doubled"
    LOST = "lost"
    """A frame before it was lost, such as when a connection is cut."""
    TOO_MANY = "too many"
    """The sender exceeds its credit."""


@final
class IncomingStream:
    """The receiver of a direction: checks the order, and grants credit as frames are processed."""

    __slots__ = ("_gap_at", "_granted", "_processed", "_window", "next_sequence")

    def __init__(self, window: int, *, first: int = 0) -> None:
        """``window`` is how many frames may wait to be processed; ``first`` is the number of the first one that counts:
        0 for a body, whose first frame came with the head, 1 for messages.
        """
        self.next_sequence = 1
        """Number of the frame that must come next."""
        self._window = window
        self._processed = first
        """Frames before this number are processed."""
        self._granted = first
        """`_processed` when credit was last granted."""
        self._gap_at = 0

    @property
    def limit(self) -> int:
        """The number before which frames may come."""
        return self._processed + self._window

    def take(self, sequence: int) -> SequenceCheck:
        """Check the number of a received frame, and count the frame when it is the next one."""
        if sequence != self.next_sequence:
            return SequenceCheck.DOUBLED if sequence < self.next_sequence else SequenceCheck.LOST
        if sequence >= self.limit + FRAMES_OVER_MAX:
            return SequenceCheck.TOO_MANY
        self.next_sequence += 1
        return SequenceCheck.NEXT

    def is_new_gap(self) -> bool:
        """True once for each frame that is missing: then the sender must be told."""
        is_new = self._gap_at != self.next_sequence
        self._gap_at = self.next_sequence
        return is_new

    def process(self, frames: int) -> bool:
        """Count ``frames`` as processed; True when credit is due."""
        self._processed += frames
        return self._processed - self._granted >= max(self._window // CREDIT_PARTS, 1)

    def credit(self) -> CreditHead:
        """Grant what is due."""
        frames, self._granted = self._processed - self._granted, self._processed
        return CreditHead(frames, self.limit, self.limit)

    def acknowledge(self, end: int = 0) -> CreditHead:
        """Everything was received, and nothing more will come: the sender need not hold anything.

        ``end`` is the number of frames in all where the last one is a close, which is not taken like the others.
        """
        self._processed = max(self.next_sequence, end)
        return self.credit()


FrameHead = BodyHead | MessageHead | CloseHead
StreamFrame = tuple[FrameHead, Bytes]
"""A frame's head and body."""


class FrameSource(Protocol[BodyT_co]):
    """What a stream is made of; it holds frames until they are released."""

    @property
    def first(self) -> int:
        """Number of the first frame that is held."""

    def frame(self, at: int, *, may_cut: bool) -> tuple[FrameHead, BodyT_co] | None:
        """Frame number ``at``, which is held or the next one; None when it is not there yet.

        Without ``may_cut`` only what needs no credit is returned.
        """

    def release(self, up_to: int) -> None:
        """The receiver has processed all frames before number ``up_to``."""


@final
class OutgoingStream(Generic[BodyT_co]):
    """The sender of a direction: sends as far as the credit allows, and again from where it is told to."""

    __slots__ = ("_end", "_first", "_is_paused", "_limit", "_spared", "_window", "sent", "source")

    def __init__(self, source: FrameSource[BodyT_co], window: int, *, first: int = 0) -> None:
        """``window`` and ``first`` are those of the receiver's `IncomingStream`."""
        self.source: Final = source
        self.sent = 1
        """Number of the frame that is sent next."""
        self._window = window
        self._first = first
        self._limit = first + window
        self._spared = 0
        """Frames that are allowed and not sent: half of the window while they are large."""
        self._end: int | None = None
        """Number of frames in all, once the last one was sent."""
        self._is_paused = False

    @property
    def is_ended(self) -> bool:
        """True when the last frame was sent, if only once."""
        return self._end is not None

    @property
    def is_paused(self) -> bool:
        """True between `pause` and `resume`."""
        return self._is_paused

    @property
    def is_sent(self) -> bool:
        """True when the last frame was sent, and nothing is to be sent again."""
        return self._end is not None and self.sent >= self._end

    @property
    def is_acknowledged(self) -> bool:
        """True when the receiver has said that it has everything."""
        return self._end is not None and self._limit - self._window >= self._end

    @property
    def is_at_window(self) -> bool:
        """True between two halves of a body's windows, where credit for all that was sent comes by itself."""
        return self._first == 0 and self.sent % (self._window // 2) == 0

    @property
    def is_processed(self) -> bool:
        """True when the receiver has processed all that was sent: nothing is on its way."""
        return self._limit - self._window >= self.sent

    @property
    def has_credit(self) -> bool:
        """True while a frame may be sent."""
        return self.sent < self._limit - self._spared and not self._is_paused

    def opening(self) -> BodyT_co | bytes:
        """The data of frame 0 of a body, which goes with the head. Called again when the head is sent again."""
        frame = self.source.frame(0, may_cut=True)
        if frame is None:
            return b""
        self._note_end(0, frame[0])
        return frame[1]

    def next_frame(self) -> tuple[FrameHead, BodyT_co] | None:
        """The next frame; None when none may be sent now."""
        at = self.sent
        if self._is_paused or (self._end is not None and at >= self._end):
            return None
        frame = self.source.frame(at, may_cut=at < self._limit - self._spared)
        if frame is None:
            return None
        self.sent = at + 1
        self._spared = self._window // 2 if len(frame[1]) > LARGE_FRAME_BYTES else 0
        self._note_end(at, frame[0])
        return frame

    def allow(self, frames: int, limit: int = 0) -> None:
        """Take a credit: frames before number ``limit`` may be sent, or ``frames`` more where it is 0."""
        limit = limit or self._limit + max(frames, 0)
        if limit > self._limit:
            self._limit = min(limit, self.sent + CREDIT_MAX)
            self.source.release(min(self._limit - self._window, self.sent))

    def pause(self) -> None:
        """Send nothing until `resume`: there is no receiver now."""
        self._is_paused = True

    def resume(self, received: int) -> bool:
        """Go on with frame number ``received``, which the receiver needs next. False when it is not held any more.

        Never goes forward.
        """
        self._is_paused = False
        at = max(received, 1)
        if at >= self.sent and received > 0:
            return True
        if max(received, self._first) < self.source.first:
            return False
        self.sent = at
        return True

    def _note_end(self, at: int, head: FrameHead) -> None:
        if type(head) is CloseHead or (type(head) is BodyHead and head.last):
            self._end = at + 1


@final
class WholeBody:
    """A body that is in memory as a whole; its frames are views of it."""

    __slots__ = ("_view", "first")

    def __init__(self, body: bytes) -> None:
        self._view = memoryview(body)
        self.first: Final = 0

    def frame(self, at: int, *, may_cut: bool) -> StreamFrame | None:
        """As of `FrameSource`."""
        start = at * FRAME_BODY_BYTES_MAX
        end = start + FRAME_BODY_BYTES_MAX
        return (BodyHead(at, end >= len(self._view)), self._view[start:end]) if may_cut else None

    def release(self, up_to: int) -> None:
        """Nothing is held beside the body itself."""


@final
class RetainedBytes:
    """What the streams of one process hold together for sending again."""

    __slots__ = ("bytes_max", "retained_bytes")

    def __init__(self, bytes_max: int = RETAINED_BYTES_MAX) -> None:
        self.bytes_max: Final = bytes_max
        self.retained_bytes = 0

    @property
    def is_full(self) -> bool:
        """True when more is held than should be."""
        return self.retained_bytes > self.bytes_max


class _Retained:
    """Frames that were cut, until they are released; while too much is held, only those that were not sent."""

    __slots__ = ("_budget", "_frames", "first")

    def __init__(self, budget: RetainedBytes, first: int) -> None:
        self.first = first
        """Number of the first frame that is held."""
        self._budget = budget
        self._frames: deque[StreamFrame] = deque()

    def _hold(self, frame: StreamFrame) -> None:
        self._frames.append(frame)
        self._budget.retained_bytes += len(frame[1])

    def release(self, up_to: int) -> None:
        """The receiver has processed all frames before number ``up_to``."""
        while self.first < up_to and self._frames:
            self._budget.retained_bytes -= len(self._frames.popleft()[1])
            self.first += 1

    def close(self) -> None:
        """Release everything; nothing can be sent again."""
        self.release(self.first + len(self._frames))


@final
class BodyPieces(_Retained):
    """A body that is written piece by piece. Small pieces that wait for credit are joined to one frame."""

    __slots__ = ("_is_ended", "_unsent", "_unsent_bytes")

    def __init__(self, budget: RetainedBytes) -> None:
        super().__init__(budget, 0)
        self._unsent: deque[Bytes] = deque()
        self._unsent_bytes = 0
        self._is_ended = False

    @property
    def unsent_bytes(self) -> int:
        """Bytes that were not cut into frames yet."""
        return self._unsent_bytes

    def add(self, data: Bytes, *, last: bool) -> None:
        """Append to the body; nothing may be added after ``last``."""
        assert not self._is_ended, "the body has ended"
        self._is_ended = last
        if data:
            self._unsent.append(data)
            self._unsent_bytes += len(data)

    def frame(self, at: int, *, may_cut: bool) -> StreamFrame | None:
        """As of `FrameSource`."""
        if not may_cut:
            return None
        offset = at - self.first
        if offset < len(self._frames):
            return self._frames[offset]
        if at and not self._unsent and not self._is_ended:
            return None
        if self._budget.is_full:
            self.close()
        body = self._cut() if self._unsent else b""
        frame = BodyHead(at, at > 0 and self._is_ended and not self._unsent), body
        self._hold(frame)
        return frame

    def _cut(self) -> Bytes:
        pieces = self._unsent
        if len(pieces) == 1 and self._unsent_bytes <= FRAME_BODY_BYTES_MAX:
            self._unsent_bytes = 0
            return pieces.popleft()
        taken: list[Bytes] = []
        space = FRAME_BODY_BYTES_MAX
        while pieces and space > 0:
            piece = pieces.popleft()
            if len(piece) > space:
                view = memoryview(piece)
                pieces.appendleft(view[space:])
                piece = view[:space]
            taken.append(piece)
            space -= len(piece)
        body = taken[0] if len(taken) == 1 else b"".join(taken)
        self._unsent_bytes -= len(body)
        return body


@final
class MessageQueue(_Retained):
    """The messages of a WebSocket in one direction, and its close, which needs no credit."""

    __slots__ = ("_close",)

    def __init__(self, budget: RetainedBytes) -> None:
        super().__init__(budget, 1)
        self._close: tuple[int, str] | None = None

    def has_from(self, at: int) -> bool:
        """True when there are messages from frame number ``at`` on."""
        return at < self.first + len(self._frames)

    def add(self, data: bytes, *, is_text: bool) -> int:
        """Append a whole message, and return the number after its last frame. Nothing may be added after a close."""
        assert self._close is None, "the socket is closed"
        at, pieces = self.first + len(self._frames), split_body(data, MESSAGE_PART_BYTES_MAX)
        for number, piece in enumerate(pieces, 1):
            self._hold((MessageHead(at, is_text, number == len(pieces)), piece))
            at += 1
        return at

    def close_socket(self, code: int, reason: str) -> None:
        """Close the socket after the messages."""
        self._close = code, reason

    def frame(self, at: int, *, may_cut: bool) -> StreamFrame | None:
        """As of `FrameSource`."""
        offset = at - self.first
        if offset < len(self._frames):
            if not may_cut:
                return None
            if self._budget.is_full:
                self.release(at)
            return self._frames[at - self.first]
        return None if self._close is None else (CloseHead(*self._close, sequence=at), b"")


@final
class ReceivedBytes:
    """What a router has received from one replica over the bus."""

    __slots__ = ("_reported", "total_bytes")

    def __init__(self) -> None:
        self.total_bytes = 0
        self._reported = 0

    def add(self, size_bytes: int) -> bool:
        """Count a frame; True when the replica is to be told the total."""
        self.total_bytes += size_bytes
        if self.total_bytes - self._reported < RECEIVED_EVERY_BYTES:
            return False
        self._reported = self.total_bytes
        return True


@final
class OnBusBytes:
    """What a replica has sent to one router over the bus, and the router has not said that it has. Times in seconds."""

    __slots__ = ("_received", "_reported_at", "_sent")

    def __init__(self) -> None:
        self._sent = 0
        self._received = 0
        self._reported_at = 0.0
        """When the router last reported, or the first byte was sent since it had everything."""

    def add(self, size_bytes: int, now: float) -> None:
        """Count a frame."""
        if self._sent == self._received:
            self._reported_at = now
        self._sent += size_bytes

    def take(self, total_bytes: int, now: float) -> None:
        """The router has received ``total_bytes`` in all, of this replica; it may have begun to count anew."""
        self._reported_at = now
        if total_bytes < self._received:
            self._sent = total_bytes
        self._received = total_bytes
        self._sent = max(self._sent, total_bytes)

    def is_full(self, now: float) -> bool:
        """True while streams must wait."""
        if self._sent - self._received < ON_BUS_BYTES_MAX:
            return False
        if now - self._reported_at < RECEIVED_WITHIN_S:
            return True
        self._received = self._sent
        return False
