"""Responses of user code as frames to the router; complete ones are sent from the user thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol, final

import structlog

from serve_common.direct.link import LARGE_BYTES_MIN, DirectLink, link_token
from serve_common.direct.writing import EARLY_FRAMES
from serve_common.errors import RequestFailed, UserCodeRaised
from serve_common.nats.options import InvalidSubject, PayloadTooLarge
from serve_common.nats.protocol import encode_pub
from serve_common.protocol.frames import (
    FRAME_BODY_BYTES_MAX,
    SMALL_FRAME_BYTES_MAX,
    WINDOW_FRAMES,
    WINDOW_MESSAGES,
    AliveHead,
    ErrorHead,
    FrameUnreadable,
    Headers,
    MessageHead,
    ProbeHead,
    RequestKind,
    ResponseHead,
    encode_frame,
)
from serve_common.protocol.streams import BodyPieces, MessageQueue, OutgoingStream, RetainedBytes, WholeBody
from serve_common.telemetry.log_lines import RateLimitedLogger
from serve_replica_host.replica.io.flow import MESSAGE_COST_BYTES
from serve_replica_host.replica.io.frame_sender import FrameSender
from serve_replica_host.replica.io.request import (
    Closed,
    Drop,
    Ended,
    Failed,
    Flow,
    IoEvent,
    Left,
    Opened,
    Phase,
    Piece,
    ReplicaRequest,
    SocketSent,
    Taken,
    UserEvent,
    WholeResponseEvent,
    Writable,
)
from serve_replica_host.replica.io.slots import Slots

_log = structlog.get_logger(__name__)

STATUS_SWITCHING: Final = 101
"""Status of an accepted WebSocket."""


@final
class ResponseFrames:
    """Sends responses to routers; all methods are called under the lock of its `ReplicaProtocol`.

    However a request in flight ends, by its response or by `ReplicaProtocol`, its slot is released here.
    """

    def __init__(self, slots: Slots, frames: FrameSender, user_queue: Callable[[UserEvent], object]) -> None:
        self._slots = slots
        self._frames = frames
        self._user_queue = user_queue
        self._retained = RetainedBytes()
        self._waiting: dict[bytes, ReplicaRequest] = {}
        """Streams that wait for room on their way, in turn."""

    def take(self, outcome: IoEvent) -> None:
        """Process an outcome of the user side; for a dropped exchange only the end of the work matters."""
        exchange = outcome.exchange
        if exchange.phase is Phase.SENDING:
            return  # the response was complete; work that continued after it has ended
        if type(outcome) is Left:
            exchange.phase = Phase.SENDING
            status = exchange.response_status if exchange.is_dropped else outcome.status
            self._slots.release(exchange, status, outcome.ended_at)
            return
        if type(outcome) is WholeResponseEvent:
            exchange.phase = Phase.SENDING
            if not exchange.is_dropped and exchange.outgoing is None:
                self._send_whole(exchange, outcome.status, outcome.headers, outcome.body)
                return
        elif not isinstance(outcome, Opened | Flow | SocketSent) and (
            not isinstance(outcome, Piece) or outcome.last
        ):
            exchange.phase = Phase.SENDING
        if exchange.is_dropped:
            if exchange.phase is Phase.SENDING:
                self._slots.release(exchange, exchange.response_status)
            elif exchange.pieces is not None:
                exchange.pieces.clear()
            return
        self._process(exchange, outcome)

    def _process(self, exchange: ReplicaRequest, outcome: IoEvent) -> None:
        match outcome:
            case WholeResponseEvent():
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
                pass  # handled elsewhere

    def _add(self, exchange: ReplicaRequest, more: Piece | SocketSent | Closed) -> None:
        source = None if exchange.outgoing is None else exchange.outgoing.source
        if isinstance(source, BodyPieces) and isinstance(more, Piece):
            self._drain(exchange, source)
            source.add(more.data, last=more.last)
        elif isinstance(source, MessageQueue) and isinstance(more, SocketSent):
            source.add(more.data, is_text=more.is_text)
        elif isinstance(source, MessageQueue) and isinstance(more, Closed):
            source.close_socket(more.code, more.reason)
        self._pump(exchange)

    # -- complete responses --------------------------------------------------------------------------------------------

    def _send_whole(self, exchange: ReplicaRequest, status: int, headers: Headers, body: bytes) -> None:
        if len(body) <= FRAME_BODY_BYTES_MAX:
            if self._send_head(exchange, status, headers, body, last=True):
                self._slots.release(exchange, status)
            return
        if not any(name == b"content-length" for name, _ in headers):
            headers = [*headers, (b"content-length", b"%d" % len(body))]
        exchange.response_status = status
        self._start_response(exchange, status, headers, OutgoingStream(WholeBody(body), WINDOW_FRAMES))

    def _send_head(
        self, exchange: ReplicaRequest, status: int, headers: Headers, body: bytes | memoryview, *, last: bool
    ) -> bool:
        """Send the head; returns False when it is invalid, and the exchange was failed instead."""
        head = ResponseHead(status, headers, last, len(self._slots.active) - 1)
        if not last or len(body) >= LARGE_BYTES_MIN:
            self._frames.find_link(exchange.reply)
        try:
            if last:
                exchange.last_frame = self._frames.send(exchange.reply, head, body)
            else:
                self._frames.post(exchange.reply, head, body)
                exchange.response_head = head
        except (FrameUnreadable, PayloadTooLarge) as error:
            self.fail(exchange, UserCodeRaised.error_code, 500, f"the answer cannot be sent: {error}")
            return False
        return True

    # -- streamed responses ----------------------------------------------------------------------------------------

    def _open(self, exchange: ReplicaRequest, status: int, headers: Headers) -> None:
        if exchange.outgoing is not None:
            return
        exchange.response_status = status
        if exchange.head.kind is RequestKind.WEBSOCKET and status == STATUS_SWITCHING:
            if self._send_head(exchange, status, headers, b"", last=False):
                exchange.outgoing = OutgoingStream(MessageQueue(self._retained), WINDOW_MESSAGES, first=1)
                exchange.has_response_started = True
            return
        pieces = BodyPieces(self._retained)
        self._frames.find_link(exchange.reply)
        if self._frames.has_capacity(exchange.reply):  # else the head goes alone
            self._drain(exchange, pieces)
        self._start_response(exchange, status, headers, OutgoingStream(pieces, WINDOW_FRAMES))

    def _start_response(
        self,
        exchange: ReplicaRequest,
        status: int,
        headers: Headers,
        outgoing: OutgoingStream[bytes | memoryview],
    ) -> None:
        """Send the head with the first part of the body, and what the credit allows."""
        first = outgoing.opening()
        if self._send_head(exchange, status, headers, first, last=False):
            exchange.outgoing = outgoing
            exchange.has_response_started = True
            self._notify_sent(exchange, len(first))
            self._pump(exchange)

    def _drain(self, exchange: ReplicaRequest, outgoing: BodyPieces) -> None:
        """Move the parts from the writer, which may append more meanwhile."""
        exchange.is_notified = False  # before reading: later parts are notified again
        pieces = exchange.pieces
        if not pieces:
            return
        take = pieces.popleft
        outgoing.add(b"".join([take() for _ in range(len(pieces))]), last=False)  # of one piece: no copy

    def allow(self, exchange: ReplicaRequest, frames: int, limit: int) -> None:
        """Add credit, as `OutgoingStream.allow` has it."""
        if exchange.outgoing is not None:
            exchange.outgoing.allow(frames, limit)
            self._pump(exchange)

    def respond_to_probe(self, exchange: ReplicaRequest, probe: ProbeHead) -> None:
        """Say how far both directions are, take the credit, and send again what the router has lost."""
        incoming, outgoing = exchange.incoming, exchange.outgoing
        progress = (0, 0) if incoming is None else (incoming.next_sequence, incoming.limit)
        sent = 0 if outgoing is None or probe.has_lost else outgoing.sent
        self._frames.send(exchange.reply, AliveHead(*progress, sent=sent))
        if probe.has_lost:
            self._resume(exchange, probe.received, probe.limit)
        elif probe.limit:
            self.allow(exchange, 0, probe.limit)

    def _resume(self, exchange: ReplicaRequest, received: int, limit: int) -> None:
        """Send again what the router does not have: it has ``received`` frames of the response."""
        outgoing, head = exchange.outgoing, exchange.response_head
        if received < 0 or outgoing is None or head is None:
            return
        if exchange.is_dropped and not outgoing.is_ended:
            return
        if not outgoing.resume(received):
            message = "a part of the answer was lost, and is not held any more"
            self.fail(exchange, RequestFailed.error_code, RequestFailed.status_hint, message)
            return
        if not received:
            first = b"" if isinstance(outgoing.source, MessageQueue) else outgoing.opening()
            self._frames.send(exchange.reply, head, first)
        outgoing.allow(0, limit)
        self._pump(exchange)

    def close_socket(self, exchange: ReplicaRequest, code: int, reason: str) -> None:
        """Close a WebSocket that has sent everything, and end its work."""
        outgoing = exchange.outgoing
        if outgoing is not None and isinstance(outgoing.source, MessageQueue):
            outgoing.source.close_socket(code, reason)
            while (frame := outgoing.next_frame()) is not None:
                self._frames.send(exchange.reply, *frame)
        self.drop(exchange, exchange.response_status, code, reason)

    def _pump(self, exchange: ReplicaRequest) -> None:
        """Send what the credit allows. Without credit nothing is read: the writer then costs no wake-up."""
        outgoing = exchange.outgoing
        if outgoing is None or (exchange.is_dropped and not outgoing.is_ended):
            return
        try:
            self._send_frames(exchange, outgoing)
        except PayloadTooLarge as error:
            self.fail(exchange, RequestFailed.error_code, RequestFailed.status_hint, str(error))

    def _send_frames(self, exchange: ReplicaRequest, outgoing: OutgoingStream[bytes | memoryview]) -> None:
        source = outgoing.source
        if isinstance(source, BodyPieces) and outgoing.has_credit and exchange.phase is Phase.WORKING:
            self._drain(exchange, source)
        sent_bytes = 0
        while True:
            if outgoing.is_at_window and self._frames.unused_link(exchange.reply) is not None:
                if not outgoing.is_processed:  # on two ways, frames would overtake each other
                    break
                self._frames.find_link(exchange.reply)
                exchange.moved_at = self._frames.now()
            if not self._frames.has_capacity(exchange.reply):
                self._waiting[exchange.reply] = exchange
                break
            frame = outgoing.next_frame()
            if frame is None:
                break
            head, body = frame
            self._frames.post(exchange.reply, head, body)
            sent_bytes += len(body)
            if type(head) is MessageHead and head.last:
                sent_bytes += MESSAGE_COST_BYTES
        if outgoing.is_sent:
            if not exchange.is_dropped:
                self._slots.release(exchange, exchange.response_status)
        elif sent_bytes:
            self._notify_sent(exchange, sent_bytes)

    def send_waiting(self) -> None:
        """Let those that wait go on, as far as there is room."""
        for reply, exchange in list(self._waiting.items()):
            if self._frames.has_capacity(reply):
                del self._waiting[reply]
                self._pump(exchange)

    def _notify_sent(self, exchange: ReplicaRequest, sent_bytes: int) -> None:
        """Notify the writer of sent bytes, if it waits for that."""
        if exchange.phase is not Phase.WORKING:
            return
        exchange.sent_bytes += sent_bytes
        if exchange.pieces is None or exchange.writable is not None:
            self._user_queue(Writable(exchange))

    def _flush(self, exchange: ReplicaRequest) -> None:
        """Send what was written before a failure."""
        outgoing = exchange.outgoing
        if outgoing is not None and isinstance(outgoing.source, BodyPieces) and exchange.pieces:
            self._drain(exchange, outgoing.source)
            self._pump(exchange)

    # -- ends -----------------------------------------------------------------------------------------------------

    def fail(
        self, exchange: ReplicaRequest, error_code: str, status: int, message: str, body: bytes = b""
    ) -> None:
        """Send an error to the router, and drop the exchange."""
        head = ErrorHead(error_code, status, message, len(self._slots.active) - 1)
        sent = self._frames.send(exchange.reply, head, body if len(body) <= FRAME_BODY_BYTES_MAX else b"")
        if not exchange.has_response_started:
            exchange.last_frame = sent
        self.drop(exchange, status)

    def drop(self, exchange: ReplicaRequest, status: int, close_code: int = 1006, reason: str = "") -> None:
        """Drop the exchange. If the user's code still runs, the slot is released when it has ended."""
        if exchange.is_dropped:
            return
        exchange.response_status = status
        exchange.is_dropped = True
        if exchange.phase is Phase.WORKING:
            self._user_queue(Drop(exchange, close_code, reason))
        else:
            self._slots.release(exchange, status)


class Writer(Protocol):
    """The methods of `BusConnection` that other threads may call."""

    @property
    def can_write_shared(self) -> bool:
        """True while messages can be written."""

    def write_shared(self, messages: Sequence[bytes]) -> bool:
        """Send whole messages; False when nothing was sent."""


@final
class DirectResponses:
    """Sends small complete responses from the user loop, on its thread.

    Why: no other thread must wake up before a response is sent. Why only complete ones in one frame: each of these
    requests has exactly one frame to send, so it cannot overtake another one of the same request. Everything else is
    sent by the bus side.
    """

    def __init__(
        self,
        writer: Writer,
        io_queue: Callable[[IoEvent], object],
        take_left: Callable[[Left], None],
        in_flight: Sized,
        now: Callable[[], float],
        *,
        get_link: Callable[[bytes], DirectLink | None] = lambda _reply: None,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        """``io_queue`` receives responses that cannot be sent here. ``take_left`` releases the slot. ``in_flight`` is
        the requests with a slot. ``now`` is `time.monotonic`. ``get_link`` finds the link that the request of
        a reply subject came by. No request is taken from a router while the ``lock`` is held.
        """
        self._lock = nullcontext() if lock is None else lock
        self._writer = writer
        self._io_queue = io_queue
        self._take_left = take_left
        self._in_flight = in_flight
        self._now = now
        self._get_link = get_link
        self._batch: list[bytes] = []
        self._link_batches: dict[DirectLink, list[tuple[bytes, bytes]]] = {}
        self._is_corked = False
        self._lost_response_logger = RateLimitedLogger(_log.warning)

    def send(self, outcome: WholeResponseEvent) -> None:
        """Send the response with all others of this iteration of the loop, or pass it to the bus side."""
        exchange, body, now = outcome.exchange, outcome.body, self._now()
        link = self._get_link(exchange.reply) if exchange.is_direct else None
        if (
            exchange.is_dropped
            or now >= exchange.deadline
            or exchange.outgoing is not None
            or len(body) > SMALL_FRAME_BYTES_MAX
            or (link is None if exchange.is_direct else not self._writer.can_write_shared)
        ):
            self._io_queue(outcome)
            return
        head = ResponseHead(outcome.status, outcome.headers, last=True, in_flight=len(self._in_flight) - 1)
        try:
            frame = encode_frame(head, body)
            message = encode_pub(exchange.reply, b"", frame) if link is None else frame
        except (FrameUnreadable, InvalidSubject):
            self._io_queue(outcome)  # the bus side reports the error
            return
        if len(frame) > SMALL_FRAME_BYTES_MAX:
            self._io_queue(outcome)
            return
        exchange.last_frame = frame
        if (
            link is not None and len(self._in_flight) == 1 and not self._link_batches
        ):  # no other is to join it
            self._send_alone(link, Left(exchange, outcome.status, now), frame)
            return
        if not self._is_corked and not self._batch and not self._link_batches:
            asyncio.get_running_loop().call_soon(self.flush)
        if link is None:
            self._batch.append(message)
        else:
            self._link_batches.setdefault(link, []).append((link_token(exchange.reply), frame))
        # Before it is sent: a caller with the response may send the next request, which must find the slot free.
        self._take_left(Left(exchange, outcome.status, now))
        if link is not None and len(self._link_batches[link]) >= EARLY_FRAMES:
            self._flush_links()

    def _send_alone(self, link: DirectLink, left: Left, frame: bytes) -> None:
        """Send a response at once, and release its slot meanwhile.

        The lock is held because a caller with the response may send the next request, which must find the slot free.
        """
        token = link_token(left.exchange.reply)
        with self._lock:
            if not link.send_now(((token, frame),)):
                link.send_frame(token, frame)
            self._take_left(left)

    def hold(self) -> None:
        """Buffer responses until `flush` is called, which is soon."""
        self._is_corked = True

    def flush(self) -> None:
        """Send the buffered responses."""
        self._is_corked = False
        self._flush_links()
        batch, self._batch = self._batch, []
        if batch and not self._writer.write_shared([b"".join(batch)]):
            # Routers re-request them when the bus is back, as after every lost connection.
            self._lost_response_logger.log(self._now(), "answers_lost", count=len(batch))

    def _flush_links(self) -> None:
        links, self._link_batches = self._link_batches, {}
        for link, frames in links.items():
            if not link.send_now(frames):
                for token, frame in frames:
                    link.send_frame(token, frame)  # what a link loses is asked for over the bus
