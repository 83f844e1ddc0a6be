"""The bus side of a replica: frames in, frames out, and the count of what is in flight.

Why it never waits and never calls user code: cancel, probe and drain must be seen at once, whatever the user's code
does. It runs in the bus connection's read path.

What is in flight is the set of exchanges held here. Each leaves it at exactly one place, `_release`: when its answer
has left, or, if nobody wants the answer any more, when its work has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, final

import structlog

from serve_common.bus.errors import InvalidSubject, NotConnected, OutboundFull, PayloadTooLarge
from serve_common.bus.quiet_log import QuietLog
from serve_common.errors import DeadlineExceeded, LimitReached, RequestFailed, UserCodeRaised
from serve_common.wires.frames import (
    FRAME_BODY_BYTES_MAX,
    BodyHead,
    CancelHead,
    CloseHead,
    CreditHead,
    ErrorHead,
    FrameUnreadable,
    Head,
    Headers,
    MessageHead,
    ProbeHead,
    RefusedHead,
    RequestHead,
    ResponseHead,
    decode_frame,
    encode_frame,
)
from serve_replica_host.ports import RequestMetrics
from serve_replica_host.replica.exchange import (
    Answered,
    Drop,
    Ended,
    Exchange,
    Failed,
    Opened,
    Phase,
    Piece,
    Room,
    ToBus,
    ToUser,
)
from serve_replica_host.replica.outgoing import OutgoingBody

_log = structlog.get_logger(__name__)

REQUEST_BODY_BYTES_MAX: Final = 256 * 1024 * 1024
"""A replica's own limit; proxies refuse far less."""
STATUS_CANCELLED: Final = 499
"""In metrics only: the caller went away."""
_EMPTY: Final = memoryview(b"")

Publish = Callable[[bytes, bytes], None]
"""(subject, frame); raises as `BusConnection.publish`."""


@final
class BusSide:
    """Holds the exchanges of one replica; all methods run on the bus loop."""

    def __init__(
        self,
        *,
        publish: Publish,
        to_user: Callable[[ToUser], None],
        now: Callable[[], float],
        metrics: RequestMetrics,
        max_concurrent_queries: int,
    ) -> None:
        self.max_concurrent_queries = max_concurrent_queries
        self.is_draining = False
        self._publish = publish
        self._to_user = to_user
        self._now = now
        self._metrics = metrics
        self._exchanges: dict[bytes, Exchange] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._lost_answers = QuietLog(_log.warning)
        self._bad_frames = QuietLog(_log.warning)

    @property
    def in_flight(self) -> int:
        """Requests that hold a slot."""
        return len(self._exchanges)

    async def wait_idle(self) -> None:
        """Wait until nothing is in flight."""
        await self._idle.wait()

    # -- frames from routers --------------------------------------------------------------------------------------

    def take_frame(self, _subject: bytes, reply: bytes, payload: bytes, _headers: bytes | None) -> None:
        """A message on the replica's subject."""
        try:
            head, body = decode_frame(payload)
        except FrameUnreadable as error:
            self._bad_frames.log(self._now(), "frame_unreadable", error=str(error))
            return
        if not reply:
            self._bad_frames.log(self._now(), "frame_without_reply", kind=type(head).__name__)
            return
        if type(head) is RequestHead:
            self._begin(reply, head, body)
            return
        exchange = self._exchanges.get(reply)
        if exchange is not None:
            self._take_more(exchange, head, body)
        elif type(head) is ProbeHead:
            self._send(reply, RefusedHead("unknown", self.in_flight))

    def _take_more(self, exchange: Exchange, head: Head, body: memoryview) -> None:
        match head:
            case BodyHead():
                if exchange.phase is Phase.RECEIVING:
                    self._take_body(exchange, head, body)
            case CreditHead(frames):
                if exchange.outgoing is not None:
                    exchange.outgoing.allow(frames)
                    self._pump(exchange, exchange.outgoing)
            case CancelHead():
                self._drop(exchange, STATUS_CANCELLED)
            case ProbeHead():
                pass  # silence says that the request is known
            case RequestHead() | ResponseHead() | RefusedHead() | ErrorHead() | MessageHead() | CloseHead():
                self._bad_frames.log(self._now(), "frame_unexpected", kind=type(head).__name__)

    def _begin(self, reply: bytes, head: RequestHead, body: memoryview) -> None:
        if reply in self._exchanges:
            return  # the same request again: it must not run twice
        if self.is_draining or len(self._exchanges) >= self.max_concurrent_queries:
            reason = "draining" if self.is_draining else "busy"
            self._metrics.count_refused(reason)
            self._send(reply, RefusedHead(reason, self.in_flight))
            return
        exchange = Exchange(reply, head, self._now())
        self._exchanges[reply] = exchange
        self._idle.clear()
        if len(body) == head.body_bytes:
            exchange.body = bytes(body)
            self._work_on(exchange)
        elif head.body_bytes > REQUEST_BODY_BYTES_MAX:
            message = f"the body has {head.body_bytes} bytes; a replica takes {REQUEST_BODY_BYTES_MAX}"
            self._fail(exchange, LimitReached.error_code, 413, message)
        else:
            self._take_piece(exchange, body, last=False)

    def _take_body(self, exchange: Exchange, head: BodyHead, body: memoryview) -> None:
        if head.sequence < exchange.next_sequence:
            return  # doubled
        if head.sequence > exchange.next_sequence:
            # The bus lost a frame, as it may when a server goes away. The work was not begun.
            self._fail(
                exchange, RequestFailed.error_code, RequestFailed.status_hint, "a part of the body was lost"
            )
            return
        exchange.next_sequence += 1
        self._take_piece(exchange, body, last=head.last)

    def _take_piece(self, exchange: Exchange, piece: memoryview, *, last: bool) -> None:
        exchange.pieces.append(bytes(piece))
        exchange.received_bytes += len(piece)
        missing_bytes = exchange.head.body_bytes - exchange.received_bytes
        if missing_bytes == 0:
            exchange.body = b"".join(exchange.pieces)
            exchange.pieces = []
            self._work_on(exchange)
        elif missing_bytes < 0 or last:
            message = f"the body has {exchange.received_bytes} bytes instead of {exchange.head.body_bytes}"
            self._fail(exchange, RequestFailed.error_code, RequestFailed.status_hint, message)
        else:
            self._send(exchange.reply, CreditHead(1))

    def _work_on(self, exchange: Exchange) -> None:
        exchange.phase = Phase.WORKING
        self._to_user(exchange)

    def sweep(self) -> None:
        """Fail what is past its deadline; called several times a second while anything is in flight."""
        now = self._now()
        late = [held for held in self._exchanges.values() if now >= held.deadline and not held.is_dropped]
        for exchange in late:
            message = f"the replica had no answer within {exchange.head.timeout_s:g} s"
            self._fail(exchange, DeadlineExceeded.error_code, 504, message)

    # -- what the user's side says --------------------------------------------------------------------------------

    def take_outcome(self, outcome: ToBus) -> None:
        """Something from the user's side; for a dropped exchange it only says when the work has ended."""
        exchange = outcome.exchange
        if exchange.phase is Phase.SENDING:
            return  # the answer was whole; what ran on after it has ended
        if not isinstance(outcome, Opened) and (not isinstance(outcome, Piece) or outcome.last):
            exchange.phase = Phase.SENDING
        if exchange.is_dropped:
            if exchange.phase is Phase.SENDING:
                self._release(exchange, exchange.answer_status)
            return
        match outcome:
            case Answered(_, status, headers, body):
                if exchange.outgoing is None:
                    self._answer(exchange, status, headers, body)
                else:
                    self._fail(exchange, UserCodeRaised.error_code, 500, "the answer broke off")
            case Failed(_, error_code, status, message):
                self._fail(exchange, error_code, status, message)
            case Opened(_, status, headers):
                exchange.outgoing = OutgoingBody()
                exchange.answer_status = status
                self._send_head(exchange, status, headers, _EMPTY, last=False)
            case Piece(_, data, last):
                if exchange.outgoing is not None:
                    exchange.outgoing.add(data, last=last)
                    self._pump(exchange, exchange.outgoing)
            case Ended():
                message = "the user's code was cancelled"
                self._fail(exchange, UserCodeRaised.error_code, 500, message)

    def _answer(self, exchange: Exchange, status: int, headers: Headers, body: bytes) -> None:
        if len(body) <= FRAME_BODY_BYTES_MAX:
            if self._send_head(exchange, status, headers, body, last=True):
                self._release(exchange, status)
            return
        view = memoryview(body)
        if not any(name == b"content-length" for name, _ in headers):
            headers = [*headers, (b"content-length", b"%d" % len(body))]
        exchange.answer_status = status
        if not self._send_head(exchange, status, headers, view[:FRAME_BODY_BYTES_MAX], last=False):
            return
        exchange.outgoing = OutgoingBody()
        exchange.outgoing.add(view[FRAME_BODY_BYTES_MAX:], last=True)
        self._pump(exchange, exchange.outgoing)

    def _send_head(
        self, exchange: Exchange, status: int, headers: Headers, body: bytes | memoryview, *, last: bool
    ) -> bool:
        """False when the head could not be sent for its own sake; then the exchange has been failed instead."""
        head = ResponseHead(status, headers, last, self.in_flight - 1)
        try:
            self._send(exchange.reply, head, body)
        except (FrameUnreadable, PayloadTooLarge) as error:
            self._fail(exchange, UserCodeRaised.error_code, 500, f"the answer cannot be sent: {error}")
            return False
        return True

    def _pump(self, exchange: Exchange, outgoing: OutgoingBody) -> None:
        """Send what the window allows."""
        sent_bytes = 0
        while (frame := outgoing.next_frame()) is not None:
            sequence, last, body = frame
            try:
                self._send(exchange.reply, BodyHead(sequence, last), body)
            except PayloadTooLarge as error:
                self._fail(exchange, RequestFailed.error_code, RequestFailed.status_hint, str(error))
                return
            sent_bytes += len(body)
            if last:
                self._release(exchange, exchange.answer_status)
                return
        if sent_bytes and exchange.phase is Phase.WORKING:
            self._to_user(Room(exchange, sent_bytes))

    # -- ends -----------------------------------------------------------------------------------------------------

    def _fail(self, exchange: Exchange, error_code: str, status: int, message: str) -> None:
        """Tell the router that there is no (whole) answer."""
        self._send_error(exchange.reply, error_code, status, message)
        self._drop(exchange, status)

    def _drop(self, exchange: Exchange, status: int) -> None:
        """Nobody wants an answer (any more). Where the user's code still works, the slot is free when it has ended."""
        if exchange.is_dropped:
            return
        exchange.answer_status = status
        exchange.is_dropped = True
        if exchange.phase is Phase.WORKING:
            self._to_user(Drop(exchange))
        else:
            self._release(exchange, status)

    def _release(self, exchange: Exchange, status: int) -> None:
        if self._exchanges.pop(exchange.reply, None) is None:
            return
        exchange.outgoing = None
        exchange.pieces = []
        self._metrics.count_answered(status, self._now() - exchange.began_at)
        if not self._exchanges:
            self._idle.set()

    # -- sending --------------------------------------------------------------------------------------------------

    def _send_error(self, reply: bytes, error_code: str, status: int, message: str) -> None:
        self._send(reply, ErrorHead(error_code, status, message, self.in_flight - 1))

    def _send(self, reply: bytes, head: Head, body: bytes | memoryview = b"") -> None:
        """Raises FrameUnreadable or PayloadTooLarge; an answer that the bus cannot take now is lost.

        The router of a lost answer probes, and is told that the request is unknown.
        """
        frame = encode_frame(head, body)
        try:
            self._publish(reply, frame)
        except (NotConnected, OutboundFull, InvalidSubject) as error:
            self._lost_answers.log(self._now(), "answer_lost", kind=type(head).__name__, error=str(error))
