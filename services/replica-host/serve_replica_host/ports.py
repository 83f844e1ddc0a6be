"""What the replica host needs from outside: a runtime for replicas, a way to report, and metrics.

Why Protocols: the shell is driven in tests with a runtime and a bus made of lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from serve_common.names import BackendTag, ReplicaTag
from serve_common.protocol.reports import ReplicaGoal, ReplicaStatus
from serve_common.runtime.request_context import CurrentReplica


class ReplicaRuntime(Protocol):
    """Runs replicas. No method waits: what becomes of each call is told as events (`core.events`)."""

    @property
    def resources(self) -> dict[str, float]:
        """Whole resources by Ray's names; on a cluster they change as machines come and go."""
        ...

    def start(self, goal: ReplicaGoal) -> None:
        """Start its process and construct the user's code in it."""
        ...

    def reconfigure(self, goal: ReplicaGoal) -> None:
        """Apply the goal's configuration to a running replica."""
        ...

    def check_health(self, replica_tag: ReplicaTag) -> None:
        """Ask the user's code for its health; `HealthCheckSent` is told when the question is on its way."""
        ...

    def drain(self, replica_tag: ReplicaTag) -> None:
        """Have it refuse new requests and finish those in flight."""
        ...

    def kill(self, replica_tag: ReplicaTag) -> None:
        """End its process now, also one that is still waiting to be placed; a start that has not begun never does."""
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

    def count_start(self, backend_tag: BackendTag, seconds: float, *, was_spare: bool) -> None:
        """A replica was started, that many seconds after the order; ``was_spare``: in a process that waited."""
        ...

    def count_failure(self, backend_tag: BackendTag, status: ReplicaStatus) -> None:
        """A replica failed and is now FAILED, DEAD or UNHEALTHY."""
        ...

    def message_refused(self, kind: str, sender: str, error: Exception) -> None:
        """A message could not be taken in; ``kind`` as of `RefusedMessages`."""
        ...

    def retire_process(self, process: str) -> None:
        """Keep the totals of an ended replica process without keeping its files. Blocks on files.

        ``process`` as in `Placed`.
        """
        ...


class Occupancy(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica has in it at a moment."""

    ongoing_s: float
    """How long requests have been in it so far, all together, those that still are included; never falls."""
    in_flight: int = 0
    """Requests that hold a slot."""
    limit: int = 0
    """How many may."""
    waiting: int = 0
    """Requests that wait for a slot."""
    streams: int = 0
    """Of those in flight: whose answer has begun."""
    sockets: int = 0
    """Of those in flight: WebSockets."""
    is_connected: bool = False
    """To NATS."""
    reconnects: int = 0
    """To NATS, so far."""


class HandleMetrics(Protocol):
    """What waits in the calls that a replica's own code makes."""

    def write(self, replica: CurrentReplica) -> None:
        """Make it visible; called a few times a second."""
        ...


class RequestMetrics(Protocol):
    """What a replica counts; called for each request, so it must be cheap. One call at a time, but for `write`."""

    def count_answered(self, status: int, seconds: float) -> None:
        """A request left: by its answer's status, after that many seconds."""
        ...

    def count_refused(self, reason: str) -> None:
        """A request was refused: ``busy`` or ``draining``; or dropped, for its ``reply_subject`` is no inbox."""
        ...

    def turn(self) -> None:
        """What is counted from now on is left for the `write` after the next one."""
        ...

    def write(self, occupancy: Occupancy) -> None:
        """Make visible what was counted before `turn`, and what is in the replica now."""
        ...
