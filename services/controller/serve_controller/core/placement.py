"""Where a replica runs: the controller chooses the host, Ray chooses the node inside it.

Why a ledger: several replicas are placed in one decision, and each must see what the ones before it took.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from serve_common.names import HostId
from serve_controller.core.checkpoint import Draft
from serve_controller.core.objects import BackendVersion, Replica, ReplicaState
from serve_controller.core.observed import HostStatus, ObservedState, host_status
from serve_controller.core.transitions import IN_HOST_GOAL

GOAL_BYTES = "goal_bytes"
"""A host's whole goal must fit into one NATS message, so its size is a resource like any other."""
GOAL_BYTES_MAX = 900_000.0
"""NATS' default max_payload is 1 MiB; the rest is for the envelope."""
_EPSILON = 1e-6
"""Ray counts in steps of 0.0001; sums of such fractions are compared with this much play."""


def needs_of(version: BackendVersion) -> dict[str, float]:
    """What one replica of this version takes from its host, by Ray's names of resources."""
    options = version.replica_config.ray_actor_options
    needs = {"CPU": options.num_cpus, "GPU": options.num_gpus, "memory": options.memory, **options.resources}
    needs[GOAL_BYTES] = 500.0 + len(msgspec.json.encode((version.replica_config, version.backend_config)))
    return {name: amount for name, amount in needs.items() if amount > 0}


def fits(free: Mapping[str, float], needs: Mapping[str, float]) -> bool:
    """Whether ``needs`` can be taken from ``free``."""
    return all(free.get(name, 0.0) + _EPSILON >= amount for name, amount in needs.items())


class Ledger:
    """What is free on each host that new replicas may be placed on."""

    def __init__(self, draft: Draft, observed: ObservedState, now: float) -> None:
        """Counts every replica that is on a host, also those that still stop there: their resources are taken."""
        self.free: dict[HostId, dict[str, float]] = {}
        self._count: dict[HostId, int] = {}
        for host_id, host in observed.hosts.items():
            if host_status(observed, host_id, now) is HostStatus.LIVE:
                self.free[host_id] = {**host.report.resources, GOAL_BYTES: GOAL_BYTES_MAX}
                self._count[host_id] = 0
        for backend_tag, replicas in draft.replicas.items():
            backend = draft.backends.get(backend_tag)
            if backend is None:
                continue
            needs_by_version = {v.config_version: needs_of(v) for v in backend.versions()}
            for replica in replicas.values():
                self._take(replica, needs_by_version.get(replica.config_version, {}))

    def _take(self, replica: Replica, needs: Mapping[str, float]) -> None:
        if replica.host_id is None or replica.host_id not in self.free:
            return
        free = self.free[replica.host_id]
        for name, amount in needs.items():
            if name != GOAL_BYTES or replica.state in IN_HOST_GOAL:
                free[name] = free.get(name, 0.0) - amount
        if replica.state is not ReplicaState.STOPPING:
            self._count[replica.host_id] += 1

    def place(self, needs: Mapping[str, float]) -> HostId | None:
        """Take ``needs`` from the host with the fewest replicas (then the most free CPU) that has room, or None."""
        candidates = [host_id for host_id, free in self.free.items() if fits(free, needs)]
        if not candidates:
            return None
        chosen = min(candidates, key=lambda h: (self._count[h], -self.free[h].get("CPU", 0.0), h))
        for name, amount in needs.items():
            self.free[chosen][name] = self.free[chosen].get(name, 0.0) - amount
        self._count[chosen] += 1
        return chosen

    def resize(self, host_id: HostId | None, freed: Mapping[str, float], needs: Mapping[str, float]) -> bool:
        """Take ``needs`` in place of ``freed`` on a host; False, and nothing taken, when its goal has no room.

        Only the size of the goal counts: a configuration changes none of Ray's resources.
        """
        if host_id is None or host_id not in self.free:
            return True
        grows = needs.get(GOAL_BYTES, 0.0) - freed.get(GOAL_BYTES, 0.0)
        free = self.free[host_id]
        if grows > max(free[GOAL_BYTES], 0.0):
            return False
        free[GOAL_BYTES] -= grows
        return True

    def would_fit_without(
        self, host_id: HostId | None, freed: Mapping[str, float], needs: Mapping[str, float]
    ) -> bool:
        """Whether ``needs`` would fit on ``host_id`` if ``freed`` were given back there."""
        if host_id is None or host_id not in self.free:
            return False
        free = dict(self.free[host_id])
        for name, amount in freed.items():
            free[name] = free.get(name, 0.0) + amount
        return fits(free, needs)

    def why_not(self, needs: Mapping[str, float]) -> str:
        """For people: why no host has room."""
        if not self.free:
            return "waits for a replica host: none is live"
        lacking = []
        for name, amount in sorted(needs.items()):
            best = max(free.get(name, 0.0) for free in self.free.values())
            if best + _EPSILON < amount:
                lacking.append(f"{amount:g} {name} (the freest host has {max(best, 0.0):g})")
        if lacking:
            return f"needs {', '.join(lacking)}"
        return "no single host has room for all of " + ", ".join(
            f"{a:g} {n}" for n, a in sorted(needs.items())
        )
