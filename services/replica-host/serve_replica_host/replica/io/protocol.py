"""The protocol between a replica and routers: requests, bodies, probes, drain and deadlines."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Final, final

import structlog

from serve_common.direct.link import DirectLink
from serve_common.errors import DeadlineExceeded
from serve_common.protocol.frames import (
    WINDOW_MESSAGES,
    AliveHead,
    BodyHead,
    CancelHead,
    CloseHead,
    CreditHead,
    DialHead,
    ErrorHead,
    FrameUnreadable,
    Head,
    LinkHead,
    MessageHead,
    ProbeHead,
    ReceivedHead,
    RefusedHead,
    RequestHead,
    RequestKind,
    SplitFrame,
    decode_frame,
    encode_frame,
)
from serve_common.protocol.streams import IncomingStream
from serve_common.protocol.subjects import is_inbox
from serve_common.telemetry.log_lines import RateLimitedLogger
from serve_replica_host.ports import Occupancy, RequestMetrics
from serve_replica_host.replica.io.body_frames import STATUS_CANCELLED, BodyFrames
from serve_replica_host.replica.io.frame_sender import FrameSender, Publish
from serve_replica_host.replica.io.request import (
    IoEvent,
    Left,
    Phase,
    ReplicaRequest,
    Taken,
    UserEvent,
)
from serve_replica_host.replica.io.response_frames import ResponseFrames
from serve_replica_host.replica.io.slots import CLOSE_REASON, SERVICE_RESTART, IdleSockets, Slots

_log = structlog.get_logger(__name__)


ROUTER_SILENT_S: Final = 30.0
"""Seconds without frames from a router after which it counts as dead; routers probe silent requests every second."""
_PROBES_WITHIN_S: Final = 2.0
"""Seconds after a reconnect in which routers may probe: they have likely lost their connections too."""
_PROBES_AFTER_CUT_S: Final = 5.0
"""The same after a cut link: its router probes after a second of silence, a program that is busy some seconds later."""
_RECENT_PROBE_S: Final = 0.15
"""Seconds after the last response, and after a drain started, in which a just disconnected router may probe."""
_IN_USE_S: Final = 5.0
"""Seconds since the last response after which a drain need not wait for lost requests."""
_TRAVEL_S: Final = 0.5
"""Maximum seconds of a frame's travel, for deciding whether a request ended before a probe was sent."""
_MOVED_S: Final = 10.0
"""Seconds after a response's move to a link in which its router, when it is busy, may not have seen that."""
_PROBE: Final = encode_frame(ProbeHead())[3:5]
"""What is at this place in the frame of a probe only: the tag of its head."""


@final
class ReplicaProtocol:
    """Receives frames of routers. All methods but `wait_idle` are called under one lock, by either thread.

    Why it never waits and never calls user code: cancels, probes and drains must be processed at once, whatever the
    user's code does. It runs in the read path of the bus connection, in either thread, and so under a lock.

    In flight is what `Slots` holds. Each request leaves it at exactly one place: when its response was sent or, if the
    response is not wanted any more, when its work has ended.
    """

    def __init__(
        self,
        *,
        publish: Publish,
        pending_bytes: Callable[[], int] = lambda: 0,
        user_queue: Callable[[UserEvent], object],
        now: Callable[[], float],
        metrics: RequestMetrics,
        max_concurrent_queries: int,
        streams_bodies: bool = False,
    ) -> None:
        """``pending_bytes`` is what was published and the server has yet to take. ``now`` is `time.monotonic`;
        ``streams_bodies``: HTTP handlers may start before a body is complete.
        """
        self.max_concurrent_queries = max_concurrent_queries
        self.is_draining = False
        self._user_queue = user_queue
        self._now = now
        self._metrics = metrics
        self._slots = Slots(now, metrics, self._start_waiting)
        self._waiting = self._slots.waiting
        self._exchanges = self._slots.active
        self._frames = FrameSender(publish, now, pending_bytes)
        self._links = self._frames.links
        self.get_link: Final[Callable[[bytes], DirectLink | None]] = self._links.get
        """The link that the request with a reply subject came by; on any thread."""
        self._slots.on_left = self._forget_link
        self.offer_link: Callable[[bytes, str], LinkHead] = lambda _reply, _machine: LinkHead()
        """Answers a router that dials; set with `use_links`."""
        self._responses = ResponseFrames(self._slots, self._frames, user_queue)
        self._bodies = BodyFrames(
            self._responses, self._frames, user_queue, now, streams_bodies=streams_bodies
        )
        self._idle_sockets = IdleSockets()
        self._bad_frames = RateLimitedLogger(_log.warning)
        self._is_disconnected = False
        self._reconnects = 0
        self._drain_started_at = float("-inf")
        self._connected_at = float("-inf")
        self._link_lost_at = float("-inf")

    @property
    def in_flight(self) -> int:
        """Number of requests that hold a slot."""
        return len(self._exchanges)

    @property
    def active(self) -> Sized:
        """The requests that hold a slot."""
        return self._exchanges

    def occupancy(self) -> Occupancy:
        """The current load, without the state of the connection."""
        started = [exchange for exchange in self._exchanges.values() if exchange.has_response_started]
        sockets = sum(exchange.head.kind is RequestKind.WEBSOCKET for exchange in started)
        return Occupancy(
            ongoing_s=self._slots.ongoing_seconds(self._now()),
            in_flight=len(self._exchanges),
            limit=0 if self.is_draining else self.max_concurrent_queries,
            waiting=len(self._waiting),
            streams=len(started) - sockets,
            sockets=sockets,
        )

    async def wait_idle(self) -> None:
        """Wait until nothing is in flight."""
        await self._slots.wait_idle()

    def bus_lost(self) -> None:
        """The bus has disconnected: no frames can be received."""
        self._is_disconnected = True
        self._reconnects += 1

    def bus_joined(self) -> None:
        """The bus has (re)connected."""
        self._is_disconnected = False
        self._connected_at = self._now()

    def seconds_until_probed(self) -> float:
        """Seconds in which routers may still re-request responses that were lost with a bus connection, theirs or ours,
        or with a direct link; or have not yet all parts of one.

        Call it again afterwards: a disconnect meanwhile extends the time.
        """
        now = self._now()
        if self._is_disconnected:
            return _PROBES_WITHIN_S  # from the time of the reconnect
        until = self._connected_at + _PROBES_WITHIN_S if self._reconnects else now
        until = max(until, self._link_lost_at + _PROBES_AFTER_CUT_S)
        if self._slots.unacknowledged:
            until = max(until, now + _RECENT_PROBE_S)
        last_at = self._slots.recent.last_at
        if now - last_at < _IN_USE_S:
            until = max(until, last_at + _RECENT_PROBE_S, self._drain_started_at + _RECENT_PROBE_S)
        return max(0.0, until - now)

    # -- direct links ---------------------------------------------------------------------------------------------

    def use_links(
        self,
        offer: Callable[[bytes, str], LinkHead],
        link_to: Callable[[bytes], DirectLink | None],
    ) -> None:
        """Take frames of direct links too: ``offer`` answers a `DialHead`, ``link_to`` finds the link of an inbox."""
        self.offer_link = offer
        self._frames.link_to = link_to

    def link_lost(self, link: DirectLink) -> None:
        """A link has ended: its routers probe over the bus, if they have not left it before."""
        self._frames.drop_link(link)
        if not link.has_parted:
            self._link_lost_at = self._now()
        self._idle_sockets.restart()

    def handle_link_frame(
        self, link: DirectLink, reply: bytes, payload: bytes | memoryview | SplitFrame
    ) -> None:
        """Process a frame that came over ``link`` for the request of ``reply``."""
        links = self._links
        links[reply] = link
        if self._frames.left:
            self._frames.left.discard(link)
        self._handle(reply, payload)
        exchange = self._exchanges.get(reply)
        if exchange is not None:
            exchange.is_direct = True
        elif reply not in self._waiting and reply not in self._slots.unacknowledged:
            links.pop(reply, None)

    def _forget_link(self, reply: bytes) -> None:
        if self._links:
            self._links.pop(reply, None)

    # -- frames from routers --------------------------------------------------------------------------------------

    def handle_bus_frame(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        """Process a message on the replica's subject. A router that probes there has left its link."""
        if (
            self._links
            and reply in self._links
            and payload.startswith(_PROBE, 3)
            and not self._is_from_before(reply, payload)
        ):
            self._frames.leave_link(reply)
        self.handle_frame(subject, reply, payload, headers)

    def _is_from_before(self, reply: bytes, probe: bytes) -> bool:
        """True for a probe that its router may have sent before it saw that the response had moved to the link."""
        exchange = self._exchanges.get(reply) or self._slots.unacknowledged.get(reply)
        is_recent = exchange is not None and self._now() - exchange.moved_at < _MOVED_S
        return is_recent and not _has_lost(probe)

    def handle_frame(self, _subject: bytes, reply: bytes, payload: bytes, _headers: bytes | None) -> None:
        """Process a frame."""
        if is_inbox(reply):
            self._handle(reply, payload)
        else:
            self._metrics.count_refused("reply_subject")
            text = reply[:200].decode("utf-8", "replace")
            self._bad_frames.log(self._now(), "frame_without_inbox", reply=text)

    def _handle(self, reply: bytes, payload: bytes | memoryview | SplitFrame) -> None:
        try:
            head, body = decode_frame(payload)
        except FrameUnreadable as error:
            self._bad_frames.log(self._now(), "frame_unreadable", error=str(error))
            return
        if type(head) is RequestHead:
            self._on_request(reply, head, body)
            return
        if type(head) is DialHead:
            self._frames.send(reply, self.offer_link(reply, head.machine))
            return
        if type(head) is ReceivedHead:
            self._frames.take_received(reply, head.total_bytes)
            self._responses.send_waiting()
            return
        exchange = self._exchanges.get(reply)
        if exchange is not None:
            exchange.last_seen_at = self._now()
            self._on_frame_of_request(exchange, head, body)
        elif reply in self._waiting:
            if type(head) is CancelHead:
                self._cancel_waiting(reply)
            elif type(head) is ProbeHead:
                self._frames.send(reply, AliveHead())
        elif reply in self._slots.unacknowledged:
            self._on_frame_of_ended(reply, head)
        elif type(head) is ProbeHead:
            self._on_probe(reply, head.age_s)

    def _on_frame_of_request(self, exchange: ReplicaRequest, head: Head, body: bytes | memoryview) -> None:
        match head:
            case BodyHead():
                self._bodies.take_body(exchange, head, body)
            case MessageHead():
                self._bodies.take_message(exchange, head, body)
            case CreditHead(frames, _, limit):
                self._responses.allow(exchange, frames, limit)
            case CancelHead():
                self._responses.drop(exchange, STATUS_CANCELLED)
            case CloseHead():
                self._bodies.take_close(exchange, head)
            case ProbeHead():
                if exchange.last_frame:  # it was answered, and the unwanted work goes on
                    self._frames.send_again(exchange.reply, exchange.last_frame)
                    return
                self._responses.respond_to_probe(exchange, head)
            case _:
                self._bad_frames.log(self._now(), "frame_unexpected", kind=type(head).__name__)

    def _on_frame_of_ended(self, reply: bytes, head: Head) -> None:
        """Process a frame about a response that was sent to its end, which its router may not have yet."""
        exchange = self._slots.unacknowledged[reply]
        exchange.last_seen_at = self._now()
        match head:
            case CreditHead(frames, _, limit):
                self._responses.allow(exchange, frames, limit)
            case ProbeHead():
                self._responses.respond_to_probe(exchange, head)
            case _:
                pass  # it has ended
        if type(head) is CancelHead or exchange.outgoing is None or exchange.outgoing.is_acknowledged:
            self._slots.forget(reply)

    def _on_request(self, reply: bytes, head: RequestHead, body: bytes | memoryview) -> None:
        exchanges = self._exchanges
        if reply in exchanges or reply in self._slots.recent or reply in self._waiting.by_reply:
            return  # a duplicate: the request must not run twice
        if self.is_draining or len(exchanges) >= self.max_concurrent_queries:
            if self._may_wait(head, body):
                exchange = ReplicaRequest(reply, head, self._now())
                exchange.body = bytes(body)
                self._waiting.add(exchange)
                return
            reason = "draining" if self.is_draining else "busy"
            self._metrics.count_refused(reason)
            self._frames.send(reply, RefusedHead(reason, self.in_flight))
            return
        exchange = ReplicaRequest(reply, head, self._now())
        self._slots.take(exchange)
        if head.kind is RequestKind.WEBSOCKET:
            exchange.messages_in = IncomingStream(WINDOW_MESSAGES, first=1)
            self._work_on(exchange)
        elif len(body) == head.body_bytes:
            exchange.body = bytes(body)
            self._work_on(exchange)
        else:
            self._bodies.start(exchange, body)

    # -- requests that wait for a slot --

    def _may_wait(self, head: RequestHead, body: bytes | memoryview) -> bool:
        return (
            head.may_queue
            and not self.is_draining
            and not self._waiting.is_full
            and head.kind is not RequestKind.WEBSOCKET
            and len(body) == head.body_bytes
        )

    def _start_waiting(self) -> None:
        """Start queued requests, as slots are free."""
        while self._waiting and len(self._exchanges) < self.max_concurrent_queries:
            exchange = self._waiting.take_first()
            if self._now() >= exchange.deadline:
                self._refuse_expired(exchange)
            else:
                self._slots.take(exchange)
                self._work_on(exchange)

    def _cancel_waiting(self, reply: bytes) -> None:
        exchange = self._waiting.discard(reply)
        if exchange is not None:
            self._slots.leave_waiting(exchange)

    def _refuse_expired(self, exchange: ReplicaRequest) -> None:
        self._slots.leave_waiting(exchange)
        message = f"the replica had no slot within {exchange.head.timeout_s:g} s"
        head = ErrorHead(DeadlineExceeded.error_code, 504, message, self.in_flight)
        self._slots.recent.add(exchange.reply, self._frames.send(exchange.reply, head), self._now())

    def start_drain(self) -> None:
        """Refuse new and queued requests from now on."""
        self.is_draining = True
        self._drain_started_at = self._now()
        for exchange in self._waiting.take_all():
            self._slots.leave_waiting(exchange)
            self._metrics.count_refused("draining")
            self._frames.send(exchange.reply, RefusedHead("draining", self.in_flight))

    # -- probes --

    def _on_probe(self, reply: bytes, age_s: float) -> None:
        """Answer a probe for a request that is not in flight (any more)."""
        recent = self._slots.recent
        response = recent.response(reply)
        if response:
            self._frames.send_again(reply, response)
        elif age_s and reply not in recent and recent.covers(self._now() - age_s - _TRAVEL_S):
            # If it still arrives, it is not started.
            frame = self._frames.send(reply, RefusedHead("never_begun", self.in_flight))
            recent.add(reply, frame, self._now())
        else:
            self._frames.send(reply, RefusedHead("unknown", self.in_flight))

    def _work_on(self, exchange: ReplicaRequest) -> None:
        exchange.phase = Phase.WORKING
        self._user_queue(exchange)

    # -- time -----------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Fail requests past their deadlines; called several times a second while any are in flight."""
        now = self._now()
        if self._waiting:
            for exchange in self._waiting.take_late(now):
                self._refuse_expired(exchange)
            self._start_waiting()  # there may be more slots than before
        for exchange in list(self._exchanges.values()):
            if exchange.is_dropped:
                continue
            if self._is_late(exchange, now):
                self._fail_late(exchange)
            elif (
                not self._is_disconnected
                and now - max(exchange.last_seen_at, self._connected_at) >= ROUTER_SILENT_S
            ):
                self._responses.drop(exchange, STATUS_CANCELLED)
        if self.is_draining:
            watched = () if self._is_disconnected else self._exchanges.values()
            for exchange in self._idle_sockets.find(watched, now):
                self._responses.close_socket(exchange, SERVICE_RESTART, CLOSE_REASON)
        if not self._is_disconnected:
            self._slots.forget_old(now)

    def send_waiting(self) -> None:
        """Go on with streams that waited for their way; called every few milliseconds while any are in flight."""
        self._responses.send_waiting()

    @staticmethod
    def _is_late(exchange: ReplicaRequest, now: float) -> bool:
        return now >= exchange.deadline and not exchange.has_response_started

    def _fail_late(self, exchange: ReplicaRequest) -> None:
        message = f"the replica had no answer within {exchange.head.timeout_s:g} s"
        self._responses.fail(exchange, DeadlineExceeded.error_code, 504, message)

    # -- outcomes of the user side --------------------------------------------------------------------------------

    def handle_outcome(self, outcome: IoEvent) -> None:
        """Process an outcome of the user side; for a dropped exchange only the end of the work matters."""
        exchange = outcome.exchange
        if type(outcome) is not Taken:
            has_left = exchange.is_dropped or type(outcome) is Left
            if not has_left and self._is_late(exchange, self._now()):
                # What a call of a handle raised at this same deadline would be a 500 of the application.
                self._fail_late(exchange)
            self._responses.take(outcome)
            return
        if exchange.incoming is not None and not exchange.is_dropped:
            self._bodies.grant_credit(exchange, exchange.incoming, outcome.frames)


def _has_lost(probe: bytes) -> bool:
    try:
        head, _ = decode_frame(probe)
    except FrameUnreadable:
        return False
    return type(head) is ProbeHead and head.has_lost
