"""What comes after a request's head: the rest of a body, and the messages of a WebSocket.

Why apart from `BusSide`: that one begins and ends requests; this one counts and joins what comes for them, and gives
routers the credit to send more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

import structlog

from serve_common.bus.quiet_log import QuietLog
from serve_common.errors import LimitReached, RequestFailed
from serve_common.wires.frames import WINDOW_FRAMES, BodyHead, CreditHead, Kind, MessageHead
from serve_replica_host.replica.answer_frames import AnswerFrames
from serve_replica_host.replica.exchange import BodyPiece, Exchange, Heard, Phase, ToUser
from serve_replica_host.replica.frame_sender import FrameSender
from serve_replica_host.replica.incoming import IncomingFrames, Order
from serve_replica_host.replica.outgoing import OutgoingMessages

_log = structlog.get_logger(__name__)

REQUEST_BODY_BYTES_MAX: Final = 256 * 1024 * 1024
"""Of a body that the user's code gets whole; a replica's own limit, proxies refuse far less."""


@final
class BodyFrames:
    """Takes frames for requests in flight; all methods are called under the lock of its `BusSide`."""

    def __init__(
        self,
        answers: AnswerFrames,
        frames: FrameSender,
        to_user: Callable[[ToUser], object],
        now: Callable[[], float],
        *,
        streams_bodies: bool,
    ) -> None:
        """``streams_bodies``: what answers HTTP may begin before a body is whole. ``now`` is `time.monotonic`."""
        self._answers = answers
        self._frames = frames
        self._to_user = to_user
        self._now = now
        self._streams_bodies = streams_bodies
        self._credits = 0
        """Given so far."""
        self._bad_frames = QuietLog(_log.warning)

    def begin(self, exchange: Exchange, first: memoryview) -> None:
        """A request came whose body is not whole; ``first`` is what came with its head."""
        incoming = exchange.incoming = IncomingFrames(exchange.head.body_bytes, WINDOW_FRAMES)
        incoming.first()
        if self._streams_bodies and exchange.head.kind is Kind.HTTP:
            exchange.is_body_streamed = True
            self._work_on(exchange)
        self._add_piece(exchange, incoming, first, last=False)

    def take_body(self, exchange: Exchange, head: BodyHead, body: memoryview) -> None:
        """More of a body came."""
        incoming = exchange.incoming
        if incoming is None or exchange.is_dropped or exchange.phase is Phase.SENDING:
            return  # it was whole, or nobody reads it any more
        order = incoming.take(head.sequence)
        if order is Order.NEXT:
            self._add_piece(exchange, incoming, body, last=head.last)
        elif order is Order.LOST:
            self._refuse(exchange, "a part of the body was lost")
        elif order is Order.TOO_MANY:
            self._refuse(exchange, "the router sends more of the body than it was allowed to")

    def _add_piece(
        self, exchange: Exchange, incoming: IncomingFrames, piece: memoryview, *, last: bool
    ) -> None:
        incoming.add(len(piece))
        is_whole = incoming.is_whole(last=last)
        if is_whole is None:
            expected_bytes = incoming.expected_bytes
            self._refuse(
                exchange, f"the body has {incoming.received_bytes} bytes instead of {expected_bytes}"
            )
        elif exchange.is_body_streamed:
            if is_whole:
                exchange.incoming = None
            if piece or is_whole:
                self._to_user(BodyPiece(exchange, bytes(piece), is_whole))
            else:
                self.give_credit(exchange, incoming, 1)
        else:
            self._gather(exchange, incoming, piece, is_whole=is_whole)

    def _gather(
        self, exchange: Exchange, incoming: IncomingFrames, piece: memoryview, *, is_whole: bool
    ) -> None:
        """Keep a piece for code that wants its body whole."""
        body_bytes = max(incoming.received_bytes, incoming.expected_bytes)
        if body_bytes > REQUEST_BODY_BYTES_MAX:
            message = f"the body has {body_bytes} bytes or more; a replica takes {REQUEST_BODY_BYTES_MAX}"
            self._answers.fail(exchange, LimitReached.error_code, 413, message)
            return
        incoming.pieces.append(bytes(piece))
        if is_whole:
            exchange.incoming = None
            exchange.body = b"".join(incoming.pieces)
            self._work_on(exchange)
        else:
            self.give_credit(exchange, incoming, 1)

    def take_message(self, exchange: Exchange, head: MessageHead, body: memoryview) -> None:
        """A message for a WebSocket, or a piece of one, came."""
        incoming = exchange.incoming
        if incoming is None or exchange.head.kind is not Kind.WEBSOCKET:
            self._bad_frames.log(self._now(), "frame_unexpected", kind="MessageHead")
            return
        if exchange.is_dropped or exchange.phase is Phase.SENDING:
            return
        order = incoming.take(head.sequence)
        if order is Order.NEXT:
            outgoing = exchange.outgoing
            exchange.sent_before = outgoing.sent_frames if isinstance(outgoing, OutgoingMessages) else 0
            self._to_user(Heard(exchange, bytes(body), head.is_text, head.last))
        elif order is not Order.DOUBLED:
            self._refuse(exchange, "a message was lost")

    def _refuse(self, exchange: Exchange, message: str) -> None:
        self._answers.fail(exchange, RequestFailed.error_code, RequestFailed.status_hint, message)

    def give_credit(self, exchange: Exchange, incoming: IncomingFrames, frames: int) -> None:
        """The user's code has taken so many frames: the router may send as many more."""
        credit = incoming.release(frames)
        if credit:
            self._credits += 1
            self._frames.send(exchange.reply, CreditHead(credit, self._credits))

    def _work_on(self, exchange: Exchange) -> None:
        exchange.phase = Phase.WORKING
        self._to_user(exchange)
