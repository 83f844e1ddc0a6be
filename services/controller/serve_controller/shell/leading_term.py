"""What the admin verbs are answered from: as much of a term as they need.

Why a protocol: an answer needs what is known and a way to have a command decided, and no part of how plans are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Reversible
from typing import Protocol

from serve_common.names import BackendTag
from serve_common.wires.commands import AnyCommand, CommandReply
from serve_common.wires.views import EventView, HistoryView
from serve_controller.core.autoscaling.values import ScalingStatus
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.commands.restoring import RestoreFrom
from serve_controller.core.observed import ObservedState


class LeadingTerm(Protocol):
    """What is asked of a term: `shell.term.Term`."""

    @property
    def epoch(self) -> int:
        """Of this leader."""
        ...

    @property
    def checkpoint(self) -> Checkpoint:
        """As it was last recorded."""
        ...

    @property
    def observed(self) -> ObservedState:
        """As it was last heard."""
        ...

    @property
    def autoscaling(self) -> Mapping[BackendTag, ScalingStatus]:
        """What the autoscaler found last."""
        ...

    @property
    def is_store_available(self) -> bool:
        """Whether Postgres answered last."""
        ...

    @property
    def events(self) -> Reversible[EventView]:
        """What happened lately, the newest last."""
        ...

    async def execute(self, command: AnyCommand | RestoreFrom, request: bytes, who: str) -> CommandReply:
        """Decide and record a command."""
        ...

    async def read_history(self, limit: int, subject: str | None, before: int | None) -> list[HistoryView]:
        """Entries of the audit log, the newest first. Raises `StoreUnavailable`."""
        ...

    @property
    def on_change(self) -> Callable[[], None]:
        """Called when a plan should be made soon."""
        ...
