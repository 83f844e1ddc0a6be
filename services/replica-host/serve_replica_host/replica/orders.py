"""What the host tells a replica's process at its start, and what it answers.

Why plain bytes on the way: Ray would pickle our types, and an old process must fail clearly, not at unpickling.
"""

from __future__ import annotations

import msgspec

from serve_common.identities.credentials import UserIdentity
from serve_common.settings import BusSettings
from serve_common.wires.host import ReplicaGoal
from serve_replica_host.replica.fetched import Fetched


class StartOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a replica's process needs."""

    goal: ReplicaGoal
    bus: BusSettings
    """The replica's own: its name, and its identity until the next one comes."""
    app_dir: str
    """Absolute; empty for none."""
    tracing: dict[str, str] = {}
    """The host's OTEL_… variables, for a replica on a machine whose environment has none."""


class ControlOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a start, a reconfigure or a health check ended."""

    error: str | None = None
    """The user's traceback, or what else went wrong; None when all is well."""
    fetched: Fetched | None = None
    """The last that there is to say before this process is ended; None where its host need not fetch it."""


def encode(value: StartOrder | ControlOutcome | ReplicaGoal | UserIdentity) -> bytes:
    """The bytes that travel through Ray."""
    return msgspec.msgpack.encode(value)


def decode_order(data: bytes) -> StartOrder:
    """A `StartOrder`; raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=StartOrder)


def decode_goal(data: bytes) -> ReplicaGoal:
    """A `ReplicaGoal`; raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=ReplicaGoal)


def decode_identity(data: bytes) -> UserIdentity:
    """A `UserIdentity`; raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=UserIdentity)


def decode_outcome(data: bytes) -> ControlOutcome:
    """A `ControlOutcome`; raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=ControlOutcome)
