"""Sends whole answers from the user's thread, so that no other thread must wake up before they leave.

Why only whole ones in one frame: of each of these exactly one frame goes out, so it cannot overtake another one of the
same request. Everything else is the bus side's.

Why the bus side may hear of them later: it looks here before it does anything that depends on a slot. Only where
somebody waits for a slot, or for the end of all work, is it woken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol, final

import structlog

from serve_common.bus.errors import InvalidSubject
from serve_common.bus.protocol import encode_pub
from serve_common.bus.quiet_log import QuietLog
from serve_common.threads.mailbox import Mailbox
from serve_common.wires.frames import FrameUnreadable, ResponseHead, encode_frame
from serve_replica_host.replica.exchange import Answered, Left, ToBus

_log = structlog.get_logger(__name__)

FRAME_BYTES_MAX: Final = 8 * 1024
"""To copy a larger one costs more than a wake-up, and a server may not take it."""


class Awaiting(Protocol):
    """What the user's side asks of the bus side, from its own thread."""

    @property
    def awaits_slots(self) -> bool:
        """Whether a slot that comes back must be known at once."""

    @property
    def in_flight(self) -> int:
        """Requests that hold a slot."""


class Writer(Protocol):
    """A `BusConnection`, as far as other threads may use it."""

    @property
    def can_write_shared(self) -> bool:
        """Whether writing is possible now."""

    def write_shared(self, messages: bytes) -> bool:
        """Send whole messages; False when nothing was sent."""


@final
class DirectAnswers:
    """For one user loop, on its thread."""

    def __init__(
        self, writer: Writer, to_bus: Mailbox[ToBus], bus_side: Awaiting, now: Callable[[], float]
    ) -> None:
        """``now`` is `time.monotonic`."""
        self._writer = writer
        self._to_bus = to_bus
        self._bus_side = bus_side
        self._now = now
        self._batch: list[bytes] = []
        self._lost_answers = QuietLog(_log.warning)

    def send(self, answered: Answered) -> None:
        """Send the answer with all others of this turn of the loop, or let the bus side do it."""
        exchange, body = answered.exchange, answered.body
        if (
            exchange.is_dropped
            or exchange.outgoing is not None
            or len(body) > FRAME_BYTES_MAX
            or not self._writer.can_write_shared
        ):
            self._to_bus.put(answered)
            return
        others = self._bus_side.in_flight - len(self._to_bus) - 1
        try:
            frame = encode_frame(
                ResponseHead(answered.status, answered.headers, last=True, in_flight=max(0, others)), body
            )
            message = encode_pub(exchange.reply, b"", frame)
        except (FrameUnreadable, InvalidSubject):
            self._to_bus.put(answered)  # the bus side says what is wrong
            return
        if len(frame) > FRAME_BYTES_MAX:
            self._to_bus.put(answered)
            return
        exchange.last_frame = frame
        # Before it leaves: who has the answer may send the next request, and finds the slot free.
        self._to_bus.put_quietly(Left(exchange, answered.status, self._now()))
        if not self._batch:
            asyncio.get_running_loop().call_soon(self.flush)
        self._batch.append(message)

    def flush(self) -> None:
        """Send what waits for the end of this turn."""
        batch = self._batch
        if not batch:
            return
        self._batch = []
        if not self._writer.write_shared(b"".join(batch) if len(batch) > 1 else batch[0]):
            # Their routers ask for them when the bus is back, as for all that a lost connection took along.
            self._lost_answers.log(self._now(), "answers_lost", count=len(batch))
        if self._bus_side.awaits_slots:
            self._to_bus.wake()
