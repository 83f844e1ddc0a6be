"""The simulated world's database: `MemoryStore` that keeps objects instead of rows, and tells of every commit.

Why not rows: decoding all of them for each look at the truth was nine tenths of the time. That values survive the way
into rows and back is still asked of a sample of the commits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from serve_common.api.views import HistoryView
from serve_common.errors import FencedOut, StoreUnavailable
from serve_common.names import ControllerId
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import ObjectChanges, Replica
from serve_controller.ports import HistoryEntry
from serve_controller.shell.checkpoint_rows import dump, load
from tests.support.memory_store import MemoryStore

if TYPE_CHECKING:
    from tests.simulation.world import World

T = TypeVar("T")
Writer = tuple[ControllerId, int]
"""A controller and the number of its life."""
Saved = tuple[Checkpoint, int, int, ControllerId | None, float]
"""Everything of a database: checkpoint, epoch, number of writes, who leads until when."""

ROUND_TRIP_EVERY = 16


@dataclass(frozen=True)
class Commit:
    """One write that the database made."""

    writer: Writer
    epoch: int
    before: Checkpoint
    after: Checkpoint
    changes: ObjectChanges
    history: Sequence[HistoryEntry]

    def puts(self, kind: type[T]) -> Iterator[T]:
        """What it put of one kind."""
        return (value for value in self.changes.puts if isinstance(value, kind))

    def was(self, replica: Replica) -> Replica | None:
        """The same replica before; None when it is new."""
        return self.before.get_replicas(replica.backend_tag).get(replica.replica_tag)


class Check:
    """One promise: it hears what it has a method for, see `tests.simulation.checks.HOOKS`."""

    def __init__(self, world: World) -> None:
        self.world = world


class WorldStore(MemoryStore):
    """One database that all controllers of a world share."""

    def __init__(self, now: Callable[[], float], later: Callable[[float, Callable[[], None]], None]) -> None:
        """``later`` lets something happen after so many seconds."""
        super().__init__(now)
        self.checkpoint = Checkpoint()
        """The truth."""
        self.on_commit: Callable[[Commit], None] | None = None
        self.late_writes_s: float | None = None
        """Not None: the connection breaks at each write, and the write is made so much later all the same."""
        self._later = later
        self._commits = 0

    async def load(self) -> Checkpoint:
        """As from rows: made anew from the single objects, so that no index is inherited."""
        self._begin()
        loaded = Checkpoint().applied(ObjectChanges(puts=tuple(self.checkpoint.all_objects())))
        self._end()
        return loaded

    async def record_as(
        self, writer: Writer, epoch: int, writes: int, changes: ObjectChanges, history: Sequence[HistoryEntry]
    ) -> None:
        """See `Store.record`; ``writes`` is the number of the last write that the writer knows."""
        self._begin()
        self._need_room()
        if self.late_writes_s is not None:
            self._later(self.late_writes_s, lambda: self._write_late(writer, epoch, writes, changes, history))
            raise StoreUnavailable("the simulated connection broke while the write was under way")
        self.fence(writer, epoch)
        self.fence_writes(writes)
        self._commit(writer, epoch, changes, history)
        self._end()

    def fence(self, writer: Writer, epoch: int) -> None:
        """Refuse a write of an epoch that is over, or that is another's since the database was restored."""
        if (writer[0], epoch) != (self.controller_id, self.epoch):
            raise FencedOut(f"epoch {self.epoch} of {self.controller_id} began after {epoch}")

    def fence_writes(self, writes: int) -> None:
        """Refuse a write onto another state than its writer left."""
        if writes != self.writes:
            raise FencedOut(f"write {self.writes} was the last, not {writes}: the database was restored")

    # -- going back ----------------------------------------------------------------------------------------------------

    def save(self) -> Saved:
        """All of it, as a dump would have it."""
        return (self.checkpoint, self.epoch, self.writes, self.controller_id, self.lease_expires_at)

    def restore(self, saved: Saved) -> None:
        """Be as it was then."""
        self.checkpoint, self.epoch, self.writes, self.controller_id, self.lease_expires_at = saved

    def _write_late(
        self, writer: Writer, epoch: int, writes: int, changes: ObjectChanges, history: Sequence[HistoryEntry]
    ) -> None:
        try:
            self.fence(writer, epoch)
            self.fence_writes(writes)
        except FencedOut:
            return
        self._commit(writer, epoch, changes, history)

    def _commit(
        self, writer: Writer, epoch: int, changes: ObjectChanges, history: Sequence[HistoryEntry]
    ) -> None:
        before = self.checkpoint
        self.writes += 1
        self._commits += 1
        if self._commits % ROUND_TRIP_EVERY == 0:
            for value in changes.puts:
                assert load(dump(value)) == value, f"{value} does not survive the database"
        self.checkpoint = before.applied(changes)
        if self.on_commit is not None:
            self.on_commit(Commit(writer, epoch, before, self.checkpoint, changes, history))


class StoreOf:
    """The store as one life of a controller reaches it."""

    def __init__(self, store: WorldStore, writer: Writer) -> None:
        self._store, self._writer = store, writer
        self.writes = 0
        """The number of the last write that this controller knows, once it has led."""
        self._epoch = 0
        """The newest that it had."""

    async def migrate(self) -> None:
        """See `Store.migrate`."""
        await self._store.migrate()

    async def acquire_leadership(
        self, controller_id: ControllerId, ttl_s: float, above: int = 0
    ) -> int | None:
        """See `Store.acquire_leadership`."""
        epoch = await self._store.acquire_leadership(controller_id, ttl_s, max(above, self._epoch))
        if epoch is not None:
            self.writes, self._epoch = self._store.writes, epoch
        return epoch

    async def renew_leadership(self, controller_id: ControllerId, epoch: int, ttl_s: float) -> None:
        """See `Store.renew_leadership`."""
        await self._store.renew_leadership(controller_id, epoch, ttl_s)
        if self._store.writes < self.writes:
            raise FencedOut("the database was restored")

    async def release_leadership(self, controller_id: ControllerId, epoch: int) -> None:
        """See `Store.release_leadership`."""
        await self._store.release_leadership(controller_id, epoch)

    async def load(self) -> Checkpoint:
        """See `Store.load`."""
        return await self._store.load()

    async def record(self, epoch: int, changes: ObjectChanges, history: Sequence[HistoryEntry] = ()) -> None:
        """See `Store.record`."""
        await self._store.record_as(self._writer, epoch, self.writes, changes, history)
        self.writes = self._store.writes

    async def read_history(self, limit: int, subject: str | None, before: int | None) -> list[HistoryView]:
        """See `Store.read_history`."""
        return await self._store.read_history(limit, subject, before)
