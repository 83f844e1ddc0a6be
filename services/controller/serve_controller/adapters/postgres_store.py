"""The checkpoint in Postgres: `Store` over asyncpg, its connections, and the audit log's rows.

Each object is a row and each change one statement: the cost of a change does not grow with the rest of the state, and
there is no half-written change. The fence is inside that statement, see ``record`` in ``sql/queries.sql``.

The SQL is in files, so that it is read, reviewed and tried in psql as SQL, and every query has a name and a purpose.
Nothing is composed at run time.

Why a pool around asyncpg's: a controller may start before Postgres and outlives its restarts, and every call ends in
bounded time. A pool that lost one connection is discarded whole, because its idle ones are most likely dead too and
would cost a timeout each.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

import asyncpg
import msgspec
import structlog

from serve_common.api.views import HistoryView
from serve_common.errors import FencedOut, PermanentError, StoreUnavailable
from serve_common.names import ControllerId
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import ObjectChanges
from serve_controller.ports import HistoryEntry
from serve_controller.shell.checkpoint_rows import Row, dump_changes, load_checkpoint, without_surrogates

_NAME: Final = re.compile(r"^-- name:[ \t]*(\w*)[ \t]*$", re.MULTILINE)
_PURPOSE: Final = re.compile(r"\n-- \S[^\n]*\n")
_MIGRATION: Final = re.compile(r"(\d{4})_(\w+)\.sql")


class Migration(msgspec.Struct, frozen=True):
    """One step of the schema."""

    version: int
    """1, 2, 3 … without a gap."""
    name: str
    sql: str


def parse_queries(text: str) -> dict[str, str]:
    """The queries in ``text`` by name.

    A query begins with the line ``-- name: <name>``, followed by a comment line with its purpose, and ends where the
    next one begins. Text before the first is a preamble. Raises ValueError for a query without name, purpose or body
    and for a name that is used twice.
    """
    _, *parts = _NAME.split(text)
    queries: dict[str, str] = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        if not name:
            raise ValueError("a query has no name")
        if name in queries:
            raise ValueError(f"query {name!r} is defined twice")
        if _PURPOSE.match(body) is None:
            raise ValueError(f"query {name!r} has no purpose: a comment line must follow its name")
        sql = "\n".join(line for line in body.splitlines() if not line.startswith("--")).strip()
        if not sql:
            raise ValueError(f"query {name!r} has no body")
        queries[name] = sql.removesuffix(";")
    return queries


def ordered_migrations(texts: Mapping[str, str]) -> list[Migration]:
    """The migrations in the order of their numbers, from the texts by file name, such as
    ``0001_initial.sql``.

    Raises ValueError when a name is not of that form or a number is missing or used twice.
    """
    found: list[Migration] = []
    for file_name, sql in sorted(texts.items()):
        matched = _MIGRATION.fullmatch(file_name)
        if matched is None:
            raise ValueError(f"migration {file_name!r} is not named like 0001_initial.sql")
        found.append(Migration(int(matched[1]), matched[2], sql))
    if [migration.version for migration in found] != list(range(1, len(found) + 1)):
        raise ValueError(f"migrations are not numbered 1, 2, 3 …: {sorted(texts)}")
    return found


_SQL: Final = files("serve_controller.adapters") / "sql"
QUERIES: Final[Mapping[str, str]] = parse_queries((_SQL / "queries.sql").read_text(encoding="utf-8"))
MIGRATIONS: Final = ordered_migrations(
    {entry.name: entry.read_text(encoding="utf-8") for entry in (_SQL / "migrations").iterdir()}
)


CONNECT_TIMEOUT_S: Final = 2.0
COMMAND_TIMEOUT_S: Final = 5.0
CLOSE_TIMEOUT_S: Final = 3.0
POOL_SIZE_MAX: Final = 4

_LOST: Final = (
    OSError,  # TimeoutError is one
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.ReadOnlySQLTransactionError,  # after a failover, the former primary is a replica
)
"""Errors after which the connection is unusable."""

_BUSY: Final = (
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.TransactionRollbackError,
    asyncpg.LockNotAvailableError,
    asyncpg.PostgresSystemError,
)
"""Errors of a server that responds but cannot serve the request now."""

_REFUSED: Final = (
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
)
"""Permanent errors: the address, the password or the role's privileges must be corrected."""


class PostgresPool:
    """Connections to one database. Needs no start: it connects when first used."""

    def __init__(self, dsn: str, password: str, *, application_name: str) -> None:
        """``dsn`` is ``postgresql://user@host:port/database``; ``application_name`` is for pg_stat_activity."""
        self._dsn = dsn
        self._password = password
        self._application_name = application_name
        self._pool: asyncpg.Pool | None = None
        self._connecting = asyncio.Lock()
        self._closed = False

    @contextlib.asynccontextmanager
    async def connection(
        self, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> AsyncIterator[asyncpg.pool.PoolConnectionProxy]:
        """A connection for a few statements outside of a transaction.

        The whole block, including connecting, takes at most `CONNECT_TIMEOUT_S` + ``timeout_s``. Raises
        `StoreUnavailable`, or `PermanentError` when an operator must act; errors in the SQL itself pass through.
        """
        pool: asyncpg.Pool | None = None
        with _converted_errors():
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S + timeout_s):
                    pool = await self._connected()
                    async with pool.acquire(timeout=CONNECT_TIMEOUT_S) as connection:
                        yield connection
            except _LOST:
                self._discard(pool)
                raise

    @contextlib.asynccontextmanager
    async def session(self, timeout_s: float) -> AsyncIterator[asyncpg.Connection]:
        """A dedicated connection, closed afterwards together with its locks.

        Each statement may take ``timeout_s``. Raises as `connection` does.
        """
        with _converted_errors():
            with _converted_address_errors():
                connection = await asyncpg.connect(**self._options(timeout_s, lock_timeout_s=timeout_s))
            try:
                yield connection
            finally:
                await connection.close(timeout=CLOSE_TIMEOUT_S)

    async def close(self) -> None:
        """Close all connections, within `CLOSE_TIMEOUT_S`; later calls raise `StoreUnavailable`."""
        self._closed = True
        pool, self._pool = self._pool, None
        if pool is None:
            return
        try:
            await asyncio.wait_for(pool.close(), CLOSE_TIMEOUT_S)
        except (*_LOST, *_BUSY):
            pool.terminate()  # its connections are not needed any more

    async def _connected(self) -> asyncpg.Pool:
        async with self._connecting:
            if self._closed:
                raise StoreUnavailable("the connection to Postgres was closed by this process")
            if self._pool is None:
                with _converted_address_errors():
                    self._pool = await asyncpg.create_pool(
                        min_size=1,
                        max_size=POOL_SIZE_MAX,
                        reset=_keep_session,
                        **self._options(COMMAND_TIMEOUT_S, lock_timeout_s=COMMAND_TIMEOUT_S - 1),
                    )
            return self._pool

    def _discard(self, pool: asyncpg.Pool | None) -> None:
        if self._pool is pool:
            self._pool = None
        if pool is not None:
            pool.terminate()

    def _options(self, command_timeout_s: float, lock_timeout_s: float) -> dict[str, Any]:
        return {
            "dsn": self._dsn,
            "password": self._password,
            "timeout": CONNECT_TIMEOUT_S,
            "command_timeout": command_timeout_s,
            "server_settings": {
                "application_name": self._application_name,
                "search_path": "muster",
                # Also on the server: a statement that timed out here must not take effect much later.
                "statement_timeout": _milliseconds(command_timeout_s),
                "lock_timeout": _milliseconds(lock_timeout_s),
                "idle_in_transaction_session_timeout": _milliseconds(command_timeout_s),
            },
        }


async def _keep_session(_connection: asyncpg.Connection) -> None:
    """Skip the reset, and its round trip: pooled connections run single statements only."""


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))


@contextlib.contextmanager
def _converted_errors() -> Iterator[None]:
    """Convert the driver's errors into ours, chained."""
    try:
        yield
    except _REFUSED as error:
        raise PermanentError(f"Postgres refuses us: {_describe(error)}") from error
    except asyncpg.DiskFullError as error:
        raise StoreUnavailable(f"the disk of Postgres is full: {error}") from error
    except (*_LOST, *_BUSY) as error:
        raise StoreUnavailable(f"Postgres does not answer: {_describe(error)}") from error


@contextlib.contextmanager
def _converted_address_errors() -> Iterator[None]:
    """Convert the driver's plain ValueError for an invalid address into `PermanentError`."""
    try:
        yield
    except ValueError as error:
        raise PermanentError(f"the address of Postgres cannot be used: {error}") from error


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


HISTORY_ROWS_MAX: Final = 10_000
"""History rows that are retained; a store may have a few more until the next trim."""
HISTORY_PAGE_BYTES_MAX: Final = 700_000
"""JSON of one page of the history: with the names around it, it must fit one NATS message."""


def view_history(row: Mapping[str, Any]) -> HistoryView:
    """A row of the audit log as callers see it; its columns are those of `read_history`.

    A request is stored as the caller wrote it, without types: it must stay readable forever, even if later versions of
    the code would refuse it.
    """
    return HistoryView(**{**row, **{name: _value(row[name]) for name in ("request", "old", "new")}})


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
            await session.fetchval(QUERIES["lock_migrations"], _MIGRATION_LOCK)
            records = (
                await session.fetch(QUERIES["run_migrations"])
                if await session.fetchval(QUERIES["migrations_exist"])
                else []
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
                    await session.execute(QUERIES["note_migration"], migration.version, migration.name)
                _log.info("schema_migrated", version=migration.version, name=migration.name)

    async def acquire_leadership(
        self, controller_id: ControllerId, ttl_s: float, above: int = 0
    ) -> int | None:
        """Begin a new term if the lease is free, expired or our own; None while another controller leads."""
        async with self._pool.connection(LEASE_TIMEOUT_S) as connection:
            row = await connection.fetchrow(
                QUERIES["acquire_leadership"], controller_id, ttl_s, max(above, self._epoch)
            )
        if row is None:
            return None
        self._controller_id, self._writes = controller_id, row["writes"]
        self._epoch = row["epoch"]
        return self._epoch

    async def renew_leadership(self, controller_id: ControllerId, epoch: int, ttl_s: float) -> None:
        """Renew our lease, even an expired one, unless another controller began a term. Raises `FencedOut`."""
        async with self._pool.connection(LEASE_TIMEOUT_S) as connection:
            renewed = await connection.fetchval(
                QUERIES["renew_leadership"], controller_id, epoch, ttl_s, self._writes
            )
        if renewed is None:
            raise _fenced_out(epoch)

    async def release_leadership(self, controller_id: ControllerId, epoch: int) -> None:
        """Release the lease, so that the next controller leads at once; no error if it was already lost."""
        async with self._pool.connection(LEASE_TIMEOUT_S) as connection:
            await connection.execute(QUERIES["release_leadership"], controller_id, epoch)

    async def load(self) -> Checkpoint:
        """Load the whole checkpoint. Raises `CheckpointUnreadable`."""
        async with self._pool.connection() as connection:
            records = await connection.fetch(QUERIES["load"])
        return load_checkpoint(Row(*record) for record in records)

    async def record(self, epoch: int, changes: ObjectChanges, history: Sequence[HistoryEntry] = ()) -> None:
        """Write ``changes`` and ``history``, all or nothing. Raises `FencedOut`, `StoreUnavailable`."""
        rows = dump_changes(changes)
        trims = bool(history) and self._history_since_trim >= HISTORY_TRIM_EVERY
        async with self._pool.connection() as connection:
            writes: int | None = await connection.fetchval(
                QUERIES["record"],
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
            records = await connection.fetch(
                QUERIES["read_history"], limit, subject, before, HISTORY_PAGE_BYTES_MAX
            )
        return [view_history(record) for record in records]

    async def touch_code(self, digests: Collection[str]) -> set[str]:
        """Those of ``digests`` that are complete; they count as used now."""
        async with self._pool.connection() as connection:
            return {row["digest"] for row in await connection.fetch(QUERIES["touch_code"], list(digests))}

    async def add_code_page(self, digest: str, page: int, data: bytes) -> None:
        """Write one page of code that is not complete yet."""
        async with self._pool.connection() as connection:
            await connection.execute(QUERIES["add_code_page"], digest, page, data)

    async def complete_code(self, digest: str, pages: int) -> None:
        """Declare code with so many pages complete."""
        async with self._pool.connection() as connection:
            await connection.execute(QUERIES["complete_code"], digest, pages)

    async def code_pages(self, digest: str) -> int:
        """The number of pages of complete code; 0 when there is none."""
        async with self._pool.connection() as connection:
            return await connection.fetchval(QUERIES["code_pages"], digest) or 0

    async def read_code_page(self, digest: str, page: int) -> bytes | None:
        """One page; None when it is not there."""
        async with self._pool.connection() as connection:
            data: bytes | None = await connection.fetchval(QUERIES["read_code_page"], digest, page)
        return data

    async def trim_code(self, named: Collection[str], unused_s: float) -> list[str]:
        """Delete unused code and uploads that were given up; returns the digests of the former."""
        async with self._pool.connection() as connection:
            rows = await connection.fetch(QUERIES["trim_code"], list(named), unused_s)
        return [row["digest"] for row in rows]

    async def close(self) -> None:
        """Close all connections, in bounded time."""
        await self._pool.close()


def _fenced_out(epoch: int) -> FencedOut:
    return FencedOut(f"another controller began a later term than epoch {epoch}, or Postgres was restored")
