"""The store in memory: the twin of `PostgresStore` for the simulation.

Why its rows are encoded: a value that would not survive the database must not survive here either. The contract
suite ``tests/integration/test_store_contract.py`` holds both to the same behaviour. No method ever suspends, so the
simulation drives them with ``send(None)``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import msgspec

from serve_common.api.views import HistoryView
from serve_common.errors import FencedOut, StoreUnavailable
from serve_common.names import ControllerId
from serve_controller.adapters.postgres_store import (
    HISTORY_PAGE_BYTES_MAX,
    HISTORY_ROWS_MAX,
    view_history,
)
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import ObjectChanges
from serve_controller.ports import HistoryEntry
from serve_controller.shell.checkpoint_rows import Row, dump_changes, load_checkpoint


class HistoryRow(HistoryEntry, frozen=True, kw_only=True):
    """One entry as it is stored."""

    id: int
    epoch: int


class MemoryStore:
    """One database that any number of simulated controllers share."""

    def __init__(self, now: Callable[[], float]) -> None:
        """``now`` is the database's clock, in seconds."""
        self.now = now
        self.available = True
        """False: every method raises `StoreUnavailable` and does nothing."""
        self.loses_answers = False
        """True: every method does its work and then raises `StoreUnavailable`, as when a connection breaks."""
        self.is_disk_full = False
        """True: nothing that must be kept is taken, and reads go on. A lease, whose row is rewritten, still is."""
        self.rows: dict[tuple[str, str], Row] = {}
        """What is stored, by kind and key."""
        self.history: deque[HistoryRow] = deque(maxlen=HISTORY_ROWS_MAX)
        """The audit log, the oldest first."""
        self.controller_id: ControllerId | None = None
        self.epoch = 0
        self.lease_expires_at = float("-inf")
        self.writes = 0
        """Counts the changes; see `Store.record`."""
        self._left: dict[int, int] = {}
        """The number of its last change as the leader of each epoch knows it: not part of the database."""
        self._history_id = 0

    async def migrate(self) -> None:
        """There is no schema to bring up."""
        self._begin()
        self._end()

    async def acquire_leadership(
        self, controller_id: ControllerId, ttl_s: float, above: int = 0
    ) -> int | None:
        self._begin()
        if controller_id != self.controller_id and self.now() < self.lease_expires_at:
            self._end()
            return None
        self.controller_id = controller_id
        self.epoch = max(self.epoch, above) + 1
        self._left[self.epoch] = self.writes
        self.lease_expires_at = self.now() + ttl_s
        self._end()
        return self.epoch

    async def renew_leadership(self, controller_id: ControllerId, epoch: int, ttl_s: float) -> None:
        self._begin()
        if not self._is_term(controller_id, epoch) or self.writes < self._left.get(epoch, 0):
            raise FencedOut(f"epoch {self.epoch} began after {epoch}, or the database was restored")
        self.lease_expires_at = self.now() + ttl_s
        self._end()

    async def release_leadership(self, controller_id: ControllerId, epoch: int) -> None:
        self._begin()
        if self._is_term(controller_id, epoch):
            self.lease_expires_at = float("-inf")
        self._end()

    async def load(self) -> Checkpoint:
        self._begin()
        checkpoint = load_checkpoint(self.rows.values())
        self._end()
        return checkpoint

    async def record(self, epoch: int, changes: ObjectChanges, history: Sequence[HistoryEntry] = ()) -> None:
        self._begin()
        self._need_room()
        if epoch != self.epoch or self._left.get(epoch, self.writes) != self.writes:
            raise FencedOut(f"epoch {self.epoch} began after {epoch}, or the database was restored")
        self.writes += 1
        self._left[epoch] = self.writes
        rows = dump_changes(changes)
        self.rows.update({(row.kind, row.key): row for row in rows.puts})
        for key in rows.deletes:
            self.rows.pop(key, None)
        for entry in history:
            self._history_id += 1
            fields = msgspec.structs.asdict(entry)
            self.history.append(HistoryRow(id=self._history_id, epoch=epoch, **fields))
        self._end()

    async def read_history(self, limit: int, subject: str | None, before: int | None) -> list[HistoryView]:
        self._begin()
        found = (
            row
            for row in reversed(self.history)
            if subject in (None, row.subject) and (before is None or row.id < before)
        )
        page = _first_page(islice(found, limit), HISTORY_PAGE_BYTES_MAX)
        self._end()
        return [view_history(msgspec.structs.asdict(row)) for row in page]

    def _is_term(self, controller_id: ControllerId, epoch: int) -> bool:
        return controller_id == self.controller_id and epoch == self.epoch

    def _begin(self) -> None:
        if not self.available:
            raise StoreUnavailable("the simulated database is down")

    def _need_room(self) -> None:
        if self.is_disk_full:
            raise StoreUnavailable("the disk of the simulated database is full: No space left on device")

    def _end(self) -> None:
        if self.loses_answers:
            raise StoreUnavailable("the simulated connection broke before the answer came")


def _first_page(rows: Iterable[HistoryRow], bytes_max: int) -> list[HistoryRow]:
    """The first of ``rows`` with at most ``bytes_max`` of JSON in all; at least one, so that readers make progress."""
    page: list[HistoryRow] = []
    size = 0
    for row in rows:
        size += sum(len(text.encode()) for text in (row.request, row.old, row.new) if text is not None)
        if page and size > bytes_max:
            break
        page.append(row)
    return page
