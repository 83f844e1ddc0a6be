"""What comes for a request after its first frame: counted, so that nothing is lost, doubled or too much.

Why its own class: sequence and window are checked here and nowhere else, for bodies and for WebSocket messages alike.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, final

from serve_common.wires.frames import UNKNOWN_BYTES

CREDIT_PARTS: Final = 4
"""Credit is given for a quarter of the window at once: enough to keep the router going, in fewer messages."""
_FRAMES_OVER_MAX: Final = 1
"""A router that does not count the request's first frame is one ahead."""


class Order(Enum):
    """What a frame's sequence says."""

    NEXT = "next"
    DOUBLED = "doubled"
    LOST = "lost"
    """A frame before it did not come, as may happen when a NATS server goes away."""
    TOO_MANY = "too many"
    """The router sends more than it was allowed to."""


@final
class IncomingFrames:
    """The frames of one body, or of one WebSocket's messages."""

    __slots__ = (
        "_held_frames",
        "_next_sequence",
        "_owed_frames",
        "_window",
        "expected_bytes",
        "pieces",
        "received_bytes",
    )

    def __init__(self, expected_bytes: int, window: int) -> None:
        """``expected_bytes`` may be `UNKNOWN_BYTES`; ``window`` is how many frames may come without credit."""
        self.expected_bytes = expected_bytes
        self.received_bytes = 0
        self.pieces: list[bytes] = []
        """Of a body that is wanted whole."""
        self._window = window
        self._held_frames = 0
        self._owed_frames = 0
        self._next_sequence = 1

    def first(self) -> None:
        """The first piece travelled with the request's head."""
        self._held_frames += 1

    @property
    def taken_frames(self) -> int:
        """Frames that have come, a request's first one not counted."""
        return self._next_sequence - 1

    def take(self, sequence: int) -> Order:
        """A frame came."""
        if sequence != self._next_sequence:
            return Order.DOUBLED if sequence < self._next_sequence else Order.LOST
        if self._held_frames > self._window + _FRAMES_OVER_MAX:
            return Order.TOO_MANY
        self._next_sequence += 1
        self._held_frames += 1
        return Order.NEXT

    def release(self, frames: int) -> int:
        """So many frames are done with; returned is the credit to give now: none until a part of the window is free."""
        self._held_frames -= frames
        self._owed_frames += frames
        if self._owed_frames < self._window // CREDIT_PARTS:
            return 0
        owed, self._owed_frames = self._owed_frames, 0
        return owed

    def add(self, size_bytes: int) -> None:
        """Count what came of a body."""
        self.received_bytes += size_bytes

    def is_whole(self, *, last: bool) -> bool | None:
        """Whether a body has ended; None when it ended with another size than was said."""
        if self.expected_bytes == UNKNOWN_BYTES:
            return last
        missing_bytes = self.expected_bytes - self.received_bytes
        if missing_bytes == 0:
            return True
        return None if missing_bytes < 0 or last else False
