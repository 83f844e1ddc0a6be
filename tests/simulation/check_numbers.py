"""Promises about numbers, goals and who may write. When a goal succeeds, it is so: recorded, running, applied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from serve_common.api.views import GoalStatus
from serve_common.names import GoalId, HostId, ReplicaTag
from serve_common.protocol.reports import HostGoal, ReplicaStatus
from serve_common.protocol.subjects import HTTP_KEY
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.goals import build_failure_owned, owned_backends
from serve_controller.core.objects import (
    Backend,
    Goal,
    GoalKind,
    HostRecord,
    ObjectKind,
    Replica,
    ReplicaState,
    SnapshotRecord,
)
from tests.simulation.check_budgets import BEGINS
from tests.simulation.world_store import Check, Commit, Writer

if TYPE_CHECKING:
    from tests.simulation.world import World


T = TypeVar("T")


class OneWriter(Check):
    """An epoch belongs to one life of one controller, epochs only rise, and only the newest one's writes are made."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.owners: dict[int, Writer] = {}

    def save(self) -> dict[int, Writer]:
        return dict(self.owners)

    def go_back(self, saved: dict[int, Writer]) -> None:
        self.owners = dict(saved)

    def on_epoch(self, epoch: int, writer: Writer) -> None:
        self.world.check(epoch not in self.owners, f"epoch {epoch} was given twice")
        self.world.check(epoch > max(self.owners, default=0), f"epoch {epoch} came after a higher one")
        self.owners[epoch] = writer

    def on_commit(self, commit: Commit) -> None:
        epoch, writer = commit.epoch, commit.writer
        self.world.check(
            self.owners.get(epoch) == writer, f"{writer} wrote in epoch {epoch} of {self.owners.get(epoch)}"
        )
        self.world.check(epoch == max(self.owners), f"epoch {epoch} wrote after {max(self.owners)} began")


class Given(Generic[T]):
    """Numbers that were given, and who can know of them.

    A store that goes back has lost some. One that no leader had begun to tell anybody names nothing that is out there,
    and may be given again where nothing else that is lost was seen: but not by a controller that gave it or read it.
    And a write that is under way then gives what its leader decided before: nobody can know better, and its tags are
    doubted as soon as somebody does.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.told: set[T] = set()
        """What a leader began to tell somebody."""
        self._given: dict[T, int] = {}
        """The number of the store's write that gave each."""
        self._lost: dict[T, frozenset[Writer]] = {}
        """Of those that may be given again, by whom not."""

    def save(self) -> set[T]:
        return set(self._given)

    def go_back(self, saved: set[T]) -> None:
        if self.world.is_loss_seen:
            return
        for number in self._given.keys() - saved - self.told:
            self._lost[number] = self.world.who_knows(self._given.pop(number))

    def may_give(self, number: T, writer: Writer) -> bool:
        """Whether ``writer``, whose write is being made, may give ``number``; it counts as given then."""
        is_known = number in self._given or writer in self._lost.get(number, ())
        self._given[number] = self.world.store.writes
        return not is_known or self.world.was_under_way(writer)


class NumbersRise(Check):
    """What is counted never falls, and no replica's tag is ever given again."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.tags = Given[ReplicaTag](world)

    def save(self) -> set[ReplicaTag]:
        return self.tags.save()

    def go_back(self, saved: set[ReplicaTag]) -> None:
        self.tags.go_back(saved)

    def on_goal_sent(self, goal: HostGoal) -> None:
        self.tags.told.update(replica.replica_tag for replica in goal.replicas)

    def on_commit(self, commit: Commit) -> None:
        check, old, new = self.world.check, commit.before.counters, commit.after.counters
        check(
            new.goal >= old.goal
            and new.ordinal >= old.ordinal
            and new.generation >= old.generation
            and new.snapshot >= old.snapshot,
            f"a counter fell: {old} and then {new}",
        )
        for value in commit.changes.puts:
            match value:
                case Replica():
                    is_new = value.replica_tag not in commit.before.get_replicas(value.backend_tag)
                    if is_new and value.state in BEGINS:
                        may_give = self.tags.may_give(value.replica_tag, commit.writer)
                        check(may_give, f"{value.replica_tag} was given again")
                case SnapshotRecord():
                    known = commit.before.snapshots.get(value.key)
                    check(
                        known is None or value.snapshot.snapshot_id > known.snapshot.snapshot_id,
                        f"the snapshot id of {value.key} did not rise",
                    )
                case HostRecord():
                    host = commit.before.hosts.get(value.host_id)
                    check(
                        host is None or value.generation >= host.generation,
                        f"the generation of {value.host_id} fell",
                    )


class GoalsEndOnce(Check):
    """A goal ends once, and is remembered; one request of a client makes one goal."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.requests: dict[str, GoalId] = {}
        self.given: set[GoalId] = set()
        """Also those that a restored store lost."""

    def save(self) -> dict[str, GoalId]:
        return dict(self.requests)

    def go_back(self, saved: dict[str, GoalId]) -> None:
        self.requests = dict(saved)

    def on_commit(self, commit: Commit) -> None:
        check = self.world.check
        for value in commit.puts(Goal):
            known = commit.before.goals.get(value.goal_id)
            if known is None:
                is_again = value.goal_id in self.given and value.goal_id not in self.world.unseen_goals
                check(not is_again, f"{value.goal_id} was given again")
                self.given.add(value.goal_id)
                is_failed_build = value.owns == [build_failure_owned(value.subject)]
                begins_as = GoalStatus.FAILED if is_failed_build else GoalStatus.PENDING
                check(value.status is begins_as, f"{value.goal_id} began as {value.status}")
                if value.request_id is not None:
                    first = self.requests.setdefault(value.request_id, value.goal_id)
                    check(first == value.goal_id, f"{value.request_id} made {first} and {value.goal_id}")
                continue
            check(
                known.status is GoalStatus.PENDING,
                f"{value.goal_id} ended {known.status} and then {value.status}",
            )
            if value.status is not GoalStatus.PENDING:
                self.world.trace(f"{value.goal_id} ends {value.status.value} {value.error[-80:]}")
        for kind, name in commit.changes.deletes:
            check(kind is not ObjectKind.GOAL, f"{name} is forgotten on its first day")


FAILED = (ReplicaStatus.FAILED, ReplicaStatus.DEAD)


class SuccessIsTrue(Check):
    """Looks at every goal in the moment of its success."""

    def on_commit(self, commit: Commit) -> None:
        for value in commit.puts(Goal):
            if value.status is GoalStatus.SUCCEEDED:
                self._look(commit.after, value)

    def _look(self, after: Checkpoint, goal: Goal) -> None:
        for tag in owned_backends(goal):
            backend = after.backends.get(tag)
            if backend is None or backend.deleting:
                left = sorted(after.get_replicas(tag))
                self.world.check(not left, f"{goal.goal_id} deleted {tag}, and {left} are left")
                self._nothing_runs(goal, tag)
            else:
                self._runs(after, goal, backend)
        if goal.kind is GoalKind.DRAIN:
            self.world.check(
                not after.by_host.get(HostId(goal.subject)), f"{goal.goal_id} succeeded on a host in use"
            )
        for proxy in self.world.proxies:
            if proxy.serves and proxy.proxy_id in after.proxies and not self.world.checks.is_bucket_lost:
                for key in goal.owns:
                    record = after.snapshots.get(key)
                    needed = 0 if record is None else record.snapshot.snapshot_id
                    self.world.check(
                        proxy.ids.get(key, 0) >= needed,
                        f"{goal.goal_id} succeeded, and {proxy.proxy_id} has no {key} {needed}",
                    )
                if goal.kind is GoalKind.HTTP and after.snapshots[
                    HTTP_KEY
                ].snapshot.snapshot_id == proxy.ids.get(HTTP_KEY):
                    options = None if after.http is None else after.http.target
                    self.world.check(
                        proxy.options == options, f"{goal.goal_id} succeeded, and {proxy.proxy_id} has others"
                    )

    def _runs(self, after: Checkpoint, goal: Goal, backend: Backend) -> None:
        target, tag = backend.target, backend.backend_tag
        replicas = after.get_replicas(tag).values()
        ready = [
            r.replica_tag
            for r in replicas
            if r.state is ReplicaState.RUNNING
            and r.code_version == target.code_version
            and r.config_version == target.config_version
        ]
        self.world.check(
            len(ready) == target.backend_config.num_replicas,
            f"{goal.goal_id} succeeded with {len(ready)} replicas of {tag}",
        )
        if self.world.weather.faults.has_deaths:
            return  # what ran when it was reported may have died since
        for replica_tag in ready:
            if replica_tag in self.world.checks.not_well:
                continue
            held = [
                host.state.replicas[replica_tag] for host in self.world.hosts if replica_tag in host.serving
            ]
            self.world.check(
                len(held) == 1 and held[0].config_version >= target.config_version,
                f"{goal.goal_id} succeeded, and {replica_tag} does not serve with its configuration",
            )

    def _nothing_runs(self, goal: Goal, tag: str) -> None:
        if self.world.weather.faults.has_deaths:
            return  # a host that was lost may still run what it will be told to stop
        for host in self.world.hosts:
            held = host.state.replicas
            # One that failed is gone in a moment.
            # What a goal began that the store has lost, no goal that it knows waits for.
            left = [
                t
                for t in host.processes
                if t.rpartition("#")[0] == tag
                and t not in self.world.lost_replicas
                and not (t in held and held[t].status in FAILED)
            ]
            self.world.check(not left, f"{goal.goal_id} deleted {tag}, and {host.host_id} runs {left}")
