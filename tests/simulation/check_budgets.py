"""Promises about how many: surge, unavailable budget, room, and who decides on the number."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from serve_common.api import commands as c
from serve_common.api.views import GoalStatus
from serve_common.config.backend import BackendConfig
from serve_common.names import BackendTag, HostId, ReplicaTag, parse_backend_tag
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.goals import owned_backends
from serve_controller.core.objects import Backend, Goal, ObjectKind, Replica, ReplicaState
from serve_controller.core.rollouts.closing import PAUSED_BY
from serve_controller.core.rollouts.record import BASELINE_SUFFIX, CANARY_SUFFIX, Rollout
from serve_controller.shell.queries import parse_request
from tests.simulation.world_store import Check, Commit

if TYPE_CHECKING:
    from serve_controller.shell.control_loop import Term
    from tests.simulation.sim_controller import SimController
    from tests.simulation.sim_host import SimHost
    from tests.simulation.world import World

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


class Surge(Check):
    """New replicas are begun only up to what is wanted plus the surge, or what is there already plus the surge."""

    def on_commit(self, commit: Commit) -> None:
        begun: dict[BackendTag, int] = {}
        for value in commit.puts(Replica):
            if commit.was(value) is None and value.state in BEGINS:
                begun[value.backend_tag] = begun.get(value.backend_tag, 0) + 1
        for tag, number in begun.items():
            backend, was = commit.after.backends[tag], commit.before.backends.get(tag)
            there = _count(commit.after, tag, WANTED)
            config = backend.target.backend_config
            # One that is given up in the same plan was wanted until then.
            wanted = max(wanted_of(backend), 0 if was is None else wanted_of(was))
            most = max(wanted, there - number) + share(config, config.max_surge_percent)
            self.world.check(there <= most, f"{there} replicas of {tag} are to run; at most {most} may")


class UnavailableBudget(Check):
    """What serves well is stopped only as far as the budget goes; beyond what is wanted only where there is no room."""

    def on_commit(self, commit: Commit) -> None:
        stopped = {
            value.backend_tag
            for value in commit.puts(Replica)
            if value.state is S.SHOULD_STOP and self._is_well(commit.was(value))
        }
        for tag in sorted(stopped):
            backend = commit.after.backends[tag]
            config = backend.target.backend_config
            least = wanted_of(backend)
            no_room = any(
                r.state is S.SHOULD_START for r in commit.after.get_replicas(tag).values()
            ) or not share(config, config.max_surge_percent)
            if no_room:
                least -= share(config, config.max_unavailable_percent)
            serving = _count(commit.after, tag, SERVING)
            self.world.check(
                serving >= least, f"only {serving} replicas of {tag} are left to serve, not {least}"
            )

    def _is_well(self, was: Replica | None) -> bool:
        if was is None or was.state not in SERVING or was.replica_tag in self.world.checks.not_well:
            return False
        # One that did not take its configuration, as on a host that hangs, is replaced.
        return any(
            was.replica_tag in host.serving
            and not host.state.is_leaving
            and not host.state.replicas[was.replica_tag].config_error_version
            for host in self.world.hosts
        )


class ServingIsNotForgotten(Check):
    """What serves well on a host that is heard of is not taken for gone by a message that came late."""

    def on_commit(self, commit: Commit) -> None:
        if self.world.weather.faults.has_deaths or self.world.checks.is_silence_possible:
            return
        for kind, name in commit.changes.deletes:
            if kind is ObjectKind.REPLICA and name not in self.world.checks.not_well:
                was = commit.before.get_replicas(parse_backend_tag(ReplicaTag(name)))[ReplicaTag(name)]
                self.world.check(
                    was.state not in SERVING or not any(name in host.serving for host in self.world.hosts),
                    f"{name} serves and was taken for gone",
                )


class StuckIsGivenUp(Check):
    """A start or a stop that takes far longer than it may is given up by force: it does not last for ever."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
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


class ForceKillIsForced(Check):
    """What is deleted by force is not drained."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.forced: dict[str, float] = {}

    def save(self) -> dict[str, float]:
        return dict(self.forced)

    def go_back(self, saved: dict[str, float]) -> None:
        self.forced = dict(saved)

    def on_commit(self, commit: Commit) -> None:
        for entry in commit.history:
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


class ReconfiguresAFew(Check):
    """A new configuration is given to a few replicas at a time, so that a bad one stops early."""

    def on_commit(self, commit: Commit) -> None:
        told = {
            value.backend_tag
            for value in commit.puts(Replica)
            if value.state is S.UPDATING and (was := commit.was(value)) is not None and was.state is S.RUNNING
        }
        for tag in sorted(told):
            config = commit.after.backends[tag].target.backend_config
            most = max(1, share(config, config.max_unavailable_percent))
            updating = _count(commit.after, tag, (S.UPDATING,))
            left = _count(commit.before, tag, (S.UPDATING,))
            self.world.check(
                updating <= max(most, left), f"{updating} replicas of {tag} are reconfigured at once"
            )


class RoomOfHosts(Check):
    """No host is given more than it has, nor more replicas of a backend than that allows."""

    def on_commit(self, commit: Commit) -> None:
        placed: set[HostId] = set()
        for value in commit.puts(Replica):
            was = commit.was(value)
            if value.host_id is None or (was is None and value.state not in BEGINS):
                continue
            if was is not None and was.host_id is not None:
                self.world.check(was.host_id == value.host_id, f"{value.replica_tag} moved between hosts")
                continue
            placed.add(value.host_id)
            record = commit.after.hosts.get(value.host_id)
            self.world.check(
                record is not None and not (record.draining and commit.before.hosts[value.host_id].draining),
                f"{value.replica_tag} was placed on {value.host_id}, which is to run nothing",
            )
            most = commit.after.backends[value.backend_tag].target.backend_config.max_replicas_per_host
            there = sum(
                r.host_id == value.host_id for r in commit.after.get_replicas(value.backend_tag).values()
            )
            self.world.check(
                most is None or there <= most, f"{there} replicas of {value.backend_tag} on {value.host_id}"
            )
        for host in self.world.hosts:
            if host.host_id in placed:
                taken = sum(r.needs.get("CPU", 0.0) for r in commit.after.by_host[host.host_id].values())
                self.world.check(
                    taken <= host.cpus + 1e-6, f"{host.host_id} has {host.cpus} CPU and is to give {taken}"
                )


class UsersWinOverTheAutoscaler(Check):
    """The load moves numbers within the limits and only where it may; what a user sets stays until a user says else."""

    def on_commit(self, commit: Commit) -> None:
        gone_back = {
            tag
            for value in commit.puts(Goal)
            if value.status is GoalStatus.FAILED
            for tag in owned_backends(value)
        }
        for value in commit.puts(Backend):
            if not value.deleting:
                self._limits(value)
                known = commit.before.backends.get(value.backend_tag)
                is_promoted = any(
                    rollout.backend_tag == value.backend_tag and rollout.promoted_code_version
                    for rollout in commit.puts(Rollout)
                )
                is_by_plan = not commit.history and value.backend_tag not in gone_back and not is_promoted
                if is_by_plan and known is not None:
                    self._moved_by_a_plan(known, value)
        for entry in commit.history:
            command = parse_request(entry.verb, entry.request.encode())
            if isinstance(command, c.Scale):
                backend = commit.after.backends[BackendTag(entry.subject)]
                number = backend.target.backend_config.num_replicas
                self.world.check(number == command.num_replicas, f"{command} came to {number}")
                is_scaled = backend.target.backend_config.autoscaling_config is not None
                self.world.check(bool(backend.autoscaling_paused) == is_scaled, f"{command} does not pause")

    def _limits(self, backend: Backend) -> None:
        config = backend.target.backend_config
        scaling = config.autoscaling_config
        self.world.check(
            scaling is None or scaling.min_replicas <= config.num_replicas <= scaling.max_replicas,
            f"{backend.backend_tag} has {config.num_replicas} replicas, outside of its limits",
        )
        self.world.check(
            scaling is not None or not backend.autoscaling_paused,
            f"{backend.backend_tag} is paused and has no autoscaling",
        )

    def _moved_by_a_plan(self, known: Backend, backend: Backend) -> None:
        was, number = known.target.backend_config.num_replicas, backend.target.backend_config.num_replicas
        if backend.backend_tag.endswith((CANARY_SUFFIX, BASELINE_SUFFIX)):
            # A rollout that replaced another makes them anew.
            is_so = number >= was or known.deleting
            self.world.check(is_so, f"a rollout takes replicas from {backend.backend_tag}")
            return
        if was != number:
            self.world.trace(f"{backend.backend_tag} is autoscaled {was} → {number}")
            is_scaled = known.target.backend_config.autoscaling_config is not None
            self.world.check(
                is_scaled and not known.autoscaling_paused and not known.halted and not known.deleting,
                f"{backend.backend_tag} was moved from {was} to {number} though the load has no say",
            )
        self.world.check(
            known.autoscaling_paused == backend.autoscaling_paused
            or PAUSED_BY in (known.autoscaling_paused, backend.autoscaling_paused),
            f"a plan paused or resumed {backend.backend_tag}",
        )
