"""When a replica that is not heard of counts as dead.

Why not at the first "no responders": a replica whose bus connection is being renewed gives the same answer for a
moment, and declaring it dead turns everything in flight there into errors. So silence must last, and longer just after
this process itself was cut off, because then the replicas likely were too.
"""

from __future__ import annotations

from typing import Final, final

from serve_common.names import ReplicaTag

CONFIRM_DEATH_S: Final = 0.3
RECONNECT_GRACE_S: Final = 2.0
PROBE_SILENT_S: Final = 0.1
"""How often a replica under suspicion is asked."""


@final
class Suspicions:
    """The replicas that nobody listened for when they were asked last."""

    __slots__ = ("_asked_at", "_not_before", "_since")

    def __init__(self) -> None:
        self._since: dict[ReplicaTag, float] = {}
        self._asked_at: dict[ReplicaTag, float] = {}
        self._not_before = float("-inf")

    def __bool__(self) -> bool:
        return bool(self._since)

    def reconnected(self, now: float) -> None:
        """This process was cut off from the bus until now."""
        self._since.clear()
        self._asked_at.clear()
        self._not_before = now + RECONNECT_GRACE_S

    def heard(self, replica: ReplicaTag) -> None:
        """Something came from ``replica``."""
        self._since.pop(replica, None)
        self._asked_at.pop(replica, None)

    def no_responders(self, replica: ReplicaTag, now: float) -> bool:
        """Nobody listens for ``replica``; True when that means that it is dead, which ends the suspicion."""
        since = self._since.setdefault(replica, now)
        if now - since < CONFIRM_DEATH_S or now < self._not_before:
            self._asked_at.setdefault(replica, now)
            return False
        self.heard(replica)
        return True

    def due(self, now: float) -> list[ReplicaTag]:
        """The suspects that are to be asked now."""
        due = [replica for replica, at in self._asked_at.items() if now - at >= PROBE_SILENT_S]
        for replica in due:
            self._asked_at[replica] = now
        return due
