"""Promises about numbers, goals and who may write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from serve_common.api.views import GoalStatus
from serve_common.names import GoalId, ReplicaTag
from serve_common.protocol.reports import HostGoal
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import Goal, HostRecord, ObjectChanges, ObjectKind, Replica, SnapshotRecord
from serve_controller.ports import HistoryEntry
from tests.simulation.check_budgets import BEGINS

if TYPE_CHECKING:
    from tests.simulation.world import World
    from tests.simulation.world_store import Writer


T = TypeVar("T")


class OneWriter:
    """An epoch belongs to one life of one controller, epochs only rise, and only the newest one's writes are made."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.owners: dict[int, Writer] = {}

    def save(self) -> dict[int, Writer]:
        return dict(self.owners)

    def go_back(self, saved: dict[int, Writer]) -> None:
        self.owners = dict(saved)

    def on_epoch(self, epoch: int, writer: Writer) -> None:
        self.world.check(epoch not in self.owners, f"epoch {epoch} was given twice")
        self.world.check(epoch > max(self.owners, default=0), f"epoch {epoch} came after a higher one")
        self.owners[epoch] = writer

    def on_commit(self, writer: Writer, epoch: int, *_: object) -> None:
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


class NumbersRise:
    """What is counted never falls, and no replica's tag is ever given again."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.tags = Given[ReplicaTag](world)

    def save(self) -> set[ReplicaTag]:
        return self.tags.save()

    def go_back(self, saved: set[ReplicaTag]) -> None:
        self.tags.go_back(saved)

    def on_goal_sent(self, goal: HostGoal) -> None:
        self.tags.told.update(replica.replica_tag for replica in goal.replicas)

    def on_commit(
        self,
        writer: Writer,
        epoch: int,
        before: Checkpoint,
        after: Checkpoint,
        changes: ObjectChanges,
        _: object,
    ) -> None:
        check, old, new = self.world.check, before.counters, after.counters
        check(
            new.goal >= old.goal
            and new.ordinal >= old.ordinal
            and new.generation >= old.generation
            and new.snapshot >= old.snapshot,
            f"a counter fell: {old} and then {new}",
        )
        for value in changes.puts:
            match value:
                case Replica():
                    is_new = value.replica_tag not in before.get_replicas(value.backend_tag)
                    if is_new and value.state in BEGINS:
                        may_give = self.tags.may_give(value.replica_tag, writer)
                        check(may_give, f"{value.replica_tag} was given again")
                case SnapshotRecord():
                    known = before.snapshots.get(value.key)
                    check(
                        known is None or value.snapshot.snapshot_id > known.snapshot.snapshot_id,
                        f"the snapshot id of {value.key} did not rise",
                    )
                case HostRecord():
                    host = before.hosts.get(value.host_id)
                    check(
                        host is None or value.generation >= host.generation,
                        f"the generation of {value.host_id} fell",
                    )


class GoalsEndOnce:
    """A goal ends once, and is remembered; one request of a client makes one goal."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.requests: dict[str, GoalId] = {}
        self.given: set[GoalId] = set()
        """Also those that a restored store lost."""

    def save(self) -> dict[str, GoalId]:
        return dict(self.requests)

    def go_back(self, saved: dict[str, GoalId]) -> None:
        self.requests = dict(saved)

    def on_commit(
        self,
        writer: Writer,
        epoch: int,
        before: Checkpoint,
        after: Checkpoint,
        changes: ObjectChanges,
        history: Sequence[HistoryEntry],
    ) -> None:
        check = self.world.check
        for value in changes.puts:
            if not isinstance(value, Goal):
                continue
            known = before.goals.get(value.goal_id)
            if known is None:
                is_again = value.goal_id in self.given and value.goal_id not in self.world.unseen_goals
                check(not is_again, f"{value.goal_id} was given again")
                self.given.add(value.goal_id)
                check(value.status is GoalStatus.PENDING, f"{value.goal_id} began as {value.status}")
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
        for kind, name in changes.deletes:
            check(kind is not ObjectKind.GOAL, f"{name} is forgotten on its first day")
