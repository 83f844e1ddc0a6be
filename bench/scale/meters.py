"""What the benchmark sends and reads: a few admin calls, and figures of Postgres, nats-server and the controller.

Why from outside: none of it depends on how the controller is built, so tables of different versions compare. Why admin
calls not by the client library: it waits between tries and asks in slices, which is right for people and would blur a
clock that counts milliseconds.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from typing import Any, Final, final

import aiohttp
import asyncpg
import msgspec
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from bench.scale.processes import Servers
from bench.scale.report import REPLICAS_PER_BACKEND, backend_name
from serve_common.api.commands import ChangeReply, Deploy
from serve_common.api.queries import WaitForGoal
from serve_common.api.views import GoalStatus, GoalView
from serve_common.config.backend import BackendConfig, ReplicaConfig
from serve_common.identities.roles import Role
from serve_common.names import GoalId
from serve_common.nats.client import close_nats, connect_nats
from serve_common.protocol.subjects import Subjects
from tests.support.identities import bus_settings

_TIMEOUT_S: Final = 10.0
_WAL: Final = "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint"
_ROWS: Final = """
    SELECT coalesce(sum(n_tup_ins + n_tup_upd + n_tup_del), 0)::bigint
    FROM pg_stat_user_tables WHERE schemaname = 'muster' AND relname NOT IN ('leader', 'schema_migrations')
"""
_LINE: Final = re.compile(r"^(\S+?)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_SLICE_S: Final = 20.0
_SLACK_S: Final = 10.0
_ATTEMPT_S: Final = 30.0
_RETRY_PAUSE_S: Final = 0.01
_TRANSIENT_CODE: Final = "503"


class ChangeFailed(RuntimeError):
    """A change was refused or its goal did not succeed; the message tells."""


def deploy_request(index: int, num_replicas: int = REPLICAS_PER_BACKEND, threshold: float = 0.5) -> Deploy:
    """The deployment with that index; always of the same code, so that no replica is ever replaced."""
    name = backend_name(index)
    return Deploy(
        name=name,
        replica_config=ReplicaConfig(import_path="noop:Noop"),
        backend_config=BackendConfig(num_replicas=num_replicas, user_config={"threshold": threshold}),
        route_prefix=f"/{name}",
        version="v1",
        request_id=uuid.uuid4().hex,
    )


@final
class AdminCalls:
    """A connection as the user ``admin``."""

    def __init__(self, servers: Servers) -> None:
        self._settings = bus_settings(servers.secrets, servers.nats_url, Role.ADMIN)
        self._subjects = Subjects()
        self._client: Client | None = None

    async def open(self) -> None:
        """Connect. Raises `BusUnavailable`."""
        self._client = await connect_nats(self._settings, name="scale benchmark", deadline_s=10.0)

    async def close(self) -> None:
        """Disconnect."""
        if self._client is not None:
            await close_nats(self._client)

    async def deploy(self, request: Deploy, attempt_s: float = _ATTEMPT_S) -> ChangeReply:
        """Until some controller has answered; what is not answered within ``attempt_s`` is sent again, being the same.

        Raises `ChangeFailed` for a refusal.
        """
        return msgspec.json.decode(await self._query("deploy", request, attempt_s), type=ChangeReply)

    async def wait_for_success(self, goal_id: GoalId | None) -> None:
        """Until the goal succeeded, for as long as that takes; None has nothing to wait for. Raises `ChangeFailed`."""
        while goal_id is not None:
            request = WaitForGoal(goal_id=goal_id, timeout_s=_SLICE_S)
            view = msgspec.json.decode(
                await self._query("wait_for_goal", request, _SLICE_S + _SLACK_S), type=GoalView
            )
            if view.status is GoalStatus.SUCCEEDED:
                return
            if view.status is not GoalStatus.PENDING:
                raise ChangeFailed(f"goal {goal_id} is {view.status.value}: {view.error or view.message}")

    async def _query(self, verb: str, request: msgspec.Struct, timeout_s: float) -> bytes:
        assert self._client is not None
        subject, body = self._subjects.admin(verb), msgspec.json.encode(request)
        while True:
            try:
                reply = await self._client.request(subject, body, timeout=timeout_s)
            except (NoRespondersError, TimeoutError):  # nats-py's own is one
                await asyncio.sleep(_RETRY_PAUSE_S)
                continue
            except NatsError as error:
                raise ChangeFailed(f"{verb} could not be sent: {error}") from error
            headers: dict[str, Any] = reply.headers or {}
            code = headers.get("Nats-Service-Error-Code")
            if code is None:
                return bytes(reply.data)
            if code != _TRANSIENT_CODE:
                raise ChangeFailed(f"{verb} was refused: {headers.get('Nats-Service-Error')}")
            await asyncio.sleep(_RETRY_PAUSE_S)


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
    """Reads all of them, once opened; to be closed."""

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
