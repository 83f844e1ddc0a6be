"""What the replica host needs from outside: a runtime for replicas, a way to report, and metrics.

Why Protocols: the shell is driven in tests with a runtime and a bus made of lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from serve_common.names import ReplicaTag
from serve_common.wires.host import ReplicaGoal, ReplicaStatus


class ReplicaRuntime(Protocol):
    """Runs replicas. No method waits: what becomes of each call is told as events (`core.events`)."""

    @property
    def resources(self) -> dict[str, float]:
        """Whole resources by Ray's names; does not change while the host lives."""
        ...

    def start(self, goal: ReplicaGoal) -> None:
        """Start its process and construct the user's code in it."""
        ...

    def reconfigure(self, goal: ReplicaGoal) -> None:
        """Apply the goal's configuration to a running replica."""
        ...

    def check_health(self, replica_tag: ReplicaTag) -> None:
        """Ask the user's code for its health."""
        ...

    def drain(self, replica_tag: ReplicaTag) -> None:
        """Have it refuse new requests and finish those in flight."""
        ...

    def kill(self, replica_tag: ReplicaTag) -> None:
        """End its process now, also one that is still waiting to be placed."""
        ...

    def kill_by_force(self, replica_tag: ReplicaTag) -> None:
        """End a process that is still there after `kill`, without asking the runtime where that is possible."""
        ...


class ReportBus(Protocol):
    """Where reports go."""

    @property
    def is_connected(self) -> bool:
        """False while reports cannot be sent."""
        ...

    async def publish_report(self, payload: bytes) -> None:
        """Send one report; one that cannot be sent is dropped, the next one replaces it."""
        ...


class HostMetrics(Protocol):
    """What the host counts about itself."""

    def show_replicas(self, counts: Mapping[ReplicaStatus, int]) -> None:
        """Replicas by status."""
        ...

    def retire_process(self, pid: int) -> None:
        """Keep the totals of an ended replica process without keeping its files. Blocks on files."""
        ...


class RequestMetrics(Protocol):
    """What a replica counts; called for each request, so it must be cheap."""

    def count_answered(self, status: int, seconds: float) -> None:
        """A request left: by its answer's status, after that many seconds."""
        ...

    def count_refused(self, reason: str) -> None:
        """A request was refused: ``busy`` or ``draining``."""
        ...

    def write(self, in_flight: int) -> None:
        """Make visible what was counted, and how many requests are in flight now."""
        ...
