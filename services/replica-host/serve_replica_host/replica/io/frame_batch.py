"""Outgoing frames of a replica, in one order for both threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Final, final

import structlog

from serve_common.nats.connection import BusConnection
from serve_common.nats.options import InvalidSubject, NotConnected, OutboundFull, PayloadTooLarge
from serve_common.nats.protocol import CRLF, encode_pub, encode_pub_line
from serve_common.protocol.frames import Head, encode_frame
from serve_common.telemetry.log_lines import RateLimitedLogger

_log = structlog.get_logger(__name__)

_BATCH_BYTES_MAX: Final = 256 * 1024
_SMALL_BYTES_MAX: Final = 4 * 1024
"""Frames up to this size are joined with their protocol line."""


@final
class FrameBatch:
    """Frames to send, for both threads; all methods but `flush` are called under the lock.

    Why a batch besides the connection's own: the frames of a stream are numbered, and the two threads take turns.
    """

    def __init__(self, connection: BusConnection, lock: threading.RLock) -> None:
        """Create it on the loop of ``connection``."""
        self._connection = connection
        self._lock = lock
        self._bus_loop = asyncio.get_running_loop()
        self._bus_thread = threading.get_ident()
        self._pieces: list[bytes] = []
        self._bytes = 0
        self._lost_frames = RateLimitedLogger(_log.warning)

    def publish(self, subject: bytes, frame: bytes) -> None:
        """Send ``frame`` with the next `flush`; scheduled on the bus loop, on other threads the caller flushes.

        Raises as `BusConnection.publish`.
        """
        connection = self._connection
        if not connection.can_write_shared:
            connection.publish(subject, frame)
            return
        size_bytes = len(frame)
        if size_bytes > connection.max_payload:
            raise PayloadTooLarge(
                f"message of {size_bytes} bytes: the server takes at most {connection.max_payload}"
            )
        if not self._pieces and threading.get_ident() == self._bus_thread:
            self._bus_loop.call_soon(self.flush)
        if size_bytes <= _SMALL_BYTES_MAX:
            self._pieces.append(encode_pub(subject, b"", frame))
        else:
            self._pieces += (encode_pub_line(subject, b"", size_bytes), frame, CRLF)
        self._bytes += size_bytes
        if self._bytes >= _BATCH_BYTES_MAX:
            self.flush()

    def flush(self) -> None:
        """Send the published frames."""
        with self._lock:
            pieces = self._pieces
            if not pieces:
                return
            self._pieces, self._bytes = [], 0
            if not self._connection.write_shared(pieces):
                # Routers re-request lost frames when the bus is back, as after every lost connection.
                self._lost_frames.log(time.monotonic(), "frames_lost", pieces=len(pieces))


Publish = Callable[[bytes, bytes], None]
"""Publishes (subject, frame). Raises as `BusConnection.publish`."""


@final
class FrameSender:
    """Publishes frames to reply subjects.

    Why a response may be lost: its router probes for the request, and gets the response again (`RecentReplies`).
    """

    def __init__(self, publish: Publish, now: Callable[[], float]) -> None:
        """``now`` is `time.monotonic` or a fake."""
        self.publish = publish
        self._now = now
        self._lost_response_logger = RateLimitedLogger(_log.warning)

    def send(self, reply: bytes, head: Head, body: bytes | memoryview = b"") -> bytes:
        """Send a frame and return it.

        Raises FrameUnreadable (the head is too large) or PayloadTooLarge; a frame that the bus cannot buffer is lost.
        """
        frame = encode_frame(head, body)
        self.send_again(reply, frame, type(head).__name__)
        return frame

    def send_again(self, reply: bytes, frame: bytes, kind: str = "again") -> None:
        """Send an encoded frame. Raises as `send`."""
        try:
            self.publish(reply, frame)
        except (NotConnected, OutboundFull, InvalidSubject) as error:
            self._lost_response_logger.log(self._now(), "answer_lost", kind=kind, error=str(error))
