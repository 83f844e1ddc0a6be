"""Placement of replicas: the controller chooses the host, Ray chooses the node inside it.

Why a ledger over the draft: several replicas are placed in one decision, and each must see what the ones before it
took. What is taken is an index of the checkpoint, so a placement reads hosts and never other replicas.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from serve_common.config.backend import BackendConfig, Placement
from serve_common.names import BackendTag, HostId
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.host_load import UNITS, fits, in_units
from serve_controller.core.objects import BackendVersion, Replica
from serve_controller.core.observed import HostStatus, ObservedState, host_status
from serve_controller.core.rollouts.record import get_compared
from serve_controller.core.transitions import WANTED

GOAL_BYTES_MAX: Final = 900_000
"""A host's whole goal must fit into one NATS message: max_payload is 1 MiB by default; the rest is the envelope."""
_GOAL_BYTES_EACH: Final = 750
"""Bytes of one replica without its users' values: names of fields, tags of the greatest length, numbers."""

NO_PEER_VERSIONS: Final[Mapping[BackendTag, int]] = {}

Rank = tuple[float, float, HostId]
"""Hosts with the lowest come first."""


def resource_needs(version: BackendVersion) -> dict[str, float]:
    """Resources that one replica of this version takes from its host, by Ray's names."""
    options = version.replica_config.ray_actor_options
    needs = {"CPU": options.num_cpus, "GPU": options.num_gpus, "memory": options.memory, **options.resources}
    return {name: amount for name, amount in needs.items() if amount > 0}


def estimate_goal_bytes(
    version: BackendVersion, peer_versions: Mapping[BackendTag, int] = NO_PEER_VERSIONS
) -> int:
    """Bytes that one replica of this version takes of its host's goal."""
    user_values = (version.replica_config, version.backend_config.user_config, peer_versions)
    return _GOAL_BYTES_EACH + len(msgspec.json.encode(user_values))


class Ledger:
    """Free capacity of each host that accepts new replicas."""

    def __init__(self, draft: Checkpoint, observed: ObservedState, now: float) -> None:
        """Reads ``draft`` again with every query, so it includes what was placed since."""
        self.draft = draft
        self._observed = observed
        self._now = now
        self._hosts: dict[HostId, Mapping[str, int]] | None = None

    @property
    def hosts(self) -> dict[HostId, Mapping[str, int]]:
        """Total units of each resource, by host that accepts new replicas."""
        if self._hosts is None:
            self._hosts = {}
            for host_id in sorted(self._observed.hosts):
                record = self.draft.hosts.get(host_id)
                is_live = host_status(self._observed, host_id, self._now) is HostStatus.LIVE
                if is_live and (record is None or not record.draining):
                    self._hosts[host_id] = self._observed.hosts[host_id].units
        return self._hosts

    def free(self, host_id: HostId) -> dict[str, int]:
        """Units that are not taken on a host."""
        taken = self.draft.get_load(host_id).taken
        whole = self.hosts[host_id]
        return {name: amount - taken.get(name, 0) for name, amount in whole.items()}

    def resize(self, host_id: HostId | None, grows_bytes: int) -> bool:
        """Whether a host's goal may grow by ``grows_bytes``."""
        if host_id is None or grows_bytes <= 0:
            return True
        return self.draft.get_load(host_id).goal_bytes + grows_bytes <= GOAL_BYTES_MAX

    def would_fit_without(
        self, tag: BackendTag, host_id: HostId | None, leaving: Sequence[Replica], version: BackendVersion
    ) -> bool:
        """Whether one more of ``version`` would fit on ``host_id`` if these replicas of the backend left it."""
        if host_id is None or host_id not in self.hosts:
            return False
        free = self.free(host_id)
        for replica in leaving:
            for name, amount in replica.needs.items():
                free[name] = free.get(name, 0) + in_units(amount)
        per_host = version.backend_config.max_replicas_per_host
        if per_host is not None and self.count_on(tag, host_id) - len(leaving) >= per_host:
            return False
        return fits(free, resource_needs(version))

    def count_on(self, tag: BackendTag, host_id: HostId) -> int:
        """Number of a backend's replicas on a host, including those that are still stopping."""
        return sum(r.host_id == host_id for r in self.draft.get_replicas(tag).values())

    def why_not(self, tag: BackendTag, version: BackendVersion) -> str:
        """Why no host has capacity, for people."""
        if not self.hosts:
            return "waits for a replica host: none is live"
        needs = resource_needs(version)
        frees = [self.free(host_id) for host_id in self.hosts]
        lacking = []
        for name, amount in sorted(needs.items()):
            best = max(free.get(name, 0) for free in frees)
            if best < in_units(amount):
                lacking.append(f"{amount:g} {name} (the freest host has {max(best, 0) / UNITS:g})")
        if lacking:
            return f"needs {', '.join(lacking)}"
        if not any(fits(free, needs) for free in frees):
            return "no single host has room for all of " + _format_needs(needs)
        per_host = version.backend_config.max_replicas_per_host
        if per_host is not None and all(self.count_on(tag, host_id) >= per_host for host_id in self.hosts):
            return f"max_replicas_per_host is {per_host}, and every host has so many"
        if per_host is not None:
            return f"no host with less than max_replicas_per_host ({per_host}) has room for {_format_needs(needs)}"
        return "the goals of the hosts that have room would become larger than one message"


def _format_needs(needs: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(needs.items())) or "a replica"


class Placer:
    """Chooses hosts for replicas of one version. Its choices count as taken, whether they are put or not."""

    def __init__(
        self,
        ledger: Ledger,
        tag: BackendTag,
        version: BackendVersion,
        peer_versions: Mapping[BackendTag, int] = NO_PEER_VERSIONS,
    ) -> None:
        """Ranks every host once."""
        config: BackendConfig = version.backend_config
        self.needs = resource_needs(version)
        self.goal_bytes = estimate_goal_bytes(version, peer_versions)
        self._units = {name: in_units(amount) for name, amount in self.needs.items()}
        self._rank: Callable[[int, int, HostId], Rank] = (
            _pack_rank if config.placement is Placement.PACK else _spread_rank
        )
        per_host = config.max_replicas_per_host
        counts: dict[HostId, int] = {}
        if per_host is not None:
            for replica in ledger.draft.get_replicas(tag).values():
                if replica.host_id is not None:
                    counts[replica.host_id] = counts.get(replica.host_id, 0) + 1
        self._ledger = ledger
        self._per_host = NUMBER_MAX if per_host is None else per_host
        self._counts = counts
        self._unpaired = _get_unpaired(ledger.draft, tag)
        self._capacities: dict[HostId, _HostCapacity] = {}
        # Ranked by load alone; the free capacity is computed only for the hosts that come first.
        self._heap = [
            self._ranked(load.num_wanted, units.get("CPU", 0) - load.taken.get("CPU", 0), host_id)
            for host_id, units in ledger.hosts.items()
            for load in (ledger.draft.get_load(host_id),)
        ]
        heapq.heapify(self._heap)

    def _ranked(self, num_wanted: int, free_cpu: int, host_id: HostId) -> tuple[bool, Rank]:
        is_paired = self._unpaired.get(host_id, 0) <= 0
        return is_paired, self._rank(num_wanted, free_cpu, host_id)

    def _capacity(self, host_id: HostId) -> _HostCapacity:
        capacity = self._capacities.get(host_id)
        if capacity is None:
            load = self._ledger.draft.get_load(host_id)
            left = self._per_host - self._counts.get(host_id, 0)
            capacity = self._capacities[host_id] = _HostCapacity(
                self._ledger.free(host_id), GOAL_BYTES_MAX - load.goal_bytes, load.num_wanted, left
            )
        return capacity

    def _has_capacity(self, capacity: _HostCapacity) -> bool:
        if capacity.left <= 0 or capacity.goal_bytes < self.goal_bytes:
            return False
        return all(capacity.free.get(name, 0) >= units for name, units in self._units.items())

    def place(self) -> HostId | None:
        """Take capacity for one replica; None when no host has it."""
        while self._heap:
            host_id = self._heap[0][1][2]
            capacity = self._capacity(host_id)
            if not self._has_capacity(capacity):
                heapq.heappop(self._heap)
                continue
            for name, units in self._units.items():
                capacity.free[name] = (
                    capacity.free.get(name, 0) - units
                )  # a need below one unit may be absent on the host
            capacity.goal_bytes -= self.goal_bytes
            capacity.num_wanted += 1
            capacity.left -= 1
            if self._unpaired:
                self._unpaired[host_id] = self._unpaired.get(host_id, 0) - 1
            free_cpu = capacity.free.get("CPU", 0)
            heapq.heapreplace(self._heap, self._ranked(capacity.num_wanted, free_cpu, host_id))
            return host_id
        return None


def _get_unpaired(draft: Checkpoint, tag: BackendTag) -> dict[HostId, int]:
    """For a canary or a baseline: how many more replicas the other one has on each host.

    They go there first. A host that is slower than others, or farther, would otherwise count against one of them.
    """
    other = get_compared(tag)
    if other is None:
        return {}
    unpaired: dict[HostId, int] = {}
    for backend_tag, each in ((other, 1), (tag, -1)):
        for replica in draft.get_replicas(backend_tag).values():
            if replica.host_id is not None and replica.state in WANTED:
                unpaired[replica.host_id] = unpaired.get(replica.host_id, 0) + each
    return unpaired


NUMBER_MAX: Final = 2**31


class _HostCapacity:
    """Remaining capacity of one host, counted down by one `Placer`."""

    __slots__ = ("free", "goal_bytes", "left", "num_wanted")

    def __init__(self, free: dict[str, int], goal_bytes: int, num_wanted: int, left: int) -> None:
        self.free = free
        self.goal_bytes = goal_bytes
        self.num_wanted = num_wanted
        self.left = left


def _spread_rank(num_wanted: int, free_cpu: int, host_id: HostId) -> Rank:
    """The fewest replicas first, then the most free CPU."""
    return (num_wanted, -free_cpu, host_id)


def _pack_rank(num_wanted: int, free_cpu: int, host_id: HostId) -> Rank:
    """Hosts in use first, then the least free CPU."""
    return (0 if num_wanted else 1, free_cpu, host_id)
