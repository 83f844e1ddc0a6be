"""What user code responds, as frames to the router; whole responses leave from its own thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol, final

import structlog

from serve_common.errors import RequestFailed, UserCodeRaised
from serve_common.nats.options import InvalidSubject, PayloadTooLarge
from serve_common.nats.protocol import encode_pub
from serve_common.protocol.frames import (
    FRAME_BODY_BYTES_MAX,
    BodyHead,
    CloseHead,
    ErrorHead,
    FrameUnreadable,
    Headers,
    RequestKind,
    ResponseHead,
    encode_frame,
)
from serve_common.telemetry.log_lines import RateLimitedLogger
from serve_replica_host.replica.io.flow import MESSAGE_COST_BYTES, OutgoingBody, OutgoingMessages
from serve_replica_host.replica.io.frame_batch import FrameSender
from serve_replica_host.replica.io.request import (
    Answered,
    Closed,
    Drop,
    Ended,
    Failed,
    Flow,
    Left,
    Opened,
    Phase,
    Piece,
    ReplicaRequest,
    SocketSent,
    Taken,
    ToBus,
    ToUser,
    Writable,
)
from serve_replica_host.replica.io.slots import Slots

STATUS_SWITCHING: Final = 101
"""Of an accepted WebSocket."""


@final
class ResponseFrames:
    """Speaks to routers; all methods are called under the lock of its `ReplicaProtocol`."""

    def __init__(self, slots: Slots, frames: FrameSender, to_user: Callable[[ToUser], object]) -> None:
        self._slots = slots
        self._frames = frames
        self._to_user = to_user

    def take(self, outcome: ToBus) -> None:
        """Something from the user's side; for a dropped exchange it only says when the work has ended."""
        exchange = outcome.exchange
        if exchange.phase is Phase.SENDING:
            return  # the answer was whole; what ran on after it has ended
        if type(outcome) is Left:
            exchange.phase = Phase.SENDING
            status = exchange.answer_status if exchange.is_dropped else outcome.status
            self._slots.release(exchange, status, outcome.ended_at)
            return
        if type(outcome) is Answered:
            exchange.phase = Phase.SENDING
            if not exchange.is_dropped and exchange.outgoing is None:
                self._answer(exchange, outcome.status, outcome.headers, outcome.body)
                return
        elif not isinstance(outcome, Opened | Flow | SocketSent) and (
            not isinstance(outcome, Piece) or outcome.last
        ):
            exchange.phase = Phase.SENDING
        if exchange.is_dropped:
            if exchange.phase is Phase.SENDING:
                self._slots.release(exchange, exchange.answer_status)
            elif exchange.pieces is not None:
                exchange.pieces.clear()
            return
        self._take_wanted(exchange, outcome)

    def _take_wanted(self, exchange: ReplicaRequest, outcome: ToBus) -> None:
        match outcome:
            case Answered():
                self.fail(exchange, UserCodeRaised.error_code, 500, "the answer broke off")
            case Failed(_, error_code, status, message, body):
                self._flush(exchange)
                self.fail(exchange, error_code, status, message, body)
            case Opened(_, status, headers):
                self._open(exchange, status, headers)
            case Flow():
                self._pump(exchange)
            case Piece() | SocketSent() | Closed():
                self._add(exchange, outcome)
            case Ended():
                message = "the user's code was cancelled"
                self.fail(exchange, UserCodeRaised.error_code, 500, message)
            case Taken() | Left():
                pass  # the bus side's, and the user side's

    def _add(self, exchange: ReplicaRequest, more: Piece | SocketSent | Closed) -> None:
        outgoing = exchange.outgoing
        if isinstance(outgoing, OutgoingBody) and isinstance(more, Piece):
            self._drain(exchange, outgoing)
            outgoing.add(more.data, last=more.last)
        elif isinstance(outgoing, OutgoingMessages) and isinstance(more, SocketSent):
            outgoing.add(more.data, is_text=more.is_text)
        elif isinstance(outgoing, OutgoingMessages) and isinstance(more, Closed):
            outgoing.close(more.code, more.reason)
        self._pump(exchange)

    # -- whole answers --------------------------------------------------------------------------------------------

    def _answer(self, exchange: ReplicaRequest, status: int, headers: Headers, body: bytes) -> None:
        if len(body) <= FRAME_BODY_BYTES_MAX:
            if self._send_head(exchange, status, headers, body, last=True):
                self._slots.release(exchange, status)
            return
        if not any(name == b"content-length" for name, _ in headers):
            headers = [*headers, (b"content-length", b"%d" % len(body))]
        exchange.answer_status = status
        outgoing = OutgoingBody()
        outgoing.add(body, last=True)
        if self._send_head(exchange, status, headers, outgoing.first_body(), last=False):
            exchange.outgoing = outgoing
            exchange.has_answer_begun = True
            self._pump(exchange)

    def _send_head(
        self, exchange: ReplicaRequest, status: int, headers: Headers, body: bytes, *, last: bool
    ) -> bool:
        """False when the head could not be sent for its own sake; then the exchange has been failed instead."""
        head = ResponseHead(status, headers, last, len(self._slots.held) - 1)
        try:
            frame = self._frames.send(exchange.reply, head, body)
        except (FrameUnreadable, PayloadTooLarge) as error:
            self.fail(exchange, UserCodeRaised.error_code, 500, f"the answer cannot be sent: {error}")
            return False
        if last:
            exchange.last_frame = frame
        return True

    # -- answers in pieces ----------------------------------------------------------------------------------------

    def _open(self, exchange: ReplicaRequest, status: int, headers: Headers) -> None:
        if exchange.outgoing is not None:
            return
        exchange.answer_status = status
        if exchange.head.kind is RequestKind.WEBSOCKET and status == STATUS_SWITCHING:
            if self._send_head(exchange, status, headers, b"", last=False):
                exchange.outgoing = OutgoingMessages()
                exchange.has_answer_begun = True
            return
        outgoing = OutgoingBody()
        self._drain(exchange, outgoing)
        first = outgoing.first_body()
        if self._send_head(exchange, status, headers, first, last=False):
            exchange.outgoing = outgoing
            exchange.has_answer_begun = True
            self._account(exchange, len(first))
            self._pump(exchange)

    def _drain(self, exchange: ReplicaRequest, outgoing: OutgoingBody) -> None:
        """Take over what the writer has put; it may go on putting meanwhile."""
        exchange.is_told = False  # before looking: what comes from now on is told again
        pieces = exchange.pieces
        if not pieces:
            return
        count = len(pieces)
        if count == 1:
            outgoing.add(pieces.popleft(), last=False)
        else:
            take = pieces.popleft
            outgoing.add(b"".join([take() for _ in range(count)]), last=False)

    def allow(self, exchange: ReplicaRequest, frames: int) -> None:
        """The router takes so many frames more."""
        if exchange.outgoing is not None:
            exchange.outgoing.allow(frames)
            self._pump(exchange)

    def _pump(self, exchange: ReplicaRequest) -> None:
        """Send what the window allows. Without credit nothing is even looked at: the writer then costs no wake-up."""
        outgoing = exchange.outgoing
        if outgoing is None or exchange.is_dropped:
            return
        try:
            if isinstance(outgoing, OutgoingMessages):
                self._pump_messages(exchange, outgoing)
            else:
                self._pump_body(exchange, outgoing)
        except PayloadTooLarge as error:
            self.fail(exchange, RequestFailed.error_code, RequestFailed.status_hint, str(error))

    def _pump_body(self, exchange: ReplicaRequest, outgoing: OutgoingBody) -> None:
        if outgoing.has_credit and exchange.phase is Phase.WORKING:
            self._drain(exchange, outgoing)
        sent_bytes = 0
        while (frame := outgoing.next_frame()) is not None:
            sequence, last, body = frame
            self._frames.send(exchange.reply, BodyHead(sequence, last), body)
            sent_bytes += len(body)
            if last:
                self._slots.release(exchange, exchange.answer_status)
                return
        if sent_bytes:
            self._account(exchange, sent_bytes)

    def _pump_messages(self, exchange: ReplicaRequest, outgoing: OutgoingMessages) -> None:
        sent_bytes = 0
        while (frame := outgoing.next_frame()) is not None:
            head, body = frame
            self._frames.send(exchange.reply, head, body)
            if isinstance(head, CloseHead):
                self._slots.release(exchange, exchange.answer_status)
                return
            sent_bytes += len(body) + (MESSAGE_COST_BYTES if head.last else 0)
        if sent_bytes:
            self._account(exchange, sent_bytes)

    def _account(self, exchange: ReplicaRequest, sent_bytes: int) -> None:
        """Tell the writer what has left, if it wants to know."""
        if exchange.phase is not Phase.WORKING:
            return
        exchange.sent_bytes += sent_bytes
        if exchange.pieces is None or exchange.room is not None:
            self._to_user(Writable(exchange))

    def _flush(self, exchange: ReplicaRequest) -> None:
        """What came before a failure is still the caller's."""
        outgoing = exchange.outgoing
        if isinstance(outgoing, OutgoingBody) and exchange.pieces:
            self._drain(exchange, outgoing)
            self._pump(exchange)

    # -- ends -----------------------------------------------------------------------------------------------------

    def fail(
        self, exchange: ReplicaRequest, error_code: str, status: int, message: str, body: bytes = b""
    ) -> None:
        """Tell the router that there is no (whole) answer."""
        head = ErrorHead(error_code, status, message, len(self._slots.held) - 1)
        sent = self._frames.send(exchange.reply, head, body if len(body) <= FRAME_BODY_BYTES_MAX else b"")
        if not exchange.has_answer_begun:
            exchange.last_frame = sent
        self.drop(exchange, status)

    def drop(self, exchange: ReplicaRequest, status: int, close_code: int = 1006, reason: str = "") -> None:
        """Nobody wants an answer (any more). Where the user's code still works, the slot is free when it has ended."""
        if exchange.is_dropped:
            return
        exchange.answer_status = status
        exchange.is_dropped = True
        if exchange.phase is Phase.WORKING:
            self._to_user(Drop(exchange, close_code, reason))
        else:
            self._slots.release(exchange, status)


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
class DirectResponses:
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
        self._lost_answers = RateLimitedLogger(_log.warning)

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
