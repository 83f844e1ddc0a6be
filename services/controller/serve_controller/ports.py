"""What the controller needs from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from serve_common.names import ControllerId
from serve_common.wires.host import HostGoal
from serve_common.wires.proxy import LeaderNotice
from serve_common.wires.snapshots import Snapshot
from serve_controller.core.checkpoint import Changes, Checkpoint


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Who changed what: one line of the audit log."""

    at: float
    """Seconds since 1970."""
    verb: str
    subject: str
    """What it was about, such as a backend tag."""
    goal_id: str | None
    request: str
    """The command as JSON."""


class Store(Protocol):
    """The checkpoint's database. Every method raises `StoreUnavailable` when it does not answer in time."""

    async def migrate(self) -> None:
        """Bring the schema up to this version, once, whoever calls it how often."""
        ...

    async def acquire_leadership(self, controller_id: ControllerId, ttl_s: float) -> int | None:
        """Become the leader for ``ttl_s`` seconds if the lease is free, over, or this controller's own.

        Returns the new epoch (always higher than any before), or None while another one leads. Judged by the
        database's clock.
        """
        ...

    async def renew_leadership(self, controller_id: ControllerId, epoch: int, ttl_s: float) -> None:
        """Keep the lease. Raises `FencedOut` when another epoch has begun."""
        ...

    async def release_leadership(self, controller_id: ControllerId, epoch: int) -> None:
        """Let the next one lead at once; no error when it is ours no longer."""
        ...

    async def load(self) -> Checkpoint:
        """The whole checkpoint. Raises `CheckpointUnreadable` when a row cannot be understood."""
        ...

    async def record(self, epoch: int, changes: Changes, history: Sequence[HistoryEntry] = ()) -> None:
        """Write ``changes`` in one transaction that is refused unless ``epoch`` still leads.

        Raises `FencedOut` (nothing was written) or `StoreUnavailable` (it may or may not have been written).
        """
        ...


class HostLink(Protocol):
    """The way to hosts."""

    async def send_goal(self, goal: HostGoal) -> None:
        """Send a whole goal; may be lost. Raises `BusUnavailable`, or `LimitReached` when it is too large."""
        ...


class Publisher(Protocol):
    """The way to the bucket. Both methods raise `BusUnavailable`."""

    async def publish(self, key: str, snapshot: Snapshot) -> int:
        """Put one key; returns the revision that the bucket gave it. Raises `LimitReached` when it is too large."""
        ...

    async def retract(self, key: str) -> None:
        """Remove a key that the checkpoint does not know."""
        ...


class Bus(HostLink, Publisher, Protocol):
    """Everything the controller does on NATS."""

    async def begin_term(self, notice: LeaderNotice) -> None:
        """Answer the admin verbs, tell hosts and proxies who leads, and report the bucket's whole content."""
        ...

    async def end_term(self) -> None:
        """Stop answering the admin verbs, so that callers reach the next leader."""
        ...
