"""Ports of the replica host: a runtime for replicas, a bus for reports, and metrics.

Why Protocols: tests run the shell with a fake runtime and bus.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from serve_common.names import BackendTag, ReplicaTag
from serve_common.protocol.reports import ReplicaGoal, ReplicaStatus


class ReplicaRuntime(Protocol):
    """Runs replicas. No method waits: the outcome of each call is reported as events (`core.events`)."""

    @property
    def resources(self) -> dict[str, float]:
        """Total resources by Ray's names; on a cluster they change as machines join and leave."""
        ...

    def start(self, goal: ReplicaGoal) -> None:
        """Start its process and construct the user's code in it."""
        ...

    def reconfigure(self, goal: ReplicaGoal) -> None:
        """Apply the goal's configuration to a running replica."""
        ...

    def check_health(self, replica_tag: ReplicaTag) -> None:
        """Run the user's health check; `HealthCheckSent` is emitted when the check was sent."""
        ...

    def drain(self, replica_tag: ReplicaTag) -> None:
        """Make it refuse new requests and finish those in flight."""
        ...

    def kill(self, replica_tag: ReplicaTag) -> None:
        """Kill its process, even if it is still waiting to be placed; a queued start is cancelled."""
        ...

    def kill_by_force(self, replica_tag: ReplicaTag) -> None:
        """Kill a process that survived `kill`, bypassing Ray where that is possible."""
        ...


class ReportBus(Protocol):
    """Publishes reports."""

    @property
    def is_connected(self) -> bool:
        """True while reports can be sent."""
        ...

    async def publish_report(self, payload: bytes) -> None:
        """Send one report; one that cannot be sent is dropped, the next one replaces it."""
        ...


class HostMetrics(Protocol):
    """Metrics of the host itself."""

    def show_replicas(self, counts: Mapping[ReplicaStatus, int]) -> None:
        """Set the numbers of replicas by status."""
        ...

    def count_start(self, backend_tag: BackendTag, seconds: float, *, was_spare: bool) -> None:
        """A replica was started, ``seconds`` after the request; ``was_spare``: in a spare process."""
        ...

    def count_failure(self, backend_tag: BackendTag, status: ReplicaStatus) -> None:
        """A replica has become FAILED, DEAD or UNHEALTHY."""
        ...

    def message_refused(self, kind: str, sender: str, error: Exception) -> None:
        """A message could not be decoded; ``kind`` as for `RefusedMessages`."""
        ...

    def retire_process(self, process: str) -> None:
        """Fold the files of an ended replica process into totals. Blocks on files.

        ``process`` as in `Placed`.
        """
        ...


class Occupancy(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a replica at one moment."""

    ongoing_s: float
    """Total seconds that requests have spent in it so far, including current ones; never decreases."""
    in_flight: int = 0
    """Requests that hold a slot."""
    limit: int = 0
    """Maximum number of slots; 0 while draining."""
    waiting: int = 0
    """Requests that wait for a slot."""
    streams: int = 0
    """Requests in flight whose response has started, except WebSockets."""
    sockets: int = 0
    """WebSockets in flight."""
    is_connected: bool = False
    """True while connected to NATS."""
    reconnects: int = 0
    """Reconnects to NATS so far."""


class RequestMetrics(Protocol):
    """Request metrics of a replica; called for each request, so they must be cheap. Serialized, except for `write`."""

    def count_response(self, status: int, seconds: float) -> None:
        """A request has ended with ``status``, after ``seconds``."""
        ...

    def count_refused(self, reason: str) -> None:
        """A request was refused: ``busy`` or ``draining``; or dropped: its ``reply_subject`` is not an inbox."""
        ...

    def turn(self) -> None:
        """Close the current batch of counts, which the next `write` writes."""
        ...

    def write(self, occupancy: Occupancy) -> None:
        """Write the counts from before `turn`, and the current occupancy."""
        ...
