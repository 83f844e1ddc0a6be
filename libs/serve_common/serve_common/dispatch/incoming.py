"""What replicas say to the proxy: each frame of an answer, turned into what it means for its call.

Why apart from dispatching: the protocol (order, credit, sequence) is checked here; slots and retries are decided there.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol, final

import structlog

from serve_common.bus.errors import NotConnected, OutboundFull, PayloadTooLarge
from serve_common.bus.quiet_log import QuietLog
from serve_common.dispatch.calls import HELD_FRAMES_MAX, Answer, AnswerBody, Attempt, Call
from serve_common.dispatch.errors import AnswerUnusable, ReplicaError
from serve_common.dispatch.liveness import Suspicions
from serve_common.dispatch.outgoing import Outgoing
from serve_common.errors import ReplicaDied, ServeError
from serve_common.routing.router import Refusal
from serve_common.wires.frames import (
    BodyHead,
    CancelHead,
    CloseHead,
    CreditHead,
    ErrorHead,
    FrameUnreadable,
    Headers,
    MessageHead,
    ProbeHead,
    RefusedHead,
    RequestHead,
    ResponseHead,
    decode_frame,
)

_log = structlog.get_logger(__name__)

_REFUSALS: Final = {"busy": Refusal.BUSY, "draining": Refusal.DRAINING}


class Outcomes(Protocol):
    """What an answer can do to a call; the dispatcher."""

    def answered(self, call: Call) -> None:
        """The replica has sent all of its answer."""

    def end_with(self, call: Call, error: ServeError) -> None:
        """The replica has ended the call without a (whole) answer."""

    def fail(self, call: Call, error: ServeError) -> None:
        """The call ends although the replica may still work on it."""

    def refused(self, call: Call, reason: Refusal) -> None:
        """The replica did not begin the request."""

    def disowned(self, call: Call) -> None:
        """The replica does not know the request (any more)."""

    def held_up(self, call: Call) -> None:
        """The bus went away before the request was sent whole."""


@final
class Incoming:
    """Reads the frames that come for calls, in the bus' read path."""

    def __init__(self, outcomes: Outcomes, outgoing: Outgoing, suspicions: Suspicions) -> None:
        self._outcomes = outcomes
        self._outgoing = outgoing
        self._suspicions = suspicions
        self._loop = asyncio.get_running_loop()
        self._bad_frames = QuietLog(_log.warning)

    def take(self, call: Call, payload: bytes) -> None:
        """A frame came to the reply subject of the call's current attempt."""
        attempt = call.attempt
        if attempt is None:
            return
        try:
            head, body = decode_frame(payload)
        except FrameUnreadable as error:
            self._complain("frame_unreadable", attempt, str(error))
            self._outcomes.fail(call, AnswerUnusable("the replica's answer is not a frame"))
            return
        if self._suspicions:
            self._suspicions.heard(attempt.replica)
        if type(head) is ResponseHead and head.last and call.answer is None:
            if not call.waiter.done():
                call.waiter.set_result(Answer(head.status, head.headers, body, None))
            self._outcomes.answered(call)
            return
        attempt.heard_at = self._loop.time()
        match head:
            case ResponseHead(status, headers):
                self._open_stream(call, status, headers, body)
            case BodyHead(sequence, last):
                self._take_piece(call, sequence, body, last=last)
            case CreditHead(frames):
                self._take_credit(call, attempt, frames)
            case RefusedHead(reason):
                self._take_refusal(call, reason)
            case ErrorHead(error_code, status, message):
                self._outcomes.end_with(call, ReplicaError(error_code, status, message))
            case RequestHead() | CancelHead() | ProbeHead() | MessageHead() | CloseHead():
                self._complain("frame_unexpected", attempt, type(head).__name__)

    def _open_stream(self, call: Call, status: int, headers: Headers, body: memoryview) -> None:
        if call.answer is not None:
            self._outcomes.fail(call, AnswerUnusable("the replica began its answer twice"))
            return
        call.answer = AnswerBody(body, lambda: self._outgoing.give_credit(call, 1))
        if not call.waiter.done():
            call.waiter.set_result(Answer(status, headers, body, call.answer))

    def _take_piece(self, call: Call, sequence: int, piece: memoryview, *, last: bool) -> None:
        answer = call.answer
        if answer is None or sequence != answer.next_sequence:
            # The bus lost a frame, as it may when a server goes away.
            self._outcomes.fail(call, ReplicaDied("a part of the answer was lost"))
        elif answer.held_frames >= HELD_FRAMES_MAX:
            self._outcomes.fail(call, AnswerUnusable("the replica sends more than it was allowed to"))
        else:
            answer.add(piece, last=last)
            if last:
                self._outcomes.answered(call)

    def _take_credit(self, call: Call, attempt: Attempt, frames: int) -> None:
        attempt.credit += max(0, min(frames, len(attempt.pieces)))
        try:
            self._outgoing.send_pieces(attempt)
        except NotConnected:
            self._outcomes.held_up(call)
        except (OutboundFull, PayloadTooLarge) as error:
            self._outcomes.fail(call, error)

    def _take_refusal(self, call: Call, reason: str) -> None:
        refusal = _REFUSALS.get(reason)
        if refusal is None:
            self._outcomes.disowned(call)
        else:
            self._outcomes.refused(call, refusal)

    def _complain(self, event: str, attempt: Attempt, reason: str) -> None:
        self._bad_frames.log(self._loop.time(), event, replica_tag=attempt.replica, reason=reason)
