"""What a router has received over the bus, which it tells each replica: credit of the connection, as of HTTP/2.

Why beside the credit of each stream: windows bound one response, and a thousand of them at once would fill what
nats-server holds for this process (`ReceivedHead`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sized
from typing import Final, final

from serve_common.dispatch.calls import Attempt, DataPlaneBus, Replies
from serve_common.names import ReplicaTag
from serve_common.nats.options import NotConnected, OutboundFull
from serve_common.protocol.frames import SMALL_FRAME_BYTES_MAX, ReceivedHead, encode_frame
from serve_common.protocol.streams import ReceivedBytes

_REPLICAS_MAX: Final = 10_000
_LATE_S: Final = 10.0
"""Seconds in which frames of a cancelled response may still come."""
_LATE_MAX: Final = 1_000
"""Maximum of cancelled responses whose late frames are counted."""


@final
class Receipts:
    """Counts frames of responses that came over the bus; all methods run on the router's loop."""

    def __init__(self, bus: DataPlaneBus, replies: Replies) -> None:
        self._bus = bus
        self._replies = replies
        self._loop = asyncio.get_running_loop()
        self._received: dict[ReplicaTag, ReceivedBytes] = {}
        self.late = 0
        """Number of cancelled responses whose late frames are counted."""

    def count(self, replica: ReplicaTag, subject: bytes, reply: bytes, frame: Sized) -> None:
        """Count a ``frame``, if it is not small, and tell its replica now and then what has come in all.

        ``subject`` is the replica's, ``reply`` that of any of its requests.
        """
        if len(frame) <= SMALL_FRAME_BYTES_MAX:
            return
        received = self._received.get(replica)
        if received is None:
            if len(self._received) >= _REPLICAS_MAX:
                self._received.clear()
            received = self._received[replica] = ReceivedBytes()
        if received.add(len(frame)):
            with contextlib.suppress(NotConnected, OutboundFull):  # the next one says it too
                self._bus.publish(subject, encode_frame(ReceivedHead(received.total_bytes)), reply)

    def count_late(self, attempt: Attempt) -> None:
        """Count what the replica has sent before it learns that the response was cancelled, as the replica does.

        The attempt's token is released later.
        """
        replica, subject, token, reply = attempt.replica, attempt.subject, attempt.token, attempt.reply
        if self.late >= _LATE_MAX:
            self._replies.forget(token)
            return

        def take(frame: bytes, way: bytes, _headers: bytes | None) -> None:
            if not way:  # not over a link
                self.count(replica, subject, reply, frame)

        def end() -> None:
            self.late -= 1
            self._replies.forget(token)

        self.late += 1
        self._replies.replace(token, take)
        self._loop.call_later(_LATE_S, end)
