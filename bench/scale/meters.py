"""Where figures are read: Postgres, nats-server's monitoring, the controller's own metrics.

Why from outside: none of it depends on how the controller is built, so tables of different versions compare.
"""

from __future__ import annotations

import re
from typing import Any, Final, final

import aiohttp
import asyncpg
import msgspec

from bench.scale.servers import Servers

_TIMEOUT_S: Final = 10.0
_WAL: Final = "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint"
_ROWS: Final = """
    SELECT coalesce(sum(n_tup_ins + n_tup_upd + n_tup_del), 0)::bigint
    FROM pg_stat_user_tables WHERE schemaname = 'muster' AND relname NOT IN ('leader', 'schema_migrations')
"""
_LINE: Final = re.compile(r"^(\S+?)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class Sent(msgspec.Struct, frozen=True):
    """What the controller's connection to NATS has published."""

    messages: int
    bytes: int


def controllers_part(connz: dict[str, Any]) -> Sent:
    """What connections of controllers published, out of nats-server's ``/connz``."""
    own = [c for c in connz["connections"] if str(c.get("name", "")).startswith("controller ")]
    return Sent(sum(c["in_msgs"] for c in own), sum(c["in_bytes"] for c in own))


def sample_of(metrics: str, name: str) -> float | None:
    """The sum over all labels of one metric, out of a text in Prometheus' format; None when it is not there."""
    values = [float(value) for found, value in _LINE.findall(metrics) if found == name]
    return sum(values) if values else None


@final
class Meters:
    """Reads all of them; made by `open_meters`, to be closed."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._http: aiohttp.ClientSession | None = None
        self._database: asyncpg.Connection | None = None

    async def open(self) -> None:
        """Connect; the controller must have made its schema before rows can be counted."""
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S))
        connection = self._servers.superuser_connection()
        self._database = await asyncpg.connect(**connection, timeout=_TIMEOUT_S, command_timeout=_TIMEOUT_S)

    async def close(self) -> None:
        """Disconnect."""
        if self._database is not None:
            await self._database.close()
        if self._http is not None:
            await self._http.close()

    async def wal_bytes(self) -> int:
        """How much write-ahead log there is: rows, index entries and commits, of everybody."""
        assert self._database is not None
        return int(await self._database.fetchval(_WAL))

    async def rows_written(self) -> int:
        """Rows that were inserted, updated or deleted, the lease's excepted.

        Postgres tells what a session did only after the session was idle for up to 10 s.
        """
        assert self._database is not None
        return int(await self._database.fetchval(_ROWS))

    async def sent(self) -> Sent:
        """What the controller has published."""
        assert self._http is not None
        async with self._http.get(f"{self._servers.nats_monitor_url}/connz") as answer:
            return controllers_part(await answer.json())

    async def plan_s(self) -> float | None:
        """Seconds that the controller has spent on plans, by its own account; None when it does not say."""
        assert self._http is not None
        async with self._http.get(f"{self._servers.controller_ops_url}/metrics") as answer:
            return sample_of(await answer.text(), "serve_controller_reconcile_seconds_sum")
