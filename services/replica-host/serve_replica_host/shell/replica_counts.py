"""Counts how replicas start and fail, out of the events and states that the host's loop sees anyway.

Why apart from the loop: it decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

import msgspec

from serve_common.names import ReplicaTag, backend_tag_of
from serve_common.wires.host import ReplicaStatus
from serve_replica_host.core.events import Constructed, Placed, ProcessEnded, ReplicaEvent, StartFailed
from serve_replica_host.core.state import HostState
from serve_replica_host.ports import HostMetrics

_FAILURES: Final = (ReplicaStatus.FAILED, ReplicaStatus.DEAD, ReplicaStatus.UNHEALTHY)


class _Start(msgspec.Struct):
    """A replica that was ordered and does not run yet."""

    ordered_at: float
    was_spare: bool = False


@final
class ReplicaCounts:
    """Of one host."""

    def __init__(self, metrics: HostMetrics, now: Callable[[], float]) -> None:
        """``now`` gives monotonic seconds."""
        self._metrics = metrics
        self._now = now
        self._starts: dict[ReplicaTag, _Start] = {}

    def ordered(self, replica_tag: ReplicaTag) -> None:
        """The runtime is told to start it."""
        self._starts[replica_tag] = _Start(self._now())

    def hear(self, event: ReplicaEvent) -> None:
        """The runtime tells something."""
        start = self._starts.get(event.replica_tag)
        if start is None:
            return
        if isinstance(event, Placed):
            start.was_spare = event.was_spare
        elif isinstance(event, Constructed | StartFailed | ProcessEnded):
            del self._starts[event.replica_tag]
            if isinstance(event, Constructed):
                seconds = self._now() - start.ordered_at
                backend_tag = backend_tag_of(event.replica_tag)
                self._metrics.count_start(backend_tag, seconds, was_spare=start.was_spare)

    def compare(self, before: HostState, after: HostState) -> None:
        """The host's state has changed."""
        for tag, held in after.replicas.items():
            if held.status in _FAILURES:
                known = before.replicas.get(tag)
                if known is None or known.status is not held.status:
                    self._metrics.count_failure(backend_tag_of(tag), held.status)
