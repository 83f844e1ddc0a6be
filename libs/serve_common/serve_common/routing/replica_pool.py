"""The replicas of one backend: which exist, which are open to new requests, and why the others are not.

Why apart from the router: replicas come, go, drain, fall silent and are ejected without any request knowing of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final

from serve_common.names import ReplicaTag
from serve_common.routing.outliers import Outliers
from serve_common.routing.replica_slots import ReplicaSlots
from serve_common.values.backend_config import BackendConfig
from serve_common.wires.snapshots import BackendSnapshot


@final
class ReplicaPool:
    """Keeps `open` true to what is known of each replica."""

    __slots__ = ("blocked", "open", "outliers", "replicas", "requests_max")

    def __init__(self) -> None:
        defaults = BackendConfig()
        self.replicas: Final[dict[ReplicaTag, ReplicaSlots]] = {}
        self.open: Final[list[ReplicaSlots]] = []
        """Those that may be sent a request now, in no order."""
        self.blocked: Final[set[ReplicaTag]] = set()
        """Those that are or were blocked, until `reopen` has looked at them."""
        self.outliers: Final = Outliers(defaults.outlier_ejection)
        self.requests_max = defaults.max_concurrent_queries

    @property
    def has_aside(self) -> bool:
        """True when `reopen` may have something to do at a later time."""
        return bool(self.blocked or self.outliers.ejected)

    def apply(self, snapshot: BackendSnapshot) -> list[ReplicaSlots]:
        """Take over replicas and limits; returns those that are gone. One that is named anew is blocked no more.

        An ejection goes on: it has nothing to do with what a snapshot is about.
        """
        self.requests_max = snapshot.max_concurrent_queries
        gone = []
        for tag in self.replicas.keys() - {*snapshot.replicas, *snapshot.draining}:
            slots = self.replicas.pop(tag)
            self.outliers.discard(slots)
            self.close(slots)
            gone.append(slots)
        for tag in (*snapshot.draining, *snapshot.replicas):
            found = self.replicas.get(tag)
            slots = self.replicas[tag] = ReplicaSlots(tag) if found is None else found
            slots.is_draining = False
            slots.block = None
            slots.code_version = snapshot.code_versions.get(tag)
        for tag in snapshot.draining:
            self.replicas[tag].is_draining = True
            self.outliers.discard(self.replicas[tag])
        self.blocked.clear()
        running = len({*snapshot.replicas} - {*snapshot.draining})
        self.outliers.configure(snapshot.protection.outlier_ejection, running)
        self.refresh(self.replicas.values())
        return gone

    def reopen(self, now: float) -> None:
        """Open those again whose time aside is over."""
        for tag in sorted(self.blocked):
            slots = self.replicas[tag]
            if slots.block is None or slots.blocked_until <= now:
                slots.block = None
                self.blocked.discard(tag)
                self.refresh((slots,))
        self.refresh(self.outliers.take_back(now))

    def count_failures(self, slots: ReplicaSlots, now: float, count: int = 1) -> None:
        """``slots`` failed ``count`` requests more, which may eject it."""
        if self.outliers.fail(slots, now, count):
            self.close(slots)

    def forgive(self, since: float) -> None:
        """Nothing that failed from ``since`` on was a replica's fault."""
        for slots in self.replicas.values():
            slots.failures = 0
        self.refresh(self.outliers.forgive(since))

    def block(self, slots: ReplicaSlots) -> None:
        """``slots`` was blocked for a time."""
        self.blocked.add(slots.tag)
        self.close(slots)

    def refresh(self, replicas: Iterable[ReplicaSlots]) -> None:
        """Bring `open` up to what is known of these."""
        for slots in replicas:
            if not slots.can_take(self.requests_max):
                self.close(slots)
            elif slots.position < 0:
                slots.position = len(self.open)
                self.open.append(slots)

    def close(self, slots: ReplicaSlots) -> None:
        """Take ``slots`` out of `open`, if it is there."""
        if slots.position < 0:
            return
        # Its place in the list is taken by the last one: order does not matter, and nothing is searched.
        last = self.open.pop()
        if last is not slots:
            last.position = slots.position
            self.open[slots.position] = last
        slots.position = -1

    def clear(self) -> None:
        """Forget all."""
        self.replicas.clear()
        self.open.clear()
        self.blocked.clear()
        self.outliers.clear()
