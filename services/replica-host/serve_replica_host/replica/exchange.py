"""One request inside a replica, and what its two threads tell each other about it.

Why one object for both sides: it is the request's identity. Each field belongs to one thread, named below; the other
thread may at most read `is_dropped`.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Final, final

import msgspec

from serve_common.tasks import OwnedTask
from serve_common.wires.frames import Headers, RequestHead
from serve_replica_host.replica.outgoing import OutgoingBody

UNSENT_BYTES_MAX: Final = 1024 * 1024
"""Of a streamed answer, before the user's code waits for the network."""


class Phase(Enum):
    """How far a request is, for the bus side."""

    RECEIVING = "receiving"
    """Its body is not whole yet; nothing was begun."""
    WORKING = "working"
    """The user's side has it."""
    SENDING = "sending"
    """The user's code is done with it; the rest of the answer waits for the router."""


@final
class Exchange:
    """A request from its first frame to its last. In flight as long as the bus side holds it."""

    __slots__ = (
        "answer_status",
        "began_at",
        "body",
        "deadline",
        "gone",
        "has_begun",
        "head",
        "is_dropped",
        "next_sequence",
        "outgoing",
        "phase",
        "pieces",
        "received_bytes",
        "reply",
        "room",
        "unsent_bytes",
        "work",
    )

    def __init__(self, reply: bytes, head: RequestHead, now: float) -> None:
        """``now`` is the bus loop's time, in seconds."""
        self.reply = reply
        """The NATS subject that answers go to: the request's identity."""
        self.head = head
        self.body = b""
        """Whole, once the user's side sees it."""
        # The bus side's:
        self.began_at = now
        self.deadline = now + head.timeout_s
        self.pieces: list[bytes] = []
        self.received_bytes = 0
        self.next_sequence = 1
        self.phase = Phase.RECEIVING
        self.is_dropped = False
        """Nobody wants the answer any more; only the slot is still held, until the work has ended."""
        self.answer_status = 0
        self.outgoing: OutgoingBody | None = None
        # The user side's:
        self.has_begun = False
        self.work: OwnedTask | None = None
        self.gone: asyncio.Event | None = None
        """Set when the caller is gone; made only when the user's code listens for it."""
        self.unsent_bytes = 0
        self.room: asyncio.Event | None = None


class Drop(msgspec.Struct, frozen=True, gc=False):
    """To the user's side: nobody wants the answer any more."""

    exchange: Exchange


class Room(msgspec.Struct, frozen=True, gc=False):
    """To the user's side: so many bytes of a streamed answer have left."""

    exchange: Exchange
    sent_bytes: int


ToUser = Exchange | Drop | Room
"""An `Exchange` itself means: begin."""


class Answered(msgspec.Struct, frozen=True, gc=False):
    """To the bus side: the whole answer."""

    exchange: Exchange
    status: int
    headers: Headers
    body: bytes


class Failed(msgspec.Struct, frozen=True, gc=False):
    """To the bus side: there is no answer, and why. Ends a streamed answer too."""

    exchange: Exchange
    error_code: str
    status: int
    message: str


class Opened(msgspec.Struct, frozen=True, gc=False):
    """To the bus side: a streamed answer begins."""

    exchange: Exchange
    status: int
    headers: Headers


class Piece(msgspec.Struct, frozen=True, gc=False):
    """To the bus side: more of a streamed answer."""

    exchange: Exchange
    data: bytes
    last: bool


class Ended(msgspec.Struct, frozen=True, gc=False):
    """To the bus side: the work of a dropped request has ended, so its slot is free."""

    exchange: Exchange


ToBus = Answered | Failed | Opened | Piece | Ended
