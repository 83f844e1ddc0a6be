"""Data-plane frames: what a router and a replica process say to each other about one request.

Why our own: a compact head plus the raw body costs one small allocation and no copy of the body's text form. A frame
is ``head length (2 bytes, big endian) + head + body``; the head is a msgpack array whose first element tells its kind.

The protocol. A router publishes a `RequestHead` on the replica's subject; the message's reply subject *is* the
request's identity, and all answers go there. The body of a small request travels in that first frame; a larger one is
cut into `BodyHead` frames below the bus' ``max_payload``. Either side sends at most `WINDOW_FRAMES` frames of a body
ahead of the other's `CreditHead`. The replica answers with one `ResponseHead` (its first body frame included) or one
`RefusedHead` or one `ErrorHead`. A router may send `CancelHead` at any time, and `ProbeHead` when it wonders whether
the replica still knows the request: a replica that does not answers `RefusedHead(reason="unknown")`, one that does
stays silent.
"""

from __future__ import annotations

from typing import Final

import msgspec

FRAME_BODY_BYTES_MAX: Final = 512 * 1024
"""Of one frame's body: half of NATS' default max_payload, so that head and headers always fit."""
WINDOW_FRAMES: Final = 4
"""Body frames under way without credit: 2 MiB hide the round trip on a fast network and bound the memory."""
HEAD_BYTES_MAX: Final = 0xFFFF


class RequestHead(msgspec.Struct, frozen=True, array_like=True, tag="Q"):
    """Opens a request. ``http`` False is a plain call: the body is the argument, not an HTTP body."""

    method: str
    path: str
    """Path as the client sent it, percent-encoding kept."""
    route: str
    """The prefix that matched; ASGI's root_path."""
    query: str
    headers: list[tuple[str, str]]
    timeout_s: float
    """What is left of the deadline when the frame is sent."""
    body_bytes: int
    """Of the whole body."""
    endpoint_tag: str
    request_id: str
    traceparent: str = ""
    http: bool = True


class BodyHead(msgspec.Struct, frozen=True, array_like=True, tag="B"):
    """A further piece of a body, in either direction; ``sequence`` counts from 1 (the first piece is 0)."""

    sequence: int
    last: bool


class CreditHead(msgspec.Struct, frozen=True, array_like=True, tag="C"):
    """Allows the other side ``frames`` more body frames."""

    frames: int


class CancelHead(msgspec.Struct, frozen=True, array_like=True, tag="X"):
    """The caller is gone or waits no longer; no answer is wanted."""


class ProbeHead(msgspec.Struct, frozen=True, array_like=True, tag="P"):
    """Do you still know this request?"""


class ResponseHead(msgspec.Struct, frozen=True, array_like=True, tag="R"):
    """Opens the answer. ``last`` says that the body in this frame is the whole body."""

    status: int
    headers: list[tuple[str, str]]
    last: bool
    in_flight: int
    """Requests that the replica works on, this one no longer included."""


class RefusedHead(msgspec.Struct, frozen=True, array_like=True, tag="N"):
    """The request was not begun. ``reason``: ``busy``, ``draining``, or ``unknown`` as the answer to a probe."""

    reason: str
    in_flight: int


class ErrorHead(msgspec.Struct, frozen=True, array_like=True, tag="E"):
    """The request failed; ``error_code`` is one of serve_common.errors, ``status`` its HTTP status."""

    error_code: str
    status: int
    message: str
    in_flight: int


Head = RequestHead | BodyHead | CreditHead | CancelHead | ProbeHead | ResponseHead | RefusedHead | ErrorHead


class FrameUnreadable(ValueError):
    """A frame that no version of this protocol can have sent; the message says what is wrong."""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Head] = msgspec.msgpack.Decoder(Head)


def encode_frame(head: Head, body: bytes | memoryview = b"") -> bytes:
    """The frame's bytes. Raises `FrameUnreadable` when the head is larger than `HEAD_BYTES_MAX`."""
    encoded = _encoder.encode(head)
    if len(encoded) > HEAD_BYTES_MAX:
        raise FrameUnreadable(
            f"a head of {len(encoded)} bytes exceeds {HEAD_BYTES_MAX}; are the headers too large?"
        )
    return b"".join((len(encoded).to_bytes(2, "big"), encoded, body))


def decode_frame(frame: bytes) -> tuple[Head, memoryview]:
    """The head and the body (a view into ``frame``). Raises `FrameUnreadable`."""
    if len(frame) < 2:
        raise FrameUnreadable(f"a frame of {len(frame)} bytes is too short")
    end = 2 + int.from_bytes(frame[:2], "big")
    if end > len(frame):
        raise FrameUnreadable(f"the head ends at {end}, the frame at {len(frame)}")
    view = memoryview(frame)
    try:
        return _decoder.decode(view[2:end]), view[end:]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameUnreadable(f"the head is not understood: {error}") from error


def split_body(body: bytes) -> list[memoryview]:
    """``body`` in pieces of at most `FRAME_BODY_BYTES_MAX`; an empty body is one empty piece."""
    view = memoryview(body)
    return [view[at : at + FRAME_BODY_BYTES_MAX] for at in range(0, max(len(body), 1), FRAME_BODY_BYTES_MAX)]
