"""Frames from a router to replicas: requests, the pieces of their bodies, credit, cancels and probes. And wake
messages to the controller, for a backend without replicas.

Why apart: everything here may find the bus disconnected, and raises; the reaction is decided elsewhere.
"""

from __future__ import annotations

import asyncio
from typing import Final, final

import msgspec

from serve_common.dispatch.calls import Attempt, Call, DataPlaneBus, Replies
from serve_common.errors import DeadlineExceeded
from serve_common.names import BackendTag, ReplicaTag
from serve_common.nats.options import NotConnected, OutboundFull
from serve_common.protocol.frames import (
    BodyHead,
    CancelHead,
    CreditHead,
    Head,
    ProbeHead,
    RequestHead,
    encode_frame,
)
from serve_common.protocol.reports import Wake
from serve_common.protocol.subjects import Subjects

_SUBJECTS_CACHED_MAX: Final = 10_000
_TIMEOUT_S_MIN: Final = 0.001


@final
class Outgoing:
    """Publishes the frames of calls."""

    def __init__(self, bus: DataPlaneBus, replies: Replies, subjects: Subjects) -> None:
        self._bus = bus
        self._replies = replies
        self._subjects = subjects
        self._loop = asyncio.get_running_loop()
        self._subject_cache: dict[ReplicaTag, bytes] = {}
        self._credits = 0
        """Credit frames sent so far."""

    @property
    def is_connected(self) -> bool:
        """True while anything can be sent."""
        return self._bus.is_connected

    @property
    def is_bus_responsive(self) -> bool:
        """False while silence of a replica proves nothing."""
        return self._bus.is_responding

    def start(self, call: Call, replica: ReplicaTag) -> None:
        """Send the request to ``replica``: a new attempt.

        Raises DeadlineExceeded, InboxFull, FrameUnreadable when the head is too large, and as `DataPlaneBus.publish`;
        the caller then drops the attempt.
        """
        now = self._loop.time()
        spec = call.spec
        if now >= spec.deadline:
            raise DeadlineExceeded("the deadline is over")
        token, reply = self._replies.new_reply(call.take_reply, call.take_no_responders)
        attempt = call.attempt = Attempt(replica, self._subject(replica), token, reply, spec)
        attempt.sent_at = attempt.last_seen_at = attempt.probed_at = now
        traceparent = spec.traceparent
        if spec.trace is not None:
            traceparent = spec.trace.attempt_started(replica, may_queue=call.may_queue)
        upload = spec.upload
        first = attempt.pieces[0] if upload is None else upload.piece(0) or b""
        head = RequestHead(
            spec.kind,
            spec.method,
            spec.path,
            spec.route,
            spec.query,
            spec.headers,
            max(spec.deadline - now, _TIMEOUT_S_MIN),
            len(spec.body) if upload is None else upload.announced_bytes,
            spec.endpoint.tag,
            spec.request_id,
            traceparent,
            spec.client,
            spec.scheme,
            spec.call,
            call.may_queue,
        )
        self._bus.publish(attempt.subject, encode_frame(head, first), reply)
        attempt.sent_pieces = 1
        attempt.credit -= 1
        if not attempt.is_body_sent:
            self.send_pieces(attempt)

    def send_pieces(self, attempt: Attempt) -> None:
        """Send as much of the body as the credit allows; raises as `DataPlaneBus.publish`."""
        upload = attempt.upload
        while attempt.credit > 0 and not attempt.is_body_sent:
            at = attempt.sent_pieces
            if upload is None:
                piece: bytes | memoryview | None = attempt.pieces[at]
                last = at + 1 == len(attempt.pieces)
            else:
                piece = upload.piece(at)
                if piece is None:
                    return
                last = upload.is_last(at)
            self._bus.publish(attempt.subject, encode_frame(BodyHead(at, last), piece or b""), attempt.reply)
            attempt.sent_pieces += 1
            attempt.credit -= 1

    def send_frame(self, call: Call, head: Head, body: bytes | memoryview = b"") -> None:
        """Send a frame to the call's replica; raises as `DataPlaneBus.publish`. Does nothing without an attempt."""
        attempt = call.attempt
        if attempt is not None:
            self._bus.publish(attempt.subject, encode_frame(head, body), attempt.reply)

    def grant_credit(self, call: Call, frames: int) -> None:
        """Allow the replica ``frames`` more frames; credit that the bus does not take is sent with the next one."""
        call.credit_owed += frames
        attempt = call.attempt
        if attempt is None or not call.credit_owed:
            return
        self._credits += 1
        if self._try_publish(attempt, CreditHead(call.credit_owed, self._credits)):
            attempt.has_probed = True
            call.credit_owed = 0

    def probe(self, call: Call) -> None:
        """Probe whether the call's replica still knows it."""
        attempt = call.attempt
        if attempt is not None:
            now = attempt.probed_at = self._loop.time()
            attempt.has_probed = True
            self._try_publish(attempt, ProbeHead(now - attempt.sent_at))

    def cancel(self, call: Call) -> None:
        """Notify the call's replica that its response is no longer wanted."""
        if call.attempt is not None:
            self._try_publish(call.attempt, CancelHead())

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
        if call.attempt is not None:
            self._replies.forget(call.attempt.token)
            if call.attempt.upload is not None:
                call.attempt.upload.restart()
            call.attempt = None
            if call.spec.trace is not None:
                call.spec.trace.attempt_ended(call.status)

    def _try_publish(self, attempt: Attempt, head: Head) -> bool:
        """Publish a frame that may be repeated or omitted; False when the bus does not take it."""
        try:
            self._bus.publish(attempt.subject, encode_frame(head), attempt.reply)
        except (NotConnected, OutboundFull):
            return False
        return True

    def _subject(self, replica: ReplicaTag) -> bytes:
        subject = self._subject_cache.get(replica)
        if subject is None:
            if len(self._subject_cache) >= _SUBJECTS_CACHED_MAX:
                self._subject_cache.clear()
            subject = self._subject_cache[replica] = self._subjects.replica(replica).encode()
        return subject
