"""Promises about how many: surge, unavailable budget, room."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from serve_common.config.backend import BackendConfig
from serve_common.names import BackendTag, HostId, ReplicaTag, parse_backend_tag
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import Backend, ObjectChanges, ObjectKind, Replica, ReplicaState

if TYPE_CHECKING:
    from serve_controller.ports import HistoryEntry
    from serve_controller.shell.control_loop import Term
    from tests.simulation.sim_controller import SimController
    from tests.simulation.sim_host import SimHost
    from tests.simulation.world import World
    from tests.simulation.world_store import Writer

S = ReplicaState
STUCK_S = 21.0
"""Beyond the timeout itself: what the host is given, and a few cycles."""
WANTED = (S.SHOULD_START, S.STARTING, S.RUNNING, S.UPDATING, S.UNHEALTHY)
SERVING = (S.RUNNING, S.UPDATING)
BEGINS = (S.SHOULD_START, S.STARTING)
"""One that is first recorded in another state is adopted: a goal that a restored store lost had started it."""


def share(config: BackendConfig, percent: float) -> int:
    """So many percent of the replicas, rounded up."""
    return math.ceil(max(config.num_replicas, 1) * percent / 100)


def wanted_of(backend: Backend) -> int:
    """How many replicas the users asked for."""
    if backend.deleting or backend.halted:
        return 0
    return backend.target.backend_config.num_replicas


def _count(checkpoint: Checkpoint, tag: BackendTag, states: tuple[ReplicaState, ...]) -> int:
    return sum(r.state in states for r in checkpoint.get_replicas(tag).values())


class Surge:
    """New replicas are begun only up to what is wanted plus the surge, or what is there already plus the surge."""

    def __init__(self, world: World) -> None:
        self.world = world

    def on_commit(
        self,
        writer: Writer,
        epoch: int,
        before: Checkpoint,
        after: Checkpoint,
        changes: ObjectChanges,
        _: object,
    ) -> None:
        begun: dict[BackendTag, int] = {}
        for value in changes.puts:
            if (
                isinstance(value, Replica)
                and value.replica_tag not in before.get_replicas(value.backend_tag)
                and value.state in BEGINS
            ):
                begun[value.backend_tag] = begun.get(value.backend_tag, 0) + 1
        for tag, number in begun.items():
            backend, was = after.backends[tag], before.backends.get(tag)
            there = _count(after, tag, WANTED)
            config = backend.target.backend_config
            # One that is given up in the same plan was wanted until then.
            wanted = max(wanted_of(backend), 0 if was is None else wanted_of(was))
            most = max(wanted, there - number) + share(config, config.max_surge_percent)
            self.world.check(there <= most, f"{there} replicas of {tag} are to run; at most {most} may")


class UnavailableBudget:
    """What serves well is stopped only as far as the budget goes; beyond what is wanted only where there is no room."""

    def __init__(self, world: World) -> None:
        self.world = world

    def on_commit(
        self,
        writer: Writer,
        epoch: int,
        before: Checkpoint,
        after: Checkpoint,
        changes: ObjectChanges,
        _: object,
    ) -> None:
        stopped = {
            value.backend_tag
            for value in changes.puts
            if isinstance(value, Replica) and value.state is S.SHOULD_STOP and self._is_well(before, value)
        }
        for tag in sorted(stopped):
            backend = after.backends[tag]
            config = backend.target.backend_config
            least = wanted_of(backend)
            no_room = any(r.state is S.SHOULD_START for r in after.get_replicas(tag).values()) or not share(
                config, config.max_surge_percent
            )
            if no_room:
                least -= share(config, config.max_unavailable_percent)
            serving = _count(after, tag, SERVING)
            self.world.check(
                serving >= least, f"only {serving} replicas of {tag} are left to serve, not {least}"
            )

    def _is_well(self, before: Checkpoint, replica: Replica) -> bool:
        was = before.get_replicas(replica.backend_tag).get(replica.replica_tag)
        if was is None or was.state not in SERVING or replica.replica_tag in self.world.checks.not_well:
            return False
        # One that did not take its configuration, as on a host that hangs, is replaced.
        return any(
            replica.replica_tag in host.serving
            and not host.state.is_leaving
            and not host.state.replicas[replica.replica_tag].config_error_version
            for host in self.world.hosts
        )


class ServingIsNotForgotten:
    """What serves well on a host that is heard of is not taken for gone by a message that came late."""

    def __init__(self, world: World) -> None:
        self.world = world

    def on_commit(
        self,
        writer: Writer,
        epoch: int,
        before: Checkpoint,
        after: Checkpoint,
        changes: ObjectChanges,
        _: object,
    ) -> None:
        if self.world.weather.faults.has_deaths or self.world.checks.is_silence_possible:
            return
        for kind, name in changes.deletes:
            if kind is ObjectKind.REPLICA and name not in self.world.checks.not_well:
                was = before.get_replicas(parse_backend_tag(ReplicaTag(name)))[ReplicaTag(name)]
                self.world.check(
                    was.state not in SERVING or not any(name in host.serving for host in self.world.hosts),
                    f"{name} serves and was taken for gone",
                )


class StuckIsGivenUp:
    """A start or a stop that takes far longer than it may is given up by force: it does not last for ever."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._unknown_at = 0.0
        """When a leader last did not know the bucket."""

    def on_cycle(self, controller: SimController, term: Term) -> None:
        if term.observed.bucket is None:
            self._unknown_at = self.world.time  # it plans nothing yet
        if controller.cycles % 10 or term.epoch != self.world.store.epoch or self.world.bus.is_hanging:
            return
        for tag, replicas in term.checkpoint.replicas.items():
            config = term.checkpoint.backends[tag].target.backend_config
            patience_s = max(config.start_timeout_s, config.graceful_shutdown_timeout_s) + STUCK_S
            for replica in replicas.values():
                is_stuck = replica.state is S.STARTING or (
                    replica.state is S.STOPPING and not replica.force_kill
                )
                self.world.check(
                    not is_stuck or self.world.time - max(replica.since, self._since) < patience_s,
                    f"{replica.replica_tag} has been {replica.state.value} since {replica.since}",
                )

    @property
    def _since(self) -> float:
        """Since when a leader could do something about it."""
        return max(self.world.checks.led_since, self._unknown_at)


class ForceKillIsForced:
    """What is deleted by force is not drained."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.forced: dict[str, float] = {}

    def save(self) -> dict[str, float]:
        return dict(self.forced)

    def go_back(self, saved: dict[str, float]) -> None:
        self.forced = dict(saved)

    def on_commit(
        self,
        writer: Writer,
        epoch: int,
        before: Checkpoint,
        after: Checkpoint,
        changes: ObjectChanges,
        history: Sequence[HistoryEntry],
    ) -> None:
        for entry in history:
            if entry.verb == "delete_backend" and '"force_kill":true' in entry.request:
                self.forced[entry.subject] = self.world.time
            elif entry.subject in self.forced:
                del self.forced[entry.subject]

    def on_drain(self, host: SimHost, tag: ReplicaTag) -> None:
        backend_tag = parse_backend_tag(tag)
        replica = self.world.store.checkpoint.get_replicas(backend_tag).get(tag)
        if replica is not None and not host.state.is_leaving:
            self.world.check(
                replica.since < self.forced.get(backend_tag, float("inf")),
                f"{host.host_id} drains {tag}, which was to be killed",
            )


class ReconfiguresAFew:
    """A new configuration is given to a few replicas at a time, so that a bad one stops early."""

    def __init__(self, world: World) -> None:
        self.world = world

    def on_commit(
        self,
        writer: Writer,
        epoch: int,
        before: Checkpoint,
        after: Checkpoint,
        changes: ObjectChanges,
        _: object,
    ) -> None:
        told: set[BackendTag] = set()
        for value in changes.puts:
            if isinstance(value, Replica) and value.state is S.UPDATING:
                was = before.get_replicas(value.backend_tag).get(value.replica_tag)
                if was is not None and was.state is S.RUNNING:
                    told.add(value.backend_tag)
        for tag in sorted(told):
            config = after.backends[tag].target.backend_config
            most = max(1, share(config, config.max_unavailable_percent))
            updating = _count(after, tag, (S.UPDATING,))
            left = _count(before, tag, (S.UPDATING,))
            self.world.check(
                updating <= max(most, left), f"{updating} replicas of {tag} are reconfigured at once"
            )


class RoomOfHosts:
    """No host is given more than it has, nor more replicas of a backend than that allows."""

    def __init__(self, world: World) -> None:
        self.world = world

    def on_commit(
        self,
        writer: Writer,
        epoch: int,
        before: Checkpoint,
        after: Checkpoint,
        changes: ObjectChanges,
        _: object,
    ) -> None:
        placed: set[HostId] = set()
        for value in changes.puts:
            if not isinstance(value, Replica) or value.host_id is None:
                continue
            was = before.get_replicas(value.backend_tag).get(value.replica_tag)
            if was is None and value.state not in BEGINS:
                continue
            if was is not None and was.host_id is not None:
                self.world.check(was.host_id == value.host_id, f"{value.replica_tag} moved between hosts")
                continue
            placed.add(value.host_id)
            record = after.hosts.get(value.host_id)
            self.world.check(
                record is not None and not (record.draining and before.hosts[value.host_id].draining),
                f"{value.replica_tag} was placed on {value.host_id}, which is to run nothing",
            )
            most = after.backends[value.backend_tag].target.backend_config.max_replicas_per_host
            there = sum(r.host_id == value.host_id for r in after.get_replicas(value.backend_tag).values())
            self.world.check(
                most is None or there <= most, f"{there} replicas of {value.backend_tag} on {value.host_id}"
            )
        for host in self.world.hosts:
            if host.host_id in placed:
                taken = sum(r.needs.get("CPU", 0.0) for r in after.by_host[host.host_id].values())
                self.world.check(
                    taken <= host.cpus + 1e-6, f"{host.host_id} has {host.cpus} CPU and is to give {taken}"
                )
