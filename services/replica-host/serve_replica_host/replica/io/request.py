"""One request inside a replica, and what its two threads tell each other about it.

Why one object for both sides: it is the request's identity. Each field belongs to one thread, named below; the other
thread may at most read it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from enum import Enum
from typing import Any, Final, final

import msgspec

from serve_common.protocol.frames import Headers, RequestHead
from serve_common.runtime.tasks import cancellations
from serve_replica_host.replica.io.flow import BodyReader, IncomingFrames, OutgoingBody, OutgoingMessages
from serve_replica_host.replica.telemetry.traces import ReplicaRequestTrace

UNSENT_BYTES_MAX: Final = 1024 * 1024
"""Of a streamed answer, before the user's code waits for the network."""
UNSENT_PIECES_MAX: Final = 16 * 1024
"""As many pieces may wait at most, however small: each costs memory of its own."""


class Phase(Enum):
    """How far a request is, for the bus side."""

    RECEIVING = "receiving"
    """Its body is not whole yet; nothing was begun."""
    WORKING = "working"
    """The user's side has it."""
    SENDING = "sending"
    """The user's code is done with it; the rest of the answer waits for the router."""


@final
class ReplicaRequest:
    """A request from its first frame to its last. In flight as long as the bus side holds it.

    What most requests never need is a default of the class: making an exchange is part of every request's cost.
    """

    # The bus side's:
    phase: Phase = Phase.RECEIVING
    is_dropped: bool = False
    """Nobody wants the answer any more; only the slot is still held, until the work has ended."""
    has_answer_begun: bool = False
    """From then on the deadline no longer ends it."""
    answer_status: int = 0
    last_frame: bytes = b""
    """The whole answer, or the error, when it was one frame."""
    incoming: IncomingFrames | None = None
    """What still comes of a body, or of a WebSocket's messages."""
    outgoing: OutgoingBody | OutgoingMessages | None = None
    sent_bytes: int = 0
    """Of a streamed answer: what has left. The writer compares it with what it wrote."""
    sent_before: int | None = None
    """Of a WebSocket: how many frames had left when its client's last message came; None before the first one."""
    trace: ReplicaRequestTrace | None = None
    """Of a request that is traced: made by the user's side before its code is called, ended by the bus side."""
    is_body_streamed: bool = False
    """The user's side has it although its body is not whole."""
    # Both sides':
    body: bytes = b""
    """Whole, once the user's side sees it; stays empty where the body is streamed."""
    pieces: deque[bytes] | None = None
    """Of a streamed answer: appended by its writer, taken by the bus side."""
    is_told: bool = False
    """The bus side was told to look at `pieces` and has not looked yet."""
    # The user side's:
    has_begun: bool = False
    work: asyncio.Task[Any] | None = None
    """None until it runs, and for ever when it ended at once."""
    reader: BodyReader | None = None
    """Made when something reads the body or listens for the caller's leaving."""
    socket: Any = None
    """A `sockets.Socket`, for a WebSocket."""
    room: asyncio.Event | threading.Event | None = None
    """Set when the writer of a streamed answer may go on; None while it does not wait."""

    def __init__(self, reply: bytes, head: RequestHead, now: float) -> None:
        """``now`` is `time.monotonic`."""
        self.reply = reply
        """The NATS subject that answers go to: the request's identity."""
        self.head = head
        self.began_at = now
        self.heard_at = now
        """When something came from its router last."""
        self.deadline = now + head.timeout_s
        """By which the answer must begin."""


def is_cancellation(exchange: ReplicaRequest, error: BaseException) -> bool:
    """Whether ``error`` comes of the cancelling of the running task, which works on ``exchange``.

    A CancelledError that nobody asked for is the user code's own, an error like any other.
    """
    return isinstance(error, asyncio.CancelledError) and (exchange.is_dropped or cancellations() > 0)


# These are seen by the garbage collector: an exchange may hold what holds it, and would then never be freed.

# -- to the user's side ---------------------------------------------------------------------------------------------


class Drop(msgspec.Struct, frozen=True):
    """Nobody wants the answer any more; for a WebSocket, how it was closed."""

    exchange: ReplicaRequest
    close_code: int = 1006
    reason: str = ""


class Writable(msgspec.Struct, frozen=True):
    """Some of a streamed answer has left: its writer, who waits, may look again."""

    exchange: ReplicaRequest


class BodyPiece(msgspec.Struct, frozen=True):
    """More of a body that is streamed."""

    exchange: ReplicaRequest
    data: bytes
    last: bool


class SocketReceived(msgspec.Struct, frozen=True):
    """A WebSocket message, or a piece of one."""

    exchange: ReplicaRequest
    data: bytes
    is_text: bool
    last: bool


ToUser = ReplicaRequest | Drop | Writable | BodyPiece | SocketReceived
"""An `ReplicaRequest` itself means: begin."""


# -- to the bus side ------------------------------------------------------------------------------------------------


class Answered(msgspec.Struct, frozen=True):
    """The whole answer."""

    exchange: ReplicaRequest
    status: int
    headers: Headers
    body: bytes


class Left(msgspec.Struct, frozen=True):
    """The whole answer, which the user's side has sent by itself."""

    exchange: ReplicaRequest
    status: int
    ended_at: float


class Failed(msgspec.Struct, frozen=True):
    """There is no answer, and why. Ends a streamed answer too."""

    exchange: ReplicaRequest
    error_code: str
    status: int
    message: str
    body: bytes = b""
    """For a caller who can read it: the pickled exception."""


class Opened(msgspec.Struct, frozen=True):
    """A streamed answer begins, with what is in `ReplicaRequest.pieces`; or a WebSocket is accepted."""

    exchange: ReplicaRequest
    status: int
    headers: Headers


class Flow(msgspec.Struct, frozen=True):
    """There is more in `ReplicaRequest.pieces`."""

    exchange: ReplicaRequest


class Piece(msgspec.Struct, frozen=True):
    """More of a streamed answer, after what is in `ReplicaRequest.pieces`."""

    exchange: ReplicaRequest
    data: bytes
    last: bool


class Taken(msgspec.Struct, frozen=True):
    """The user's code has taken so many frames of what comes: the router may send as many more."""

    exchange: ReplicaRequest
    frames: int


class SocketSent(msgspec.Struct, frozen=True):
    """A whole WebSocket message of the user's code."""

    exchange: ReplicaRequest
    data: bytes
    is_text: bool


class Closed(msgspec.Struct, frozen=True):
    """The user's code ends an accepted WebSocket."""

    exchange: ReplicaRequest
    code: int
    reason: str


class Ended(msgspec.Struct, frozen=True):
    """The work of a dropped request has ended, so its slot is free."""

    exchange: ReplicaRequest


ToBus = Answered | Left | Failed | Opened | Flow | Piece | Taken | SocketSent | Closed | Ended
