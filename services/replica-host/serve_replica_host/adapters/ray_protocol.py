"""What a host and its Ray runtime process say to each other, over a socket that both were born with.

Why a process of its own: Ray's driver unpickles what actors return and raise, so whoever runs user code can run code in
it. The host holds credentials that user code must not have; so it is no driver, and takes nothing from the driver but
these messages: MessagePack of fixed types, each field bounded. A hostile runtime can lie about its replicas, no more.

A message is its length (4 bytes, big-endian) and its body. Each end reads only as fast as it handles.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Final, TypeVar

import msgspec

from serve_common.errors import TransientError
from serve_common.identities.credentials import UserIdentity
from serve_common.names import ReplicaTag
from serve_common.protocol.reports import ReplicaGoal
from serve_common.runtime.settings import BusSettings
from serve_replica_host.core.events import TEXT_LENGTH_MAX, ReplicaEvent

LENGTH_BYTES: Final = 4
CALL_BYTES_MAX: Final = 8 * 1024 * 1024
"""To the runtime. A whole host goal fits one NATS message, so one replica's does."""
NOTICE_BYTES_MAX: Final = 256 * 1024
"""To the host."""
UNSENT_BYTES_MAX: Final = 64 * 1024 * 1024
"""What may wait for the other end to read; an end that leaves more has failed."""
RESOURCES_EVERY_S: Final = 1.0
"""How often the runtime says what it has, changed or not; by that the host knows that its loop turns."""
_RESOURCES_MAX: Final = 1_000

M = TypeVar("M")


class RayUnavailable(TransientError):
    """Ray could not be started or reached, or its process has ended."""

    error_code = "ray_unavailable"


class RayProtocolError(Exception):
    """The other end sent what it may not send."""


class RaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the runtime and its replicas need to know."""

    temp_dir: str
    address: str | None
    num_cpus: int | None
    app_root: str
    metrics_dir: str
    host_id: str
    spare_replicas: int
    """Actors that are started ahead, on a local runtime."""
    log_socket: str = ""
    """Where the host takes log lines; empty for nowhere."""
    tracing: dict[str, str] = {}
    """See `StartReplicaRequest`."""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


# -- calls, from the host to its runtime ------------------------------------------------------------------------------


class Open(_Message, frozen=True):
    """The first: start Ray, or join the cluster."""

    settings: RaySettings


class Start(_Message, frozen=True):
    """As `ports.ReplicaRuntime.start`; so are the others. ``bus`` is the replica's own."""

    goal: ReplicaGoal
    bus: BusSettings


class Reconfigure(_Message, frozen=True):
    goal: ReplicaGoal


class Renew(_Message, frozen=True):
    """A newer identity of a replica, in place of that in `Start`."""

    replica_tag: ReplicaTag
    identity: UserIdentity


class CheckHealth(_Message, frozen=True):
    replica_tag: ReplicaTag


class Drain(_Message, frozen=True):
    replica_tag: ReplicaTag


class Kill(_Message, frozen=True):
    replica_tag: ReplicaTag


class KillByForce(_Message, frozen=True):
    replica_tag: ReplicaTag


class Close(_Message, frozen=True):
    """The last: shut Ray down and end."""


Call = Open | Start | Reconfigure | Renew | CheckHealth | Drain | Kill | KillByForce | Close

# -- notices, from the runtime to its host ----------------------------------------------------------------------------

_Amount = Annotated[float, msgspec.Meta(ge=0, le=2.0**63)]
_Resource = Annotated[str, msgspec.Meta(max_length=200)]


class Resources(_Message, frozen=True):
    """Ray is there and has this to give in all, by Ray's names. The first says that it has started."""

    whole: Annotated[dict[_Resource, _Amount], msgspec.Meta(max_length=_RESOURCES_MAX)]


class OpenFailed(_Message, frozen=True):
    """Ray could not be started or joined; the runtime ends."""

    error: Annotated[str, msgspec.Meta(max_length=TEXT_LENGTH_MAX)]


Notice = ReplicaEvent | Resources | OpenFailed

_calls: Final[msgspec.msgpack.Decoder[Call]] = msgspec.msgpack.Decoder(Call)
_notices: Final[msgspec.msgpack.Decoder[Notice]] = msgspec.msgpack.Decoder(Notice)
_encoder: Final = msgspec.msgpack.Encoder()


def encode(message: Call | Notice) -> bytes:
    """The message with its length. Raises `RayProtocolError` when it cannot be encoded, as a huge number."""
    try:
        body = _encoder.encode(message)
    except (OverflowError, UnicodeEncodeError, TypeError, ValueError, RecursionError) as error:
        raise RayProtocolError(f"a {type(message).__name__} cannot be sent: {error}") from error
    bytes_max = CALL_BYTES_MAX if isinstance(message, Call) else NOTICE_BYTES_MAX
    if len(body) > bytes_max:
        raise RayProtocolError(f"a {type(message).__name__} of {len(body)} bytes cannot be sent")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def decode_call(body: bytes) -> Call:
    """A message to the runtime; raises `RayProtocolError`."""
    return _decoded(_calls, body)


def decode_notice(body: bytes) -> Notice:
    """A message to the host; raises `RayProtocolError`."""
    return _decoded(_notices, body)


def body_length(head: bytes, bytes_max: int) -> int:
    """Of the message that begins with ``head``; raises `RayProtocolError` when it is too long."""
    length = int.from_bytes(head, "big")
    if length > bytes_max:
        raise RayProtocolError(f"a message of {length} bytes is announced; at most {bytes_max} are allowed")
    return length


async def read_body(reader: asyncio.StreamReader, bytes_max: int) -> bytes | None:
    """The next message; None at the end of the connection. Raises `RayProtocolError`."""
    try:
        length = body_length(await reader.readexactly(LENGTH_BYTES), bytes_max)
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise RayProtocolError("the connection ended within a message") from None
        return None
    except ConnectionError:
        return None


def _decoded(decoder: msgspec.msgpack.Decoder[M], body: bytes) -> M:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise RayProtocolError(f"a message of {len(body)} bytes cannot be read: {error}") from error
