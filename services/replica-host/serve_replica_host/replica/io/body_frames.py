"""The bodies of requests and the messages of WebSockets, frame by frame, on their way to the user's code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

import structlog

from serve_common.errors import LimitReached, RequestFailed
from serve_common.protocol.frames import (
    AliveHead,
    BodyHead,
    CloseHead,
    MessageHead,
    RequestKind,
)
from serve_common.protocol.streams import IncomingStream, SequenceCheck
from serve_common.telemetry.log_lines import RateLimitedLogger
from serve_replica_host.replica.io.flow import IncomingBody
from serve_replica_host.replica.io.frame_sender import FrameSender
from serve_replica_host.replica.io.request import BodyPiece, Phase, ReplicaRequest, SocketReceived, UserEvent
from serve_replica_host.replica.io.response_frames import ResponseFrames

_log = structlog.get_logger(__name__)

REQUEST_BODY_BYTES_MAX: Final = 256 * 1024 * 1024
"""Maximum size of a body that user code gets complete; a replica's own limit, those of proxies are far lower."""
STATUS_CANCELLED: Final = 499
"""Status in metrics of requests whose caller is gone."""


@final
class BodyFrames:
    """Processes body and message frames; all methods are called under the lock of its `ReplicaProtocol`."""

    def __init__(
        self,
        responses: ResponseFrames,
        frames: FrameSender,
        user_queue: Callable[[UserEvent], object],
        now: Callable[[], float],
        *,
        streams_bodies: bool,
    ) -> None:
        """``streams_bodies``: HTTP handlers may start before a body is complete. ``now`` is `time.monotonic`."""
        self._responses = responses
        self._frames = frames
        self._user_queue = user_queue
        self._now = now
        self._streams_bodies = streams_bodies
        self._bad_frames = RateLimitedLogger(_log.warning)

    def start(self, exchange: ReplicaRequest, first: bytes | memoryview) -> None:
        """Start a request whose body is incomplete; ``first`` is the part that arrived with its head."""
        incoming = exchange.body_in = IncomingBody(exchange.head.body_bytes)
        if self._streams_bodies and exchange.head.kind is RequestKind.HTTP:
            exchange.is_body_streamed = True
            self._work_on(exchange)
        self._add_piece(exchange, incoming, first, last=False)

    def take_body(self, exchange: ReplicaRequest, head: BodyHead, body: bytes | memoryview) -> None:
        """Process a part of a body."""
        incoming = exchange.body_in
        if incoming is None or exchange.is_dropped or exchange.phase is Phase.SENDING:
            return  # it was complete, or is not read any more
        if self._is_next(exchange, incoming.stream, head.sequence):
            self._add_piece(exchange, incoming, body, last=head.last)

    def _is_next(self, exchange: ReplicaRequest, stream: IncomingStream, sequence: int) -> bool:
        """True when a frame is the next one of its direction; else the router learns what is missing."""
        order = stream.take(sequence)
        if order is SequenceCheck.LOST and stream.is_new_gap():
            self._frames.send(exchange.reply, AliveHead(stream.next_sequence, stream.limit, has_gap=True))
        elif order is SequenceCheck.TOO_MANY:
            message = "the router sends more than it was allowed to"
            self._responses.fail(exchange, RequestFailed.error_code, RequestFailed.status_hint, message)
        return order is SequenceCheck.NEXT

    def _add_piece(
        self, exchange: ReplicaRequest, incoming: IncomingBody, piece: bytes | memoryview, *, last: bool
    ) -> None:
        is_whole = incoming.add(len(piece), last=last)
        if is_whole is None:
            message = f"the body has {incoming.received_bytes} bytes instead of {incoming.expected_bytes}"
            self._responses.fail(exchange, RequestFailed.error_code, RequestFailed.status_hint, message)
        elif exchange.is_body_streamed:
            if is_whole:
                exchange.body_in = None
            if piece or is_whole:
                self._user_queue(BodyPiece(exchange, piece, is_whole))
            else:
                self.grant_credit(exchange, incoming.stream, 1)
        else:
            self._collect(exchange, incoming, piece, is_whole=is_whole)

    def _collect(
        self, exchange: ReplicaRequest, incoming: IncomingBody, piece: bytes | memoryview, *, is_whole: bool
    ) -> None:
        """Collect a part for code that needs the complete body."""
        body_bytes = max(incoming.received_bytes, incoming.expected_bytes)
        if body_bytes > REQUEST_BODY_BYTES_MAX:
            message = f"the body has {body_bytes} bytes or more; a replica takes {REQUEST_BODY_BYTES_MAX}"
            self._responses.fail(exchange, LimitReached.error_code, 413, message)
            return
        incoming.pieces.append(piece)
        if is_whole:
            exchange.body_in = None
            exchange.body = b"".join(incoming.pieces)
            self._work_on(exchange)
        else:
            self.grant_credit(exchange, incoming.stream, 1)

    def take_message(self, exchange: ReplicaRequest, head: MessageHead, body: bytes | memoryview) -> None:
        """Process a WebSocket message, or a part of one."""
        incoming = exchange.messages_in
        if incoming is None:
            self._bad_frames.log(self._now(), "frame_unexpected", kind="MessageHead")
            return
        if exchange.is_dropped or exchange.phase is Phase.SENDING:
            return
        if self._is_next(exchange, incoming, head.sequence):
            exchange.sent_before = 0 if exchange.outgoing is None else exchange.outgoing.sent
            self._user_queue(SocketReceived(exchange, bytes(body), head.is_text, head.last))

    def take_close(self, exchange: ReplicaRequest, head: CloseHead) -> None:
        """Process the client's close of a WebSocket, once all that came before it has arrived."""
        incoming = exchange.messages_in
        if incoming is not None and head.sequence > incoming.next_sequence:
            if incoming.is_new_gap():
                self._frames.send(
                    exchange.reply, AliveHead(incoming.next_sequence, incoming.limit, has_gap=True)
                )
            return
        status = exchange.response_status or STATUS_CANCELLED
        self._responses.drop(exchange, status, head.code, head.reason)

    def grant_credit(self, exchange: ReplicaRequest, incoming: IncomingStream, frames: int) -> None:
        """Count ``frames`` that the user's code has read, and grant the router credit when it is due."""
        if incoming.process(frames):
            self._frames.send(exchange.reply, incoming.credit())

    def _work_on(self, exchange: ReplicaRequest) -> None:
        exchange.phase = Phase.WORKING
        self._user_queue(exchange)
