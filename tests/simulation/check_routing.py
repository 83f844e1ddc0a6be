"""Promises about what hosts are told, and where proxies send requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serve_common.names import BackendTag, ReplicaTag, parse_backend_tag
from serve_common.protocol.reports import HostGoal
from serve_common.protocol.snapshots import BackendSnapshot, Snapshot
from serve_common.protocol.subjects import backend_key
from serve_controller.core.objects import Replica, SnapshotRecord
from tests.simulation.check_budgets import BEGINS, SERVING
from tests.simulation.check_numbers import Given
from tests.simulation.world_store import Check, Commit

if TYPE_CHECKING:
    from tests.simulation.sim_host import SimHost
    from tests.simulation.sim_proxy import SimProxy
    from tests.simulation.world import World


class HostGoalsAreRecorded(Check):
    """Hosts are told to run only what was recorded for them; one number names one goal; nothing is started twice."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.recorded: dict[ReplicaTag, str | None] = {}
        """Every replica that was ever recorded, and its host."""
        self.sent: dict[tuple[str, int, int], tuple[object, ...]] = {}
        self.peer_versions: dict[ReplicaTag, tuple[int, dict[BackendTag, int]]] = {}
        """What each replica was first told to be, and to belong with."""

    def on_commit(self, commit: Commit) -> None:
        for value in commit.puts(Replica):
            self.recorded[value.replica_tag] = value.host_id
            if commit.was(value) is None and value.state not in BEGINS:
                # All that is known of what a lost goal told it is that it runs.
                self.peer_versions.pop(value.replica_tag, None)

    def on_goal_sent(self, goal: HostGoal) -> None:
        for replica in goal.replicas:
            self.world.check(
                self.recorded.get(replica.replica_tag) == goal.host_id,
                f"{replica.replica_tag} was sent to {goal.host_id} and is not recorded there",
            )
            told = (replica.code_version, replica.peer_versions)
            began = self.peer_versions.setdefault(replica.replica_tag, told)
            self.world.check(
                began == told, f"{replica.replica_tag} began as {began} and is told that it is {told}"
            )
        content = (
            *((r.replica_tag, r.config_version, r.user_config) for r in goal.replicas),
            *sorted(goal.kill),
        )
        number = (goal.host_id, goal.epoch, goal.generation)
        # Only `kill` may shrink: what ended need not be named any more.
        first = self.sent.setdefault(number, content)
        runs = [c for c in content if not isinstance(c, str)]
        self.world.check(
            [c for c in first if not isinstance(c, str)] == runs,
            f"{goal.host_id} was sent {number[1]}.{number[2]} with {first} and with {content}",
        )

    def on_start(self, host: SimHost, tag: ReplicaTag) -> None:
        self.world.check(
            self.recorded.get(tag) == host.host_id,
            f"{host.host_id} starts {tag}, which is not recorded there",
        )
        self.world.check(tag not in host.ever_started, f"{host.host_id} starts {tag} again")
        others = [other.host_id for other in self.world.hosts if other is not host and tag in other.processes]
        self.world.check(not others, f"{host.host_id} starts {tag}, which runs on {others}")


class SnapshotsAreTrue(Check):
    """What is recorded for routers is what is recorded to serve; and nothing else is ever published."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.numbers = Given[tuple[str, int]](world)
        self.recorded: dict[tuple[str, int], Snapshot] = {}

    def save(self) -> set[tuple[str, int]]:
        return self.numbers.save()

    def go_back(self, saved: set[tuple[str, int]]) -> None:
        self.numbers.go_back(saved)

    def on_commit(self, commit: Commit) -> None:
        for value in commit.puts(SnapshotRecord):
            number = (value.key, value.snapshot.snapshot_id)
            if self.recorded.get(number) != value.snapshot:
                may_give = self.numbers.may_give(number, commit.writer)
                self.world.check(may_give, f"{number} was given again, to another snapshot")
                self.recorded[number] = value.snapshot
        if commit.history:
            return  # a command decides; what routers need of it follows with the next plan
        for tag in sorted({replica.backend_tag for replica in commit.puts(Replica)}):
            record = commit.after.snapshots.get(backend_key(tag))
            content = None if record is None else record.snapshot.content
            routed = _routed(None if record is None else record.snapshot)
            codes = {
                r.replica_tag: r.code_version
                for r in commit.after.get_replicas(tag).values()
                if r.state in SERVING
            }
            told = content.code_versions if isinstance(content, BackendSnapshot) else {}
            if told != (codes if len(set(codes.values())) > 1 else {}):
                self.world.check(False, lambda t=f"routers are given {told} of {tag}, not {codes}": t)
            serving = set(codes)
            if routed != serving:
                self.world.check(False, lambda t=f"routers are given {routed} of {tag}, not {serving}": t)

    def on_publish(self, key: str, snapshot: Snapshot) -> None:
        self.numbers.told.add((key, snapshot.snapshot_id))
        self.world.check(
            self.recorded.get((key, snapshot.snapshot_id)) == snapshot,
            f"{key} {snapshot.snapshot_id} was published and is not recorded so",
        )


class DroppedIsNotRouted(Check):
    """A proxy that says it applied the snapshot that dropped a replica sends it nothing any more."""

    def on_proxy(self, proxy: SimProxy) -> None:
        applied, recorded = proxy.applied, self.world.store.checkpoint.snapshots
        for tag, backend in proxy.backends.items():
            record = recorded.get(backend_key(tag))
            if record is None or record.snapshot.snapshot_id > applied or applied <= self.world.lost_snapshot:
                continue
            dropped = set(backend.replicas) - _routed(record.snapshot)
            self.world.check(
                not dropped, f"{proxy.proxy_id} applied {applied} and still routes {tag} to {dropped}"
            )


def _routed(snapshot: Snapshot | None) -> set[ReplicaTag]:
    content = None if snapshot is None else snapshot.content
    return set(content.replicas) if isinstance(content, BackendSnapshot) else set()


class RoutesAreLeftFirst(Check):
    """A host drains what serves only after that was recorded, and after routers were told."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.dropped: dict[ReplicaTag, int] = {}
        """The snapshot that leaves a replica out."""
        self.published: dict[str, int] = {}
        """The newest snapshot of each key that was put. A leader that stood still may put an older one after it;
        routers know better."""

    def on_commit(self, commit: Commit) -> None:
        for value in commit.puts(SnapshotRecord):
            known = commit.before.snapshots.get(value.key)
            for tag in _routed(None if known is None else known.snapshot) - _routed(value.snapshot):
                self.dropped[tag] = value.snapshot.snapshot_id

    def on_publish(self, key: str, snapshot: Snapshot) -> None:
        self.published[key] = max(snapshot.snapshot_id, self.published.get(key, 0))

    def on_drain(self, host: SimHost, tag: ReplicaTag) -> None:
        if host.state.is_leaving or tag not in host.serving:
            return
        if host.state.goal_epoch <= self.world.lost_epoch:
            self.world.checks.not_well.add(tag)  # by a goal that a restored store lost
            return
        replica = self.world.store.checkpoint.get_replicas(parse_backend_tag(tag)).get(tag)
        self.world.check(
            replica is None or replica.state not in SERVING, f"{host.host_id} drains {tag}, which is to serve"
        )
        newest = self.published.get(backend_key(parse_backend_tag(tag)), 0)
        self.world.check(
            newest >= self.dropped.get(tag, 0), f"{host.host_id} drains {tag}, which routers were not told of"
        )
