"""Sends whole answers from the user's thread, so that no other thread must wake up before they leave.

Why only whole ones in one frame: of each of these exactly one frame goes out, so it cannot overtake another one of the
same request. Everything else is the bus side's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol, final

import structlog

from serve_common.bus.errors import InvalidSubject
from serve_common.bus.protocol import encode_pub
from serve_common.bus.quiet_log import QuietLog
from serve_common.wires.frames import FrameUnreadable, ResponseHead, encode_frame
from serve_replica_host.replica.exchange import Answered, Left, ToBus

_log = structlog.get_logger(__name__)

FRAME_BYTES_MAX: Final = 8 * 1024
"""To copy a larger one costs more than a wake-up, and a server may not take it."""


class Writer(Protocol):
    """A `BusConnection`, as far as other threads may use it."""

    @property
    def can_write_shared(self) -> bool:
        """Whether writing is possible now."""

    def write_shared(self, messages: Sequence[bytes]) -> bool:
        """Send whole messages; False when nothing was sent."""


@final
class DirectAnswers:
    """For one user loop, on its thread."""

    def __init__(
        self,
        writer: Writer,
        to_bus: Callable[[ToBus], object],
        take_left: Callable[[Left], None],
        in_flight: Callable[[], int],
        now: Callable[[], float],
    ) -> None:
        """``to_bus``: what cannot leave here. ``take_left`` gives the slot back. ``in_flight``: requests that hold
        a slot. ``now`` is `time.monotonic`.
        """
        self._writer = writer
        self._to_bus = to_bus
        self._take_left = take_left
        self._in_flight = in_flight
        self._now = now
        self._batch: list[bytes] = []
        self._is_held = False
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
            self._to_bus(answered)
            return
        head = ResponseHead(answered.status, answered.headers, last=True, in_flight=self._in_flight() - 1)
        try:
            frame = encode_frame(head, body)
            message = encode_pub(exchange.reply, b"", frame)
        except (FrameUnreadable, InvalidSubject):
            self._to_bus(answered)  # the bus side says what is wrong
            return
        if len(frame) > FRAME_BYTES_MAX:
            self._to_bus(answered)
            return
        exchange.last_frame = frame
        if not self._batch and not self._is_held:
            asyncio.get_running_loop().call_soon(self.flush)
        self._batch.append(message)
        # Before it leaves: who has the answer may send the next request, and finds the slot free.
        self._take_left(Left(exchange, answered.status, self._now()))

    def hold(self) -> None:
        """Send nothing until `flush` is called, which is in a moment."""
        self._is_held = True

    def flush(self) -> None:
        """Send what waits for the end of this turn."""
        self._is_held = False
        batch = self._batch
        if not batch:
            return
        self._batch = []
        if not self._writer.write_shared(batch if len(batch) == 1 else [b"".join(batch)]):
            # Their routers ask for them when the bus is back, as for all that a lost connection took along.
            self._lost_answers.log(self._now(), "answers_lost", count=len(batch))
