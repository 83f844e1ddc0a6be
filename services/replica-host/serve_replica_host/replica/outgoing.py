"""An answer's body on its way out: cut into frames, never more of them ahead than the router allows.

Why its own class: the window is counted here and nowhere else, and it can be tested without a bus.
"""

from __future__ import annotations

from collections import deque
from typing import Final, final

from serve_common.wires.frames import FRAME_BODY_BYTES_MAX, WINDOW_FRAMES

CREDIT_MAX: Final = 1_000_000
"""Of frames at once; more than any router can mean."""


@final
class OutgoingBody:
    """What is still to be sent of one answer; its first piece travelled with the head."""

    __slots__ = ("_credit", "_is_ended", "_is_sent", "_pieces", "_sequence", "_unsent_bytes")

    def __init__(self) -> None:
        self._pieces: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._credit = WINDOW_FRAMES - 1  # the head's frame is one of them
        self._sequence = 1
        self._is_ended = False
        self._is_sent = False

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait for credit."""
        return self._unsent_bytes

    def add(self, data: bytes | memoryview, *, last: bool) -> None:
        """Append to the body; nothing may be added after ``last``."""
        assert not self._is_ended, "the body has ended"
        self._is_ended = last
        if data:
            self._pieces.append(memoryview(data))
            self._unsent_bytes += len(data)

    def allow(self, frames: int) -> None:
        """The router takes so many frames more."""
        self._credit = min(self._credit + max(frames, 0), CREDIT_MAX)

    def next_frame(self) -> tuple[int, bool, bytes] | None:
        """Sequence, whether it is the last one, and the piece that may be sent now; None to wait.

        Small pieces that had to wait leave together.
        """
        if self._is_sent or self._credit <= 0 or (not self._pieces and not self._is_ended):
            return None
        taken: list[memoryview] = []
        space = FRAME_BODY_BYTES_MAX
        while self._pieces and space > 0:
            piece = self._pieces.popleft()
            taken.append(piece[:space])
            if len(piece) > space:
                self._pieces.appendleft(piece[space:])
            space -= len(taken[-1])
        body = b"".join(taken)
        self._unsent_bytes -= len(body)
        self._credit -= 1
        sequence, self._sequence = self._sequence, self._sequence + 1
        self._is_sent = self._is_ended and not self._pieces
        return sequence, self._is_sent, body
