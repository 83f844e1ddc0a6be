"""Data-plane frames: the messages between a router and a replica process about one request.

Why our own: a compact head plus the raw body costs one small allocation and no copy of the body's text form. A frame
is ``head length (2 bytes, big endian) + head + body``; the head is a msgpack array whose first element is its kind.

The protocol. A router publishes a `RequestHead` on the replica's subject; the message's reply subject *is* the
request's identity, and all answers go there. The body of a small request travels in that first frame; a larger one, or
one that is still arriving, is cut into `BodyHead` frames below the bus' ``max_payload``. Either side sends at most
`WINDOW_FRAMES` frames of a body ahead of the other's `CreditHead`. The replica answers with one `ResponseHead` (its
first body frame included) or one `RefusedHead` or one `ErrorHead`; it may answer before the body has arrived whole. A
router may send `CancelHead` at any time, and `ProbeHead` to check whether the replica still knows the request: one that
works on it sends `AliveHead`, one that has answered it lately sends the response again, others send `RefusedHead`.
Probes and their answers also say how far each end has come, so that frames that were lost are sent again
(`serve_common.protocol.streams`).

Kinds of requests (`RequestKind`). ``HTTP``: body and response are HTTP's. ``CALL``: a plain call; the body is JSON or
bytes. ``PYTHON``: from a handle of Muster; the body is a pickled ``(args, kwargs)``, the response a pickled value, or,
when `CallHead.stream` is set, a stream of items, each a pickled value after its length (4 bytes, big endian); an
`ErrorHead`'s body is a `Raised` in msgpack when the user's code raised. ``WEBSOCKET``: the replica accepts with
``ResponseHead(status=101)`` or refuses with any other status; then messages go both ways as `MessageHead` frames, each
direction with a window of its own of `WINDOW_MESSAGES` frames, until one side sends `CloseHead` or the router
`CancelHead` (the client disconnected without closing).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from serve_common.protocol.subjects import UNREADABLE, Count, Seconds

FRAME_BODY_BYTES_MAX: Final = 512 * 1024
"""Largest body of one frame. Measured over direct links: 100 MiB uploads are a sixth faster than at 256 KiB, as a frame
costs both ends up to 100 us, most of it because their code has left the caches meanwhile."""
SMALL_FRAME_BYTES_MAX: Final = 8 * 1024
"""Frames up to this size are not counted where bytes on the bus are (`ReceivedHead`)."""
WINDOW_FRAMES: Final = 8
"""Body frames in flight without credit."""
LARGE_WINDOW_FRAMES: Final = WINDOW_FRAMES // 2
"""The same of large ones: 2 MiB hide the round trip on a fast network and bound the memory."""
CREDIT_FRAMES: Final = WINDOW_FRAMES // 4
"""Frames per credit message: the window never runs dry, and most messages are saved."""
MESSAGE_PART_BYTES_MAX: Final = 128 * 1024
"""Largest part of a WebSocket message in one frame."""
WINDOW_MESSAGES: Final = 32
"""Frames of WebSocket messages in flight in one direction without credit."""
HEAD_BYTES_MAX: Final = 0xFFFF
UNKNOWN_BYTES: Final = -1
"""`RequestHead.body_bytes` of a body whose end is not known yet."""

Headers = list[tuple[bytes, bytes]]
"""Names in lower case, as in HTTP/2 and ASGI; values as they were sent. Repeats are retained, in order."""


Status = Annotated[int, Meta(ge=100, le=999)]
"""HTTP status: three digits."""


class RequestKind(IntEnum):
    """Kinds of requests; the module's docstring describes them."""

    HTTP = 0
    CALL = 1
    PYTHON = 2
    WEBSOCKET = 3


class CallHead(msgspec.Struct, frozen=True, array_like=True):
    """Fields that only some requests have."""

    method_name: str = ""
    """Method of the user's object; empty means ``__call__``."""
    model_id: str = ""
    """The multiplexed model that the request is for."""
    stream: bool = False
    """Request the response as a stream of items."""
    is_pickled: bool = True
    """For PYTHON: False when the body is msgpack ``[args, kwargs]`` and the response must be msgpack."""


class RequestHead(msgspec.Struct, frozen=True, array_like=True, tag="Q"):
    """Opens a request."""

    kind: RequestKind
    method: str
    path: str
    """Path as the client sent it, percent-encoding kept."""
    route: str
    """The prefix that matched; ASGI's root_path."""
    query: str
    headers: Headers
    timeout_s: Seconds
    """Seconds from the sending of the frame until the response must begin."""
    body_bytes: Annotated[int, Meta(ge=UNKNOWN_BYTES, le=2**53)]
    """Size of the whole body, or `UNKNOWN_BYTES`: then the last frame is marked."""
    endpoint_tag: str
    request_id: str
    traceparent: str = ""
    client: str = ""
    """Address of the client as ``host:port``; empty when there is none."""
    scheme: str = "http"
    """The client's scheme: ``http``, ``https``, ``ws`` or ``wss``."""
    call: CallHead | None = None
    may_queue: bool = False
    """A replica that is full may queue it, in the order of arrival, instead of refusing it."""


class BodyHead(msgspec.Struct, frozen=True, array_like=True, tag="B"):
    """A further piece of a body, in either direction; ``sequence`` counts from 1 (the first piece is 0)."""

    sequence: Count
    last: bool


class CreditHead(msgspec.Struct, frozen=True, array_like=True, tag="C"):
    """Allows the other side ``frames`` more body frames."""

    frames: int
    number: int = 0
    """Differs in all credits of a request: a bus connection that moves to a newer link drops messages that arrive on
    both."""
    limit: Count = 0
    """The number before which frames may be sent; 0 is unknown, then ``frames`` more are."""


class CancelHead(msgspec.Struct, frozen=True, array_like=True, tag="X"):
    """The caller has disconnected or given up; no response is wanted."""


class ProbeHead(msgspec.Struct, frozen=True, array_like=True, tag="P"):
    """Asks whether the replica still knows this request."""

    age_s: Seconds = 0.0
    """Seconds since it was sent; 0 is unknown."""
    received: Annotated[int, Meta(ge=-1, le=2**53)] = -1
    """Frames of the response that have arrived in order. -1 is unknown."""
    limit: Count = 0
    """As of `CreditHead`, for the response; 0 is unknown."""
    has_lost: bool = False
    """What was sent beyond ``received`` was lost, and is sent again. Else it may be on its way."""


class AliveHead(msgspec.Struct, frozen=True, array_like=True, tag="A"):
    """The replica's process works and knows the request, which is still queued or in the user's code."""

    received: Count = 0
    """Frames of the request that have arrived in order; 0 when nothing more is expected of it."""
    limit: Count = 0
    """As of `CreditHead`, for the request; 0 is unknown."""
    has_gap: bool = False
    """A later frame of the request has arrived, so what was sent from ``received`` on is sent again."""
    sent: Count = 0
    """Frames of the response that were sent before this, its head included: what has not arrived by then was lost, as
    frames keep their order on one way. 0 is unknown."""


class ResponseHead(msgspec.Struct, frozen=True, array_like=True, tag="R"):
    """Opens the response. ``last`` marks that the body in this frame is the whole body."""

    status: Status
    headers: Headers
    last: bool
    in_flight: int
    """Requests that the replica works on, this one no longer included."""


class RefusedHead(msgspec.Struct, frozen=True, array_like=True, tag="N"):
    """The request was not started. ``reason``: ``busy``, ``draining``; in response to a probe ``never_begun`` (it did
    not arrive, and will not be started if it does) or ``unknown`` (it may have ended, and its response is not
    retained)."""

    reason: str
    in_flight: int


class ErrorHead(msgspec.Struct, frozen=True, array_like=True, tag="E"):
    """The request failed; ``error_code`` is one of serve_common.errors, ``status`` its HTTP status."""

    error_code: str
    status: Status
    message: str
    in_flight: int


class Raised(msgspec.Struct, frozen=True, array_like=True):
    """The exception of the user's code: the body of a PYTHON request's `ErrorHead`."""

    pickled: bytes
    """The pickled exception; empty when it cannot be pickled or the caller does not accept pickles."""
    traceback: str
    """The replica's traceback, from the user's first frame on."""


class MessageHead(msgspec.Struct, frozen=True, array_like=True, tag="M"):
    """A WebSocket message, or a piece of one; ``sequence`` counts a direction's frames from 1."""

    sequence: Count
    is_text: bool
    last: bool
    """This frame ends the message."""


class CloseHead(msgspec.Struct, frozen=True, array_like=True, tag="W"):
    """Ends a WebSocket: with the peer's close code (RFC 6455, 7.4) and reason."""

    code: Annotated[int, Meta(ge=0, le=65_535)]
    reason: str
    sequence: Count = 0
    """Number of this frame in its direction; 0 is unknown."""


class DialHead(msgspec.Struct, frozen=True, array_like=True, tag="D"):
    """A router asks a replica for a direct link; the reply subject is one of the router's inbox."""

    machine: str
    """What the router's machine is known by (`serve_common.direct.link.machine_id`)."""


class ReceivedHead(msgspec.Struct, frozen=True, array_like=True, tag="V"):
    """What a router has received over the bus from this replica, in responses of any request: credit of the connection,
    beside that of each stream, as of HTTP/2.
    """

    total_bytes: Count
    """Bytes of all frames so far that are larger than `SMALL_FRAME_BYTES_MAX`."""


class LinkHead(msgspec.Struct, frozen=True, array_like=True, tag="L"):
    """The answer to a `DialHead`: how to reach the replica directly."""

    path: str = ""
    """A Unix socket on the router's machine; empty for none."""
    ticket: bytes = b""
    """Proves the router, once and for a few seconds: the first bytes that it sends."""
    host: Annotated[str, Meta(max_length=255)] = ""
    """Name or IP address that accepts links over TCP; empty for none. Without a path either, there is no way."""
    port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """TCP port of ``host``."""
    certificate: Annotated[bytes, Meta(max_length=4096)] = b""
    """The certificate (DER) that the process at ``host`` and ``port`` must have."""


Head = (
    RequestHead
    | BodyHead
    | CreditHead
    | CancelHead
    | ProbeHead
    | AliveHead
    | ResponseHead
    | RefusedHead
    | ErrorHead
    | MessageHead
    | CloseHead
    | DialHead
    | LinkHead
    | ReceivedHead
)


class FrameUnreadable(ValueError):
    """A frame that is invalid in every version of this protocol; the message describes the error."""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Head] = msgspec.msgpack.Decoder(Head)


def encode_head(head: Head) -> bytes:
    """The frame's bytes before its body. Raises `FrameUnreadable` when the head is larger than `HEAD_BYTES_MAX`."""
    encoded = _encoder.encode(head)
    if len(encoded) > HEAD_BYTES_MAX:
        raise FrameUnreadable(
            f"a head of {len(encoded)} bytes exceeds {HEAD_BYTES_MAX}; are the headers too large?"
        )
    return len(encoded).to_bytes(2, "big") + encoded


def encode_frame(head: Head, body: bytes | memoryview = b"") -> bytes:
    """The frame's bytes. Raises as `encode_head`."""
    return b"".join((encode_head(head), body))


class SplitFrame(NamedTuple):
    """A frame whose body has memory of its own."""

    head: bytes
    """As `encode_head` returns it."""
    body: bytes


def encoded_head_bytes(beginning: bytes | memoryview) -> int | None:
    """Size of what `encode_head` returned, by the ``beginning`` of a frame; None where that is too short."""
    return 2 + int.from_bytes(beginning[:2], "big") if len(beginning) >= 2 else None


def decode_frame(frame: bytes | memoryview | SplitFrame) -> tuple[Head, bytes | memoryview]:
    """The head and the body: a view into ``frame``, or the bytes of a `SplitFrame`. Raises `FrameUnreadable`."""
    encoded: memoryview
    body: bytes | memoryview
    if isinstance(frame, SplitFrame):
        encoded, body = memoryview(frame.head)[2:], frame.body
    else:
        view = memoryview(frame)
        if len(view) < 2:
            raise FrameUnreadable(f"a frame of {len(view)} bytes is too short")
        end = 2 + (view[0] << 8 | view[1])
        if end > len(view):
            raise FrameUnreadable(f"the head ends at {end}, the frame at {len(view)}")
        encoded, body = view[2:end], view[end:]
    try:
        return _decoder.decode(encoded), body
    except UNREADABLE as error:
        raise FrameUnreadable(f"the head is not understood: {error}") from error


def split_body(body: bytes, most_bytes: int = FRAME_BODY_BYTES_MAX) -> list[memoryview]:
    """``body`` in pieces of at most ``most_bytes``; an empty body is one empty piece."""
    view = memoryview(body)
    return [view[at : at + most_bytes] for at in range(0, max(len(body), 1), most_bytes)]
