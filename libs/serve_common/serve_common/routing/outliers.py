"""Leaves out replicas that fail again and again, for a time that grows.

Why never more than a share of them: when all fail, the fault is the requests' or the model's, and whoever is left would
only be buried.
"""

from __future__ import annotations

from typing import Final, final

from serve_common.routing.replica_slots import ReplicaSlots
from serve_common.values.backend_config import OutlierEjection

TIMES_MAX: Final = 10
"""The longest ejection, as a multiple of the first."""


@final
class Outliers:
    """The ejected replicas of one router."""

    __slots__ = ("_allowed", "_config", "ejected", "ejections")

    def __init__(self, config: OutlierEjection) -> None:
        self.ejected: list[ReplicaSlots] = []
        self.ejections = 0
        """How often a replica was ejected so far."""
        self._config = config
        self._allowed = 0

    def fail(self, slots: ReplicaSlots, now: float, count: int = 1) -> bool:
        """``slots`` failed ``count`` requests more; True when that ejects it."""
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
        """Go by ``config`` for so many ``running`` replicas; returned are those that are ejected no more."""
        self._config = config
        self._allowed = int(running * config.max_ejected_percent / 100) if config.consecutive_failures else 0
        self.ejected.sort(key=lambda slots: slots.ejected_until)
        too_many = max(0, len(self.ejected) - self._allowed)
        returned, self.ejected = self.ejected[:too_many], self.ejected[too_many:]
        return _returned(returned)

    def take_back(self, now: float) -> list[ReplicaSlots]:
        """Those whose time is over."""
        returned = [slots for slots in self.ejected if slots.ejected_until <= now]
        if returned:
            self.ejected = [slots for slots in self.ejected if slots.ejected_until > now]
        return _returned(returned)

    def forgive(self, since: float) -> list[ReplicaSlots]:
        """What failed from ``since`` on was no fault of the replicas: returned are those that were ejected by it."""
        returned = [slots for slots in self.ejected if slots.ejected_at >= since]
        self.ejected = [slots for slots in self.ejected if slots.ejected_at < since]
        for slots in returned:
            slots.times_ejected -= 1
        return _returned(returned)

    def discard(self, slots: ReplicaSlots) -> None:
        """``slots`` drains or is gone."""
        if slots.is_ejected:
            slots.is_ejected = False
            self.ejected.remove(slots)

    def clear(self) -> None:
        """All replicas are gone."""
        self.ejected.clear()


def _returned(returned: list[ReplicaSlots]) -> list[ReplicaSlots]:
    for slots in returned:
        slots.is_ejected = False
    return returned
