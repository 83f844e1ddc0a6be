"""The replicas of one backend: which exist, which take new requests, and which are ejected for their failures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final

from serve_common.config.backend import BackendConfig, OutlierEjection
from serve_common.names import ReplicaTag
from serve_common.protocol.snapshots import BackendSnapshot
from serve_common.routing.replica_choice import ReplicaSlots

TIMES_MAX: Final = 10
"""The longest ejection, as a multiple of the first."""
LEAVING_S: Final = 5.0
"""Seconds for which a drained replica that has left still counts for the requests it had: their answers may be here,
unread, or wait for a probe. Where its process has ended, probes say so long before."""


@final
class Outliers:
    """The ejected replicas of one router.

    Why never more than a share of all: when all fail, the requests or the model are at fault, and the remaining
    replicas would only be overloaded.
    """

    __slots__ = ("_allowed", "_config", "ejected", "ejections")

    def __init__(self, config: OutlierEjection) -> None:
        self.ejected: list[ReplicaSlots] = []
        self.ejections = 0
        """How often a replica was ejected so far."""
        self._config = config
        self._allowed = 0

    def fail(self, slots: ReplicaSlots, now: float, count: int = 1) -> bool:
        """Count ``count`` more failures of ``slots``; True when that ejects it."""
        slots.has_failed = True
        slots.failures += count
        config = self._config
        if (
            not 0 < config.consecutive_failures <= slots.failures
            or slots.is_ejected
            or slots.is_draining
            or len(self.ejected) >= self._allowed
        ):
            return False
        slots.failures = 0
        slots.times_ejected = min(slots.times_ejected + 1, TIMES_MAX)
        slots.ejected_at = now
        slots.ejected_until = now + config.ejection_time_s * slots.times_ejected
        slots.is_ejected = True
        self.ejected.append(slots)
        self.ejections += 1
        return True

    def configure(self, config: OutlierEjection, running: int) -> list[ReplicaSlots]:
        """Use ``config`` for ``running`` replicas; return those that are no longer ejected."""
        self._config = config
        self._allowed = int(running * config.max_ejected_percent / 100) if config.consecutive_failures else 0
        self.ejected.sort(key=lambda slots: slots.ejected_until)
        too_many = max(0, len(self.ejected) - self._allowed)
        returned, self.ejected = self.ejected[:too_many], self.ejected[too_many:]
        return _returned(returned)

    def take_back(self, now: float) -> list[ReplicaSlots]:
        """End ejections whose time is over; return those replicas."""
        returned = [slots for slots in self.ejected if slots.ejected_until <= now]
        if returned:
            self.ejected = [slots for slots in self.ejected if slots.ejected_until > now]
        return _returned(returned)

    def forgive(self, since: float) -> list[ReplicaSlots]:
        """Undo ejections from ``since`` on, which were not the replicas' fault; return those replicas."""
        returned = [slots for slots in self.ejected if slots.ejected_at >= since]
        self.ejected = [slots for slots in self.ejected if slots.ejected_at < since]
        for slots in returned:
            slots.times_ejected -= 1
        return _returned(returned)

    def discard(self, slots: ReplicaSlots) -> None:
        """Forget ``slots``, which drains or is gone."""
        if slots.is_ejected:
            slots.is_ejected = False
            self.ejected.remove(slots)

    def clear(self) -> None:
        """Forget all replicas."""
        self.ejected.clear()


def _returned(returned: list[ReplicaSlots]) -> list[ReplicaSlots]:
    for slots in returned:
        slots.is_ejected = False
    return returned


@final
class ReplicaPool:
    """Keeps `open` consistent with the state of each replica."""

    __slots__ = ("_leaving", "blocked", "open", "outliers", "replicas", "requests_max")

    def __init__(self) -> None:
        defaults = BackendConfig()
        self.replicas: Final[dict[ReplicaTag, ReplicaSlots]] = {}
        self.open: Final[list[ReplicaSlots]] = []
        """Replicas that may be sent a request now, in no order."""
        self.blocked: Final[set[ReplicaTag]] = set()
        """Replicas that are or were blocked, until `reopen` has checked them."""
        self.outliers: Final = Outliers(defaults.outlier_ejection)
        self.requests_max = defaults.max_concurrent_queries
        self._leaving: dict[ReplicaTag, float] = {}
        """Drained replicas that have left with requests, and until when these may be answered."""

    @property
    def has_blocked(self) -> bool:
        """True when `reopen` may have something to do at a later time."""
        return bool(self.blocked or self.outliers.ejected)

    def apply(self, snapshot: BackendSnapshot, now: float) -> tuple[list[ReplicaSlots], list[ReplicaSlots]]:
        """Apply replicas and limits; return the replicas that are gone, and those that leave with requests.

        Replicas in the snapshot are unblocked. An ejection goes on: it is independent of snapshots.
        """
        self.requests_max = snapshot.max_concurrent_queries
        gone, leaving = [], []
        for tag in self.replicas.keys() - {*snapshot.replicas, *snapshot.draining}:
            slots = self.replicas[tag]
            self.close(slots)
            if slots.has_drained and slots.requests:
                if tag not in self._leaving:
                    self._leaving[tag] = now + LEAVING_S
                    slots.is_draining, slots.block = True, None
                    self.outliers.discard(slots)
                    leaving.append(slots)
            else:
                gone.append(self._remove(slots))
        for tag in (*snapshot.draining, *snapshot.replicas):
            self._leaving.pop(tag, None)
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
        return gone, leaving

    def has_left(self, replica: ReplicaTag) -> bool:
        """Whether ``replica`` is not in the snapshot."""
        return replica in self._leaving or replica not in self.replicas

    @property
    def has_leaving(self) -> bool:
        """True when `take_left` may have something to do at a later time."""
        return bool(self._leaving)

    def take_left(self, now: float) -> list[ReplicaSlots]:
        """Remove and return those that have left and need not be waited for any more."""
        left = [
            self.replicas[tag]
            for tag, until in self._leaving.items()
            if now >= until or not self.replicas[tag].requests
        ]
        return [self._remove(slots) for slots in left]

    def _remove(self, slots: ReplicaSlots) -> ReplicaSlots:
        self._leaving.pop(slots.tag, None)
        self.blocked.discard(slots.tag)
        self.outliers.discard(slots)
        self.close(slots)
        return self.replicas.pop(slots.tag)

    def running(self) -> list[ReplicaTag]:
        """The replicas that do not drain."""
        return [tag for tag, slots in self.replicas.items() if not slots.is_draining]

    def reopen(self, now: float) -> None:
        """Make replicas available again whose block or ejection is over."""
        for tag in sorted(self.blocked):
            slots = self.replicas[tag]
            if slots.block is None or slots.blocked_until <= now:
                slots.block = None
                self.blocked.discard(tag)
                self.refresh((slots,))
        self.refresh(self.outliers.take_back(now))

    def count_failures(self, slots: ReplicaSlots, now: float, count: int = 1) -> None:
        """Count ``count`` more failures of ``slots``, which may eject it."""
        if self.outliers.fail(slots, now, count):
            self.close(slots)

    def forgive(self, since: float) -> None:
        """Undo failures from ``since`` on, which were not the replicas' fault."""
        for slots in self.replicas.values():
            slots.failures = 0
        self.refresh(self.outliers.forgive(since))

    def block(self, slots: ReplicaSlots) -> None:
        """Register ``slots``, which was blocked for a time."""
        self.blocked.add(slots.tag)
        self.close(slots)

    def refresh(self, replicas: Iterable[ReplicaSlots]) -> None:
        """Update `open` from the state of ``replicas``."""
        for slots in replicas:
            if not slots.can_take(self.requests_max):
                self.close(slots)
            elif slots.position < 0:
                slots.position = len(self.open)
                self.open.append(slots)

    def close(self, slots: ReplicaSlots) -> None:
        """Remove ``slots`` from `open`, if it is there."""
        if slots.position < 0:
            return
        # The last one takes its place in the list: order does not matter, and nothing is searched.
        last = self.open.pop()
        if last is not slots:
            last.position = slots.position
            self.open[slots.position] = last
        slots.position = -1

    def clear(self) -> None:
        """Forget all."""
        self.replicas.clear()
        self._leaving.clear()
        self.open.clear()
        self.blocked.clear()
        self.outliers.clear()
