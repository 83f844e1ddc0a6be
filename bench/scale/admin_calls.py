"""The few admin calls that are measured, over plain nats-py.

Why not the client library: it waits between tries and asks in slices, which is right for people and would blur a
clock that counts milliseconds.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, Final, final

import msgspec
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from bench.scale.servers import Servers
from bench.scale.sizes import REPLICAS_PER_BACKEND, backend_name
from serve_common.api.commands import ChangeReply, Deploy
from serve_common.api.queries import WaitForGoal
from serve_common.api.views import GoalStatus, GoalView
from serve_common.config.backend import BackendConfig, ReplicaConfig
from serve_common.identities.roles import Role
from serve_common.names import GoalId
from serve_common.nats.client import close_nats, connect_nats
from serve_common.protocol.subjects import Subjects
from tests.support.identities import bus_settings

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
                answer = await self._client.request(subject, body, timeout=timeout_s)
            except (NoRespondersError, TimeoutError):  # nats-py's own is one
                await asyncio.sleep(_RETRY_PAUSE_S)
                continue
            except NatsError as error:
                raise ChangeFailed(f"{verb} could not be asked: {error}") from error
            headers: dict[str, Any] = answer.headers or {}
            code = headers.get("Nats-Service-Error-Code")
            if code is None:
                return bytes(answer.data)
            if code != _TRANSIENT_CODE:
                raise ChangeFailed(f"{verb} was refused: {headers.get('Nats-Service-Error')}")
            await asyncio.sleep(_RETRY_PAUSE_S)
