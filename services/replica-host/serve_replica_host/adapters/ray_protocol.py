"""The protocol between a host and its Ray runtime process, over an inherited socket pair.

Why a separate process: Ray's driver unpickles what actors return and raise, so user code can execute code in it. The
host has credentials that user code must not get; so it is not the driver, and accepts nothing from the driver but these
messages: MessagePack of fixed types, each field bounded. A hostile runtime can only lie about its replicas.

A message is its length (4 bytes, big-endian) and its body. Each end reads only as fast as it processes.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
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
"""Maximum size of a call. A complete host goal fits one NATS message, so one replica's does."""
NOTICE_BYTES_MAX: Final = 256 * 1024
"""Maximum size of a notice."""
UNSENT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Maximum unread bytes; an end that leaves more unread has failed."""
RESOURCES_INTERVAL_S: Final = 1.0
"""Seconds between reports of the runtime's resources, changed or not, which also show that its loop runs."""
_RESOURCES_MAX: Final = 1_000

M = TypeVar("M")


class RayUnavailable(TransientError):
    """Ray could not be started or reached, or its process has ended."""

    error_code = "ray_unavailable"


class RayProtocolError(Exception):
    """The other end sent an invalid message."""


class RaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the runtime and its replicas."""

    temp_dir: str
    address: str | None
    num_cpus: int | None
    app_root: str
    metrics_dir: str
    host_id: str
    spare_replicas: int
    """Maximum of spare actors on a local runtime."""
    code_dir: str = ""
    """Directory of the code that was fetched; empty for none."""
    log_socket: str = ""
    """Path of the host's log socket; empty for none."""
    tracing: dict[str, str] = {}
    """The host's OTEL_… variables."""

    @property
    def ray_directory(self) -> Path:
        """The directory for Ray. Ray makes it writable for all users, so the one above is private to this user."""
        return Path(self.temp_dir) / "r"


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


# -- calls, from the host to its runtime ------------------------------------------------------------------------------


class Open(_Message, frozen=True):
    """The first call: start Ray, or join the cluster."""

    settings: RaySettings


class Start(_Message, frozen=True):
    """Calls as of `ports.ReplicaRuntime`; ``bus`` has the replica's own settings."""

    goal: ReplicaGoal
    bus: BusSettings


class Reconfigure(_Message, frozen=True):
    goal: ReplicaGoal


class Renew(_Message, frozen=True):
    """Replace the identity of a replica given in `Start`."""

    replica_tag: ReplicaTag
    identity: UserIdentity


class CheckHealth(_Message, frozen=True):
    replica_tag: ReplicaTag


class Evaluate(_Message, frozen=True):
    """Pass ``body``, which comes from the controller, to the replica; `core.events.Evaluated` has what came of it."""

    replica_tag: ReplicaTag
    request_id: str
    body: bytes


class Drain(_Message, frozen=True):
    replica_tag: ReplicaTag


class Kill(_Message, frozen=True):
    replica_tag: ReplicaTag


class KillByForce(_Message, frozen=True):
    replica_tag: ReplicaTag


class Close(_Message, frozen=True):
    """The last call: shut Ray down and exit."""


Call = Open | Start | Reconfigure | Renew | CheckHealth | Evaluate | Drain | Kill | KillByForce | Close

# -- notices, from the runtime to its host ----------------------------------------------------------------------------

_Amount = Annotated[float, msgspec.Meta(ge=0, le=2.0**63)]
_Resource = Annotated[str, msgspec.Meta(max_length=200)]


class Resources(_Message, frozen=True):
    """Total resources by Ray's names. The first notice means that Ray has started."""

    whole: Annotated[dict[_Resource, _Amount], msgspec.Meta(max_length=_RESOURCES_MAX)]


class OpenFailed(_Message, frozen=True):
    """Ray could not be started or joined; the runtime exits."""

    error: Annotated[str, msgspec.Meta(max_length=TEXT_LENGTH_MAX)]


Notice = ReplicaEvent | Resources | OpenFailed

_calls: Final[msgspec.msgpack.Decoder[Call]] = msgspec.msgpack.Decoder(Call)
_notices: Final[msgspec.msgpack.Decoder[Notice]] = msgspec.msgpack.Decoder(Notice)
_encoder: Final = msgspec.msgpack.Encoder()


def encode(message: Call | Notice) -> bytes:
    """The message with its length. Raises `RayProtocolError` when it cannot be encoded or is too large."""
    try:
        body = _encoder.encode(message)
    except (OverflowError, UnicodeEncodeError, TypeError, ValueError, RecursionError) as error:
        raise RayProtocolError(f"a {type(message).__name__} cannot be sent: {error}") from error
    bytes_max = CALL_BYTES_MAX if isinstance(message, Call) else NOTICE_BYTES_MAX
    if len(body) > bytes_max:
        raise RayProtocolError(f"a {type(message).__name__} of {len(body)} bytes cannot be sent")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def decode_call(body: bytes) -> Call:
    """Decode a message to the runtime. Raises `RayProtocolError`."""
    return _decode(_calls, body)


def decode_notice(body: bytes) -> Notice:
    """Decode a message to the host. Raises `RayProtocolError`."""
    return _decode(_notices, body)


def body_length(head: bytes, bytes_max: int) -> int:
    """Decode the length in ``head``. Raises `RayProtocolError` when it exceeds ``bytes_max``."""
    length = int.from_bytes(head, "big")
    if length > bytes_max:
        raise RayProtocolError(f"a message of {length} bytes is announced; at most {bytes_max} are allowed")
    return length


async def read_body(reader: asyncio.StreamReader, bytes_max: int) -> bytes | None:
    """Read the next message; None at the end of the connection. Raises `RayProtocolError`."""
    try:
        length = body_length(await reader.readexactly(LENGTH_BYTES), bytes_max)
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise RayProtocolError("the connection ended within a message") from None
        return None
    except ConnectionError:
        return None


def _decode(decoder: msgspec.msgpack.Decoder[M], body: bytes) -> M:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise RayProtocolError(f"a message of {len(body)} bytes cannot be read: {error}") from error
