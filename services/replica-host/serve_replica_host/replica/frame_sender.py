"""Sends a replica's frames, and says quietly which of them the bus did not take.

Why losing an answer is all right: its router asks after the request, and is told again (`recent_replies`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import structlog

from serve_common.bus.errors import InvalidSubject, NotConnected, OutboundFull
from serve_common.bus.quiet_log import QuietLog
from serve_common.wires.frames import Head, encode_frame

_log = structlog.get_logger(__name__)

Publish = Callable[[bytes, bytes], None]
"""(subject, frame); raises as `BusConnection.publish`."""


@final
class FrameSender:
    """Publishes frames to reply subjects."""

    def __init__(self, publish: Publish, now: Callable[[], float]) -> None:
        """``now`` is `time.monotonic` or a stand-in."""
        self.publish = publish
        self._now = now
        self._lost_answers = QuietLog(_log.warning)

    def send(self, reply: bytes, head: Head, body: bytes | memoryview = b"") -> bytes:
        """The frame that was sent.

        Raises FrameUnreadable (the head is too large) or PayloadTooLarge; what the bus cannot take now is lost.
        """
        frame = encode_frame(head, body)
        self.send_again(reply, frame, type(head).__name__)
        return frame

    def send_again(self, reply: bytes, frame: bytes, kind: str = "again") -> None:
        """Send a frame that is made already; errors as `send`."""
        try:
            self.publish(reply, frame)
        except (NotConnected, OutboundFull, InvalidSubject) as error:
            self._lost_answers.log(self._now(), "answer_lost", kind=kind, error=str(error))
