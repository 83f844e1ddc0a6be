"""A connection pool for Postgres that reconnects by itself, and the mapping of the driver's errors.

Why a pool around asyncpg's: a controller may start before Postgres and outlives its restarts, and every call ends in
bounded time. A pool that lost one connection is discarded whole, because its idle ones are most likely dead too and
would cost a timeout each.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import asyncpg

from serve_common.errors import PermanentError, StoreUnavailable

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
