"""One request inside a replica, and the messages that its two threads exchange about it.

Why one object for both sides: it identifies the request. Each field belongs to one thread, named below; the other
thread may only read it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from enum import Enum
from typing import Any, Final, final

import msgspec

from serve_common.protocol.frames import Headers, RequestHead, ResponseHead
from serve_common.protocol.streams import IncomingStream, OutgoingStream
from serve_common.runtime.tasks import cancellations
from serve_replica_host.replica.io.flow import BodyReader, IncomingBody
from serve_replica_host.replica.telemetry.traces import ReplicaRequestTrace

UNSENT_BYTES_MAX: Final = 1024 * 1024
"""Unsent bytes of a streamed response above which the user's code waits for the network."""
UNSENT_PIECES_MAX: Final = 16 * 1024
"""Maximum unsent parts of a streamed response, however small: each has a memory overhead."""


class Phase(Enum):
    """The phase of a request, for the bus side."""

    RECEIVING = "receiving"
    """Its body is incomplete; it was not started."""
    WORKING = "working"
    """The user side processes it."""
    SENDING = "sending"
    """The user's code has finished; the rest of the response waits for credit."""


@final
class ReplicaRequest:
    """A request from its first frame to its last. In flight as long as it has a slot.

    Rarely used attributes are class defaults, because every request creates an instance.
    """

    # The bus side's:
    phase: Phase = Phase.RECEIVING
    is_dropped: bool = False
    """The response is not wanted any more; only the slot is kept until the work has ended."""
    has_response_started: bool = False
    """The response has started, so the deadline does not apply any more."""
    response_status: int = 0
    """Status of the response; 0 until it is known."""
    last_frame: bytes = b""
    """The frame of a one-frame response or of an error, to be sent again when a router probes."""
    body_in: IncomingBody | None = None
    """An incomplete body."""
    messages_in: IncomingStream | None = None
    """A WebSocket's messages."""
    response_head: ResponseHead | None = None
    """Head of a response in several frames, to be sent again."""
    outgoing: OutgoingStream[bytes | memoryview] | None = None
    """The rest of a response, or a WebSocket's messages."""
    sent_bytes: int = 0
    """Streamed response: bytes sent. The writer compares it with the bytes it wrote."""
    sent_before: int | None = None
    """WebSocket: number of frames sent when the client's last message arrived; None before the first one."""
    trace: ReplicaRequestTrace | None = None
    """Its trace, if any: created by the user side before the code is called, ended by the bus side."""
    is_direct: bool = False
    """It came over a direct link, so that its response takes that too."""
    moved_at: float = float("-inf")
    """When the response moved from the bus to a link in its midst."""
    is_body_streamed: bool = False
    """The user side processes it although its body is incomplete."""
    # Both sides':
    body: bytes = b""
    """The complete body, once on the user side; empty if the body is streamed."""
    pieces: deque[bytes] | None = None
    """Streamed response: parts appended by the writer, removed by the bus side."""
    is_notified: bool = False
    """The bus side was notified of new `pieces` and has not processed them yet."""
    # The user side's:
    is_queued: bool = False
    """An outcome of it waits, or waited, for the bus loop; those behind it then do too."""
    flowed_at: float = float("-inf")
    """When a part of a streamed response was last sent on the user's thread."""
    has_started: bool = False
    written_status: int = 0
    """Status of a response that the code writes itself, such as an ASGI application; 0 until it begins."""
    work: asyncio.Task[Any] | None = None
    """The task; None until it runs, or if it ended at its first step."""
    reader: BodyReader | None = None
    """Created when the body is read or a disconnect is awaited."""
    socket: Any = None
    """The `AsgiSocket` of a WebSocket."""
    writable: asyncio.Event | threading.Event | None = None
    """Set when the writer of a streamed response may continue; None while it does not wait."""

    def __init__(self, reply: bytes, head: RequestHead, now: float) -> None:
        """``now`` is `time.monotonic`."""
        self.reply = reply
        """The NATS reply subject, which identifies the request."""
        self.head = head
        self.started_at = now
        self.last_seen_at = now
        """When its router sent the last frame."""
        self.deadline = now + head.timeout_s
        """When the response must have started."""

    @property
    def incoming(self) -> IncomingStream | None:
        """What is still expected from the router; None when that is nothing."""
        return self.messages_in if self.body_in is None else self.body_in.stream


def is_cancellation(exchange: ReplicaRequest, error: BaseException) -> bool:
    """True when ``error`` is a requested cancellation of the running task of ``exchange``.

    A CancelledError without a request to cancel is an ordinary error of the user's code.
    """
    return isinstance(error, asyncio.CancelledError) and (exchange.is_dropped or cancellations() > 0)


# These are tracked by the garbage collector: an exchange may be part of a cycle, and would otherwise never be freed.

# -- to the user's side ---------------------------------------------------------------------------------------------


class Drop(msgspec.Struct, frozen=True):
    """The response is not wanted any more; for a WebSocket, how it was closed."""

    exchange: ReplicaRequest
    close_code: int = 1006
    reason: str = ""


class Writable(msgspec.Struct, frozen=True):
    """Part of a streamed response was sent: its waiting writer may continue."""

    exchange: ReplicaRequest


class BodyPiece(msgspec.Struct, frozen=True):
    """A part of a streamed body."""

    exchange: ReplicaRequest
    data: bytes | memoryview
    last: bool


class SocketReceived(msgspec.Struct, frozen=True):
    """A WebSocket message, or a part of one."""

    exchange: ReplicaRequest
    data: bytes
    is_text: bool
    last: bool


UserEvent = ReplicaRequest | Drop | Writable | BodyPiece | SocketReceived
"""A `ReplicaRequest` itself means: start it."""


# -- to the bus side ------------------------------------------------------------------------------------------------


class WholeResponseEvent(msgspec.Struct, frozen=True):
    """The complete response."""

    exchange: ReplicaRequest
    status: int
    headers: Headers
    body: bytes


class Left(msgspec.Struct, frozen=True):
    """The complete response was sent by the user side itself."""

    exchange: ReplicaRequest
    status: int
    ended_at: float


class Failed(msgspec.Struct, frozen=True):
    """The request has failed. Also ends a streamed response."""

    exchange: ReplicaRequest
    error_code: str
    status: int
    message: str
    body: bytes = b""
    """The pickled exception, for callers that can read it."""


class Opened(msgspec.Struct, frozen=True):
    """A streamed response starts, with the parts in `ReplicaRequest.pieces`; or a WebSocket is accepted."""

    exchange: ReplicaRequest
    status: int
    headers: Headers


class Flow(msgspec.Struct, frozen=True):
    """There are new parts in `ReplicaRequest.pieces`."""

    exchange: ReplicaRequest


class Piece(msgspec.Struct, frozen=True):
    """A part of a streamed response, after those in `ReplicaRequest.pieces`."""

    exchange: ReplicaRequest
    data: bytes
    last: bool


class Taken(msgspec.Struct, frozen=True):
    """The user's code has read ``frames`` frames: the router gets credit for as many."""

    exchange: ReplicaRequest
    frames: int


class SocketSent(msgspec.Struct, frozen=True):
    """A complete WebSocket message of the user's code."""

    exchange: ReplicaRequest
    data: bytes
    is_text: bool


class Closed(msgspec.Struct, frozen=True):
    """The user's code closes an accepted WebSocket."""

    exchange: ReplicaRequest
    code: int
    reason: str


class Ended(msgspec.Struct, frozen=True):
    """The work of a dropped request has ended, so its slot is free."""

    exchange: ReplicaRequest


IoEvent = WholeResponseEvent | Left | Failed | Opened | Flow | Piece | Taken | SocketSent | Closed | Ended
