"""What the controller needs from outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from serve_common.api.views import EventView, HistoryView
from serve_common.config.autoscaling import AutoscalingContext, AutoscalingPolicy
from serve_common.errors import ServeError
from serve_common.names import BackendTag, ControllerId
from serve_common.protocol.reports import HostGoal, LeaderNotice
from serve_common.protocol.snapshots import Snapshot
from serve_controller.core.autoscaling.values import LoadAsk, LoadSample, Targets
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import ObjectChanges

__all__ = [
    "Backups",
    "ControllerBus",
    "EventSink",
    "HistoryEntry",
    "HostLink",
    "LoadAsk",
    "LoadSample",
    "LoadSource",
    "PolicyAnswer",
    "PolicyFailed",
    "PolicyRunner",
    "Publisher",
    "Store",
    "Targets",
]


class PolicyFailed(ServeError):
    """A user's policy function raised, took too long, or gave no number."""


class PolicyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a user's policy function said."""

    num_replicas: int
    policy_state: dict[str, Any] | None = None
    """None: as it was."""


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Who changed what: one line of the audit log."""

    at: float
    """Seconds since 1970."""
    who: str = ""
    """Who the client claims to be, unverified; empty when it says nothing."""
    verb: str
    subject: str
    """What it was about, such as a backend tag."""
    goal_id: str | None
    request: str
    """The command as JSON."""
    old: str | None = None
    """What it changed, as it was, as JSON; None for what was not there."""
    new: str | None = None
    """The same as it is then; None for what is gone."""


class Store(Protocol):
    """The checkpoint's database. Every method raises `StoreUnavailable` when it does not answer in time."""

    async def migrate(self) -> None:
        """Bring the schema up to this version, once, whoever calls it how often."""
        ...

    async def acquire_leadership(
        self, controller_id: ControllerId, ttl_s: float, above: int = 0
    ) -> int | None:
        """Become the leader for ``ttl_s`` seconds if the lease is free, over, or this controller's own.

        Returns the new epoch, or None while another one leads. It is higher than any before, than ``above``, and, also
        where the store was restored, than all that this controller had. Judged by the database's clock.
        """
        ...

    async def renew_leadership(self, controller_id: ControllerId, epoch: int, ttl_s: float) -> None:
        """Keep the lease. Raises `FencedOut` when another epoch has begun or the store lacks what was recorded."""
        ...

    async def release_leadership(self, controller_id: ControllerId, epoch: int) -> None:
        """Let the next one lead at once; no error when it is ours no longer."""
        ...

    async def load(self) -> Checkpoint:
        """The whole checkpoint. Raises `CheckpointUnreadable` when a row cannot be understood."""
        ...

    async def record(self, epoch: int, changes: ObjectChanges, history: Sequence[HistoryEntry] = ()) -> None:
        """Write ``changes`` in one transaction that is refused unless ``epoch`` still leads, and is this controller's.

        Refused also where the store is not as the leader's last write left it: it was restored to an earlier state.
        Raises `FencedOut` (nothing was written) or `StoreUnavailable` (it may or may not have been written).
        """
        ...

    async def read_history(self, limit: int, subject: str | None, before: int | None) -> list[HistoryView]:
        """A page of the audit log, the newest first: at most ``limit`` entries, 1 or more.

        Only about ``subject`` and only with lower ids than ``before``, unless they are None. It is cut where an answer
        could no longer be carried by one NATS message, so an empty page alone says that there is no more.
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

    async def retract(self, key: str, revision: int) -> None:
        """Remove a key that the checkpoint does not know, unless it has another revision than this by now."""
        ...


class Backups(Protocol):
    """The form of a backup."""

    def write(self, checkpoint: Checkpoint, epoch: int, taken_at: float) -> bytes:
        """The file that holds what is deployed by ``checkpoint``; may be called in another thread."""
        ...

    def read(self, data: bytes) -> tuple[float, Checkpoint]:
        """When a backup was taken, and what it holds. Raises `BadField` that says what is wrong with the file."""
        ...


class EventSink(Protocol):
    """Where it is told what happened. For people: nothing depends on an event, and any may be lost."""

    def publish_event(self, subject_kind: str, subject: str, payload: bytes) -> None:
        """Publish on ``serve.event.<subject_kind>.<subject>``, soon; returns at once and never raises.

        ``subject`` may be a tag or an id. ``payload`` is JSON: a `GoalView` for the kind ``goal``, else an `EventView`.
        """
        ...

    async def recent_events(self, limit: int) -> list[EventView]:
        """The newest events that are still kept, the oldest first; empty when they cannot be had within 2 s."""
        ...


class LoadSource(Protocol):
    """Where loads are read."""

    async def read(
        self, asks: Sequence[LoadAsk], targets: Targets, now: float
    ) -> Mapping[BackendTag, LoadSample]:
        """A reading for each of ``asks``; one that cannot be had says why. Takes seconds at most, never raises."""
        ...


class PolicyRunner(Protocol):
    """Runs the users' policy functions, apart from the controller: one that hangs or crashes harms only its backend."""

    async def run(self, policy: AutoscalingPolicy, app_dir: str, context: AutoscalingContext) -> PolicyAnswer:
        """What the function says. Raises `PolicyFailed` with the user's traceback, also when it takes too long."""
        ...


class ControllerBus(HostLink, Publisher, EventSink, Protocol):
    """Everything the controller does on NATS."""

    async def begin_term(self, notice: LeaderNotice) -> None:
        """Answer the admin verbs, tell hosts and proxies who leads, and report the bucket's whole content."""
        ...

    async def announce(self, notice: LeaderNotice) -> None:
        """Tell hosts and proxies who leads, so that all of them report at once. May be lost; never raises."""
        ...

    async def round_trip(self, within_s: float) -> None:
        """Return once the bus has answered: what was sent to this process before that has been read.

        Raises `BusUnavailable` when it has not ``within_s`` seconds later, or is not connected.
        """
        ...

    async def end_term(self) -> None:
        """Stop answering the admin verbs, so that callers reach the next leader."""
        ...
