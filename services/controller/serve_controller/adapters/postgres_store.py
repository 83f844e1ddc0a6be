"""The checkpoint in Postgres: `Store` over asyncpg, and the audit log's rows.

Each object is a row and each change one statement: the cost of a change does not grow with the rest of the state, and
there is no half-written change. The fence is inside that statement, see ``record`` in ``sql/queries.sql``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import structlog

from serve_common.api.views import HistoryView
from serve_common.errors import FencedOut, PermanentError
from serve_common.names import ControllerId, GoalId
from serve_controller.adapters.checkpoint_rows import Row, dump_changes, load_checkpoint, without_surrogates
from serve_controller.adapters.postgres_pool import PostgresPool
from serve_controller.adapters.sql import MIGRATIONS, QUERIES, Migration
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import ObjectChanges
from serve_controller.ports import HistoryEntry

HISTORY_ROWS_MAX: Final = 10_000
"""History rows that are retained; a store may have a few more until the next trim."""
HISTORY_PAGE_BYTES_MAX: Final = 700_000
"""JSON of one page of the history: with the names around it, it must fit one NATS message."""


class HistoryRow(msgspec.Struct, frozen=True):
    """One row of the audit log.

    A request is stored as the caller wrote it, without types: it must stay readable forever, even if later versions of
    the code would refuse it.
    """

    id: int
    at: float
    principal: str
    epoch: int
    verb: str
    subject: str
    goal_id: str | None
    request: str
    """JSON, as are the two below."""
    old: str | None
    new: str | None


def get_view(row: HistoryRow) -> HistoryView:
    """The view of a row for callers."""
    return HistoryView(
        id=row.id,
        at=row.at,
        principal=row.principal,
        epoch=row.epoch,
        verb=row.verb,
        subject=row.subject,
        goal_id=None if row.goal_id is None else GoalId(row.goal_id),
        request=_value(row.request),
        old=_value(row.old),
        new=_value(row.new),
    )


def _value(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        # A lone surrogate, which Postgres' json accepts as an escape. It must not make the whole page unreadable.
        return _lenient(text)


def _lenient(text: str) -> Any:
    try:
        return without_surrogates(json.loads(text))
    except (ValueError, RecursionError):
        return text


LEASE_TIMEOUT_S: Final = 2.0
"""Timeout of lease calls, seconds: shorter, so that a leader detects a hanging database before its lease ends."""
MIGRATION_TIMEOUT_S: Final = 60.0
"""Timeout of each migration, and of the wait for another controller that migrates, seconds."""
HISTORY_TRIM_EVERY: Final = 100
"""History rows between two trims."""

_MIGRATION_LOCK: Final = int.from_bytes(b"muster")

_ACQUIRE: Final = QUERIES["acquire_leadership"]
_RENEW: Final = QUERIES["renew_leadership"]
_RELEASE: Final = QUERIES["release_leadership"]
_LOAD: Final = QUERIES["load"]
_RECORD: Final = QUERIES["record"]
_READ_HISTORY: Final = QUERIES["read_history"]
_LOCK_MIGRATIONS: Final = QUERIES["lock_migrations"]
_MIGRATIONS_EXIST: Final = QUERIES["migrations_exist"]
_RUN_MIGRATIONS: Final = QUERIES["run_migrations"]
_NOTE_MIGRATION: Final = QUERIES["note_migration"]

_log = structlog.get_logger(__name__)


class PostgresStore:
    """A `Store` in Postgres. Needs no start: it connects when first used, and again after a loss.

    Every method raises `StoreUnavailable` within seconds when Postgres does not respond, and `PermanentError` when it
    refuses the role, the password or the database.
    """

    def __init__(
        self,
        dsn: str,
        password: str,
        *,
        application_name: str,
        migrations: Sequence[Migration] = MIGRATIONS,
    ) -> None:
        """``dsn`` is ``postgresql://user@host:port/database``, without the password."""
        self._pool = PostgresPool(dsn, password, application_name=application_name)
        self._migrations = migrations
        # The first record of a process trims; otherwise short-lived processes would never do it.
        self._history_since_trim = HISTORY_TRIM_EVERY
        self._writes: int | None = None
        """Number of the last write known to this controller since it leads; detects a restored store."""
        self._controller_id: ControllerId | None = None
        """As whom this controller leads. An epoch alone does not say who does: a restored database gives some again."""
        self._epoch = 0
        """The newest that this controller had. It never has one twice, or a write of its term before, which is still
        under way, would be made in the new one."""

    async def migrate(self) -> None:
        """Run the migrations that the database lacks. Raises `PermanentError` when it had others than this code's.

        Their names are compared too: numbers alone would take the schema of other code for this one.
        """
        async with self._pool.session(MIGRATION_TIMEOUT_S) as session:
            await session.fetchval(_LOCK_MIGRATIONS, _MIGRATION_LOCK)
            records = (
                await session.fetch(_RUN_MIGRATIONS) if await session.fetchval(_MIGRATIONS_EXIST) else []
            )
            done = [f"{record['version']} {record['name']}" for record in records]
            known = [f"{migration.version} {migration.name}" for migration in self._migrations]
            if done != known[: len(done)]:
                raise PermanentError(
                    f"another version of Muster made the database (its schema migrations: {', '.join(done)}; this "
                    f"version's: {', '.join(known)}): run that version, or give this one an empty database"
                )
            for migration in self._migrations[len(done) :]:
                async with session.transaction():
                    await session.execute(migration.sql)
                    await session.execute(_NOTE_MIGRATION, migration.version, migration.name)
                _log.info("schema_migrated", version=migration.version, name=migration.name)

    async def acquire_leadership(
        self, controller_id: ControllerId, ttl_s: float, above: int = 0
    ) -> int | None:
        """Begin a new term if the lease is free, expired or our own; None while another controller leads."""
        async with self._pool.connection(LEASE_TIMEOUT_S) as connection:
            row = await connection.fetchrow(_ACQUIRE, controller_id, ttl_s, max(above, self._epoch))
        if row is None:
            return None
        self._controller_id, self._writes = controller_id, row["writes"]
        self._epoch = row["epoch"]
        return self._epoch

    async def renew_leadership(self, controller_id: ControllerId, epoch: int, ttl_s: float) -> None:
        """Renew our lease, even an expired one, unless another controller began a term. Raises `FencedOut`."""
        async with self._pool.connection(LEASE_TIMEOUT_S) as connection:
            renewed = await connection.fetchval(_RENEW, controller_id, epoch, ttl_s, self._writes)
        if renewed is None:
            raise _fenced_out(epoch)

    async def release_leadership(self, controller_id: ControllerId, epoch: int) -> None:
        """Release the lease, so that the next controller leads at once; no error if it was already lost."""
        async with self._pool.connection(LEASE_TIMEOUT_S) as connection:
            await connection.execute(_RELEASE, controller_id, epoch)

    async def load(self) -> Checkpoint:
        """Load the whole checkpoint. Raises `CheckpointUnreadable`."""
        async with self._pool.connection() as connection:
            records = await connection.fetch(_LOAD)
        return load_checkpoint(Row(*record) for record in records)

    async def record(self, epoch: int, changes: ObjectChanges, history: Sequence[HistoryEntry] = ()) -> None:
        """Write ``changes`` and ``history``, all or nothing. Raises `FencedOut`, `StoreUnavailable`."""
        rows = dump_changes(changes)
        trims = bool(history) and self._history_since_trim >= HISTORY_TRIM_EVERY
        async with self._pool.connection() as connection:
            writes: int | None = await connection.fetchval(
                _RECORD,
                epoch,
                [row.kind for row in rows.puts],
                [row.key for row in rows.puts],
                [row.schema_version for row in rows.puts],
                [row.value for row in rows.puts],
                [kind for kind, _ in rows.deletes],
                [key for _, key in rows.deletes],
                [entry.at for entry in history],
                [entry.principal for entry in history],
                [entry.verb for entry in history],
                [entry.subject for entry in history],
                [entry.goal_id for entry in history],
                [entry.request for entry in history],
                [entry.old for entry in history],
                [entry.new for entry in history],
                HISTORY_ROWS_MAX if trims else None,
                self._writes,
                self._controller_id,
            )
        if writes is None:
            raise _fenced_out(epoch)
        if self._writes is not None:
            self._writes = writes
        self._history_since_trim = len(history) + (0 if trims else self._history_since_trim)

    async def read_history(self, limit: int, subject: str | None, before: int | None) -> list[HistoryView]:
        """A page of the audit log, the newest first: at most ``limit`` entries, fewer if they are large."""
        async with self._pool.connection() as connection:
            records = await connection.fetch(_READ_HISTORY, limit, subject, before, HISTORY_PAGE_BYTES_MAX)
        return [get_view(HistoryRow(*record)) for record in records]

    async def close(self) -> None:
        """Close all connections, in bounded time."""
        await self._pool.close()


def _fenced_out(epoch: int) -> FencedOut:
    return FencedOut(f"another controller began a later term than epoch {epoch}, or Postgres was restored")
