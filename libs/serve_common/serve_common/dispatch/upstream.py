"""Frames between a router and replicas: requests, bodies, credit, cancels and probes out; responses back. And wake
messages to the controller, for a backend without replicas.

Why apart: everything that is sent may find the bus disconnected, and raises; the reaction is decided elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, final

import msgspec
import structlog

from serve_common.direct.dialing import DirectLinks
from serve_common.direct.link import LARGE_BYTES_MIN, DirectLink, link_token
from serve_common.direct.pipes import PipedBytes
from serve_common.dispatch.admission import FailureDetector
from serve_common.dispatch.calls import (
    Attempt,
    Call,
    CallRegistry,
    DataPlaneBus,
    Replies,
    Response,
    ResponseBody,
)
from serve_common.dispatch.errors import ReplicaError, ResponseUnusable
from serve_common.dispatch.receipts import Receipts
from serve_common.dispatch.sockets import ReplicaSocket
from serve_common.errors import DeadlineExceeded, ReplicaDied
from serve_common.names import BackendTag, ReplicaTag
from serve_common.nats.options import NotConnected, OutboundFull, PayloadTooLarge
from serve_common.protocol.frames import (
    SMALL_FRAME_BYTES_MAX,
    AliveHead,
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
    RequestKind,
    ResponseHead,
    decode_frame,
    encode_frame,
)
from serve_common.protocol.reports import Wake
from serve_common.protocol.streams import IncomingStream, RetainedBytes, SequenceCheck
from serve_common.protocol.subjects import Subjects
from serve_common.routing.queues import Refusal
from serve_common.runtime.settings import DirectMode
from serve_common.telemetry.log_lines import RateLimitedLogger

_log = structlog.get_logger(__name__)

ACCEPTED: Final = 101
"""The status by which a replica accepts a WebSocket."""
_REFUSALS: Final = {"busy": Refusal.BUSY, "draining": Refusal.DRAINING}
_REPLICAS_MAX: Final = 10_000
_TIMEOUT_S_MIN: Final = 0.001
_LINK_SILENT_S: Final = 8.0
"""Seconds of silence, in spite of probes each second, after which a link counts as dead. The system ends one whose peer
acknowledges nothing sooner; this is for what acknowledges and stands still."""
_AGE_S_MIN: Final = 0.001
"""Least age in a probe: uvloop's clock counts milliseconds, and 0 in a `ProbeHead` is unknown."""


@final
class Outgoing:
    """Publishes the frames of calls."""

    def __init__(
        self,
        bus: DataPlaneBus,
        replies: Replies,
        subjects: Subjects,
        direct: DirectMode = DirectMode.OFF,
    ) -> None:
        """``direct`` says which frames take direct links."""
        self.links: Final = DirectLinks(direct, replies, bus.publish, self._link_lost)
        self.on_link_lost: Callable[[DirectLink], None] = lambda _link: None
        """Called when a link has ended, after its last frame; set by the dispatcher."""
        self._bus = bus
        self._replies = replies
        self._subjects = subjects
        self._loop = asyncio.get_running_loop()
        self._subject_cache: dict[ReplicaTag, bytes] = {}
        self.receipts: Final = Receipts(bus, replies)
        self.retained: Final = RetainedBytes()
        """What the sockets' messages hold."""

    @property
    def is_connected(self) -> bool:
        """True while anything can be sent."""
        return self._bus.is_connected

    @property
    def is_bus_responsive(self) -> bool:
        """False while silence of a replica proves nothing."""
        return self._bus.is_responding

    def start(self, call: Call, replica: ReplicaTag, *, is_alone: bool = False) -> None:
        """Send the request to ``replica``: a new attempt. ``is_alone`` as of `DirectLink.send`.

        Raises DeadlineExceeded, InboxFull, FrameUnreadable when the head is too large, and as `DataPlaneBus.publish`;
        the caller then drops the attempt.
        """
        now = self._loop.time()
        spec = call.spec
        if now >= spec.deadline:
            raise DeadlineExceeded("the deadline is over")
        token, reply = self._replies.new_reply(call.take_reply, call.take_no_responders)
        subject = self._subject_cache.get(replica) or self._make_subject(replica)
        attempt = call.attempt = Attempt(replica, subject, token, reply, spec)
        attempt.sent_at = attempt.last_seen_at = attempt.probed_at = now
        traceparent = spec.traceparent
        if spec.trace is not None:
            traceparent = spec.trace.attempt_started(replica, may_queue=call.may_queue)
        upload = spec.upload
        outgoing = attempt.outgoing
        first = spec.body if outgoing is None else outgoing.opening()
        head = RequestHead(
            spec.kind,
            spec.method,
            spec.path,
            spec.route,
            spec.query,
            spec.headers,
            max(_TIMEOUT_S_MIN, spec.deadline - now),
            len(spec.body) if upload is None else upload.announced_bytes,
            spec.endpoint.tag,
            spec.request_id,
            traceparent,
            spec.client,
            spec.scheme,
            spec.call,
            call.may_queue,
        )
        is_large = outgoing is not None or len(first) >= LARGE_BYTES_MIN or spec.kind is RequestKind.WEBSOCKET
        attempt.link = self.links.for_request(replica, attempt.subject, is_large=is_large)
        if upload is not None:
            upload.takes_pipe = attempt.link is not None and attempt.link.splices
        self._publish(attempt, attempt.link, head, first, is_alone=is_alone)
        if outgoing is not None:
            self.send_pieces(attempt)

    def _publish(
        self,
        attempt: Attempt,
        link: DirectLink | None,
        head: Head,
        body: bytes | memoryview | PipedBytes = b"",
        *,
        is_alone: bool = False,
    ) -> None:
        """Send a frame over ``link``, or over the bus; raises as `DataPlaneBus.publish`."""
        if link is not None and link.send(link_token(attempt.reply), head, body, is_alone=is_alone):
            attempt.may_have_arrived = True
        else:
            if type(body) is PipedBytes:
                body = body.read()
                if attempt.upload is not None:
                    attempt.upload.takes_pipe = False
            self._bus.publish(attempt.subject, encode_frame(head, body), attempt.reply)

    def _link_lost(self, link: DirectLink) -> None:
        self.on_link_lost(link)

    def send_pieces(self, attempt: Attempt) -> None:
        """Send as much of the body as the credit allows; raises as `DataPlaneBus.publish`."""
        outgoing = attempt.outgoing
        while outgoing is not None and (frame := outgoing.next_frame()) is not None:
            self._publish(attempt, attempt.link, *frame)

    def send_frame(self, call: Call, head: Head, body: bytes | memoryview = b"") -> None:
        """Send a frame to the call's replica; raises as `DataPlaneBus.publish`. Does nothing without an attempt."""
        attempt = call.attempt
        if attempt is not None:
            self._publish(attempt, attempt.link, head, body)

    def grant_credit(self, call: Call, credit: CreditHead) -> None:
        """Allow the replica more frames; a credit that is lost is part of the next probe."""
        if call.attempt is not None:
            self._try_publish(call.attempt, credit)

    def probe(self, call: Call, *, has_lost: bool = False) -> None:
        """Probe whether the call's replica still knows it, and tell it what has arrived of the response; ``has_lost``:
        let it send the rest again.
        """
        attempt = call.attempt
        if attempt is None:
            return
        now = attempt.probed_at = self._loop.time()
        link = attempt.response_link or attempt.link
        if link is not None and now - max(link.last_received_at, attempt.sent_at) > _LINK_SILENT_S:
            link.close()  # its requests are probed over the bus
            return
        incoming = None if call.response_reader is None else call.response_reader.incoming
        received, limit = (0, 0) if incoming is None else (incoming.next_sequence, incoming.limit)
        attempt.probed_sent = _sent_frames(call)
        age_s = max(now - attempt.sent_at, _AGE_S_MIN)
        if self._try_publish(attempt, ProbeHead(age_s, received, limit, has_lost)):
            attempt.probes += 1

    def cancel(self, call: Call) -> None:
        """Notify the call's replica that its response is no longer wanted."""
        if call.attempt is not None:
            call.attempt.is_cancelled = self._try_publish(call.attempt, CancelHead())

    def wake(self, backend_tag: BackendTag, waiting: int) -> bool:
        """Report that ``waiting`` requests wait for a backend without replicas; False when the bus does not take it."""
        payload = msgspec.json.encode(Wake(backend_tag=backend_tag, waiting=waiting))
        try:
            self._bus.publish(self._subjects.wake(backend_tag), payload)
        except (NotConnected, OutboundFull):
            return False
        return True

    def drop(self, call: Call) -> None:
        """End the attempt on this side: later replies to it are dropped."""
        attempt = call.attempt
        if attempt is not None:
            if attempt.is_cancelled and attempt.response_link is None:
                self.receipts.count_late(attempt)
            else:
                self._replies.forget(attempt.token)
            if attempt.upload is not None:
                attempt.upload.restart()
            if isinstance(call.response_reader, ReplicaSocket):
                call.response_reader.release()
            call.attempt = None
            if call.spec.trace is not None:
                call.spec.trace.attempt_ended(call.status)

    def _try_publish(self, attempt: Attempt, head: Head) -> bool:
        """Publish a frame that may be repeated or omitted; False when the bus does not take it."""
        try:
            self._publish(attempt, attempt.response_link or attempt.link, head)
        except (NotConnected, OutboundFull):
            return False
        return True

    def _make_subject(self, replica: ReplicaTag) -> bytes:
        if len(self._subject_cache) >= _REPLICAS_MAX:
            self._subject_cache.clear()
        subject = self._subject_cache[replica] = self._subjects.replica(replica).encode()
        return subject


def _sent_frames(call: Call) -> int:
    """Number of the next frame to the call's replica."""
    if isinstance(call.response_reader, ReplicaSocket):
        return call.response_reader.outgoing.sent
    return 0 if call.attempt is None or call.attempt.outgoing is None else call.attempt.outgoing.sent


@final
class ResponseReader:
    """Processes the frames that replicas send for calls, in the bus' read path."""

    def __init__(self, registry: CallRegistry, outgoing: Outgoing, failure_detector: FailureDetector) -> None:
        self._registry = registry
        self._outgoing = outgoing
        self._failure_detector = failure_detector
        self._suspects = failure_detector.suspects
        self._loop = asyncio.get_running_loop()
        self._bad_frames = RateLimitedLogger(_log.warning)

    def take(self, call: Call, payload: bytes, is_direct: bool) -> None:  # noqa: FBT001 - a callback, for each frame
        """Process a frame on the reply subject of the call's current attempt; ``is_direct``: a link brought it."""
        attempt = call.attempt
        if attempt is None:
            return
        try:
            head, body = decode_frame(payload)
        except FrameUnreadable as error:
            self._log_bad_frame("frame_unreadable", attempt, str(error))
            self._registry.fail(call, ResponseUnusable("the replica's answer is not a frame"))
            return
        if self._suspects:
            self._failure_detector.on_sign_of_life(attempt.replica)
        if not is_direct and len(payload) > SMALL_FRAME_BYTES_MAX:
            self._outgoing.receipts.count(attempt.replica, attempt.subject, attempt.reply, payload)
        if (
            type(head) is ResponseHead
            and head.last
            and call.response_reader is None
            and (head.status != ACCEPTED or call.spec.kind is not RequestKind.WEBSOCKET)
        ):
            call.status = head.status
            # Release the slot first: the callback may send the next request at once.
            self._registry.responded(call)
            call.on_response(call, Response(head.status, head.headers, body, None))
            return
        attempt.last_seen_at = self._loop.time()
        attempt.may_have_arrived = True
        self._take_other(call, attempt, head, body, is_direct=is_direct)

    def _take_other(
        self, call: Call, attempt: Attempt, head: Head, body: bytes | memoryview, *, is_direct: bool
    ) -> None:
        """Process what is no whole response."""
        match head:
            case MessageHead() | CloseHead():
                self._take_socket_frame(call, head, body)
            case ResponseHead(status, headers):
                self._open_stream(call, status, headers, body, is_direct=is_direct)
            case BodyHead(sequence, last):
                self._take_piece(call, sequence, body, last=last, is_direct=is_direct)
            case CreditHead(frames, _, limit):
                self._take_credit(call, attempt, frames, limit)
            case RefusedHead(reason):
                self._take_refusal(call, reason)
            case ErrorHead(error_code, status, message):
                self._registry.end_with(call, ReplicaError(error_code, status, message, bytes(body)))
            case AliveHead():
                self._prove_alive(call)
                self._take_progress(call, attempt, head)
                self._check_arrived(call, head.sent)
            case _:
                self._log_bad_frame("frame_unexpected", attempt, type(head).__name__)

    def _prove_alive(self, call: Call) -> None:
        """The replica responds, which is all that an open circuit waits for."""
        if call.router is not None and call.router.circuit.is_open:
            call.router.response_started(call.key)

    def _choose_response_link(self, call: Call, *, is_direct: bool) -> None:
        """What is said about a response goes its way; a stream that comes over the bus is worth a link."""
        attempt = call.attempt
        if attempt is None:
            return
        if is_direct:
            attempt.response_link = self._outgoing.links.get(attempt.replica)
        else:
            self._outgoing.links.dial(attempt.replica, attempt.subject)

    def _open_stream(
        self, call: Call, status: int, headers: Headers, body: bytes | memoryview, *, is_direct: bool
    ) -> None:
        if call.response_reader is not None:
            return  # sent again, because it was thought to be lost
        call.status = status
        self._choose_response_link(call, is_direct=is_direct)
        self._prove_alive(call)
        if status == ACCEPTED and call.spec.kind is RequestKind.WEBSOCKET:
            socket = call.response_reader = ReplicaSocket(
                partial(self._send_frame, call),
                partial(self._outgoing.grant_credit, call),
                partial(self._registry.responded, call),
                self._outgoing.retained,
            )
            call.on_response(call, Response(status, headers, body, None, socket))
            return
        call.response_reader = ResponseBody(body, partial(self._outgoing.grant_credit, call))
        call.on_response(call, Response(status, headers, body, call.response_reader))

    def _send_frame(self, call: Call, head: Head, body: bytes | memoryview) -> None:
        """Send a frame of a socket to its replica; a failure also fails the call, but for one that passes."""
        try:
            self._outgoing.send_frame(call, head, body)
        except NotConnected:
            pass  # it is probed after the reconnect, and then goes on
        except (OutboundFull, PayloadTooLarge) as error:
            self._registry.fail(call, error)
            raise

    def _take_piece(
        self, call: Call, sequence: int, piece: bytes | memoryview, *, last: bool, is_direct: bool
    ) -> None:
        response, attempt = call.response_reader, call.attempt
        if is_direct and attempt is not None and attempt.response_link is None:
            # It began on the bus.
            attempt.response_link = self._outgoing.links.get(attempt.replica)
        if not isinstance(response, ResponseBody):
            self._find_gap(call, None)
        elif self._is_next(call, response.incoming, sequence):
            response.add(piece, last=last)
            if last:
                self._outgoing.grant_credit(call, response.incoming.acknowledge())
                self._registry.responded(call)

    def _is_next(self, call: Call, incoming: IncomingStream, sequence: int) -> bool:
        """True when a frame is the next one of its direction; else the call learns what that means."""
        order = incoming.take(sequence)
        if order is SequenceCheck.LOST:
            self._find_gap(call, incoming)
        elif order is SequenceCheck.TOO_MANY:
            self._registry.fail(call, ResponseUnusable("the replica sends more than it was allowed to"))
        return order is SequenceCheck.NEXT

    def _find_gap(self, call: Call, incoming: IncomingStream | None) -> None:
        """A frame has arrived and one before it has not, as when a connection is cut: let the replica send it again."""
        if incoming is not None:
            is_new = incoming.is_new_gap()
        else:  # its head was lost
            attempt = call.attempt
            is_new = attempt is not None and not attempt.is_head_missing
            if attempt is not None:
                attempt.is_head_missing = True
        if is_new:
            self._outgoing.probe(call, has_lost=True)

    def _take_credit(self, call: Call, attempt: Attempt, frames: int, limit: int) -> None:
        if isinstance(call.response_reader, ReplicaSocket):
            call.response_reader.allow(frames, limit)
            return
        if attempt.outgoing is not None:
            attempt.outgoing.allow(frames, limit)
            self._send_pieces(call, attempt)

    def _check_arrived(self, call: Call, sent: int) -> None:
        """Let the replica send again what it had ``sent`` before this and has not arrived."""
        reader = call.response_reader
        if sent > (0 if reader is None else reader.incoming.next_sequence):
            self._outgoing.probe(call, has_lost=True)

    def _take_progress(self, call: Call, attempt: Attempt, alive: AliveHead) -> None:
        """Send again what the replica lacks: what it had not received when it got a probe, or a later frame."""
        received, limit = alive.received, alive.limit
        socket = call.response_reader if isinstance(call.response_reader, ReplicaSocket) else None
        outgoing = attempt.outgoing if socket is None else socket.outgoing
        if outgoing is None or not received:
            return
        lacks_some = alive.has_gap or received < attempt.probed_sent
        if (lacks_some or outgoing.is_paused) and not outgoing.resume(received):
            self._registry.fail(call, ReplicaDied("a part of the request was lost"))
        elif socket is not None:
            socket.allow(0, limit)
        else:
            outgoing.allow(0, limit)
            self._send_pieces(call, attempt)

    def send_more(self, call: Call) -> None:
        """Send more of the request's body, as far as the credit allows."""
        attempt = call.attempt
        if attempt is not None:
            self._send_pieces(call, attempt)

    def _send_pieces(self, call: Call, attempt: Attempt) -> None:
        try:
            self._outgoing.send_pieces(attempt)
        except NotConnected:
            pass  # it is probed after the reconnect, and then goes on
        except (OutboundFull, PayloadTooLarge) as error:
            self._registry.fail(call, error)

    def _take_socket_frame(
        self, call: Call, head: MessageHead | CloseHead, piece: bytes | memoryview
    ) -> None:
        socket = call.response_reader
        if not isinstance(socket, ReplicaSocket):
            self._registry.fail(
                call, ResponseUnusable("the replica speaks as to a socket, which this is not")
            )
        elif isinstance(head, MessageHead):
            if self._is_next(call, socket.incoming, head.sequence):
                socket.add(head, piece)
        elif head.sequence > socket.incoming.next_sequence:
            self._find_gap(call, socket.incoming)
        else:
            socket.closed(head.code, head.reason)
            self._outgoing.grant_credit(call, socket.incoming.acknowledge(head.sequence + 1))
            self._registry.responded(call)

    def _take_refusal(self, call: Call, reason: str) -> None:
        refusal = _REFUSALS.get(reason)
        if reason == "never_begun":
            self._registry.never_started(call)
        elif refusal is None:
            self._registry.request_unknown(call)
        else:
            self._registry.refused(call, refusal)

    def _log_bad_frame(self, event: str, attempt: Attempt, reason: str) -> None:
        self._bad_frames.log(self._loop.time(), event, replica_tag=attempt.replica, reason=reason)
