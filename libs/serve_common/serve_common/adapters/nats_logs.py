"""Publishes a process' log lines over a nats-py connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, final

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from serve_common.bus.quiet_log import QuietLog
from serve_common.errors import BadField
from serve_common.logs.recall import recalled
from serve_common.logs.relay import LogRelay
from serve_common.subjects import Subjects
from serve_common.tasks import TaskOwner

_log = structlog.get_logger(__name__)

_SENDINGS_MAX: Final = 16
"""Pieces on their way to the connection at once."""
_CLOSE_TIMEOUT_S: Final = 1.0


@final
class NatsLogOutlet:
    """A `LogOutlet` on the loop that made it."""

    def __init__(
        self,
        relay: LogRelay,
        subjects: Subjects,
        kind: str,
        process_id: str,
        of_others: Callable[[], list[bytes]] = list,
    ) -> None:
        """Publishes nothing before `join`. ``of_others``: lines that this process remembers for others."""
        self._of_others = of_others
        self._relay = relay
        self._subjects = subjects
        self._kind = kind
        self._subject = subjects.log(kind, process_id)
        self._loop = asyncio.get_running_loop()
        self._tasks = TaskOwner("logs")
        self._client: Client | None = None
        self._refused = QuietLog(_log.warning)

    async def join(self, client: Client) -> None:
        """Publish by ``client`` from now on. Raises what its `subscribe` raises."""
        await client.subscribe(self._subjects.log_recall, cb=self._recall)
        self._client = client
        self._relay.use(self)

    def publish(self, piece: bytes, lines: int) -> bool:
        """See `LogOutlet`."""
        client = self._client
        if client is None or not client.is_connected or len(self._tasks) >= _SENDINGS_MAX:
            return False
        try:
            self._loop.call_soon_threadsafe(self._start, client, piece, lines)
        except RuntimeError:  # the loop is closed: the process ends
            return False
        return True

    async def close(self) -> None:
        """Publish what waits, and nothing after that."""
        self._relay.flush()
        self._relay.use(None)
        await asyncio.sleep(0)  # what was just handed over begins
        await self._tasks.close(_CLOSE_TIMEOUT_S)

    def _start(self, client: Client, piece: bytes, lines: int) -> None:
        self._tasks.start(self._send(client, piece, lines), "publish")

    async def _send(self, client: Client, piece: bytes, lines: int) -> None:
        try:
            await client.publish(self._subject, piece)
        except (NatsError, OSError):
            self._relay.count_lost(lines)

    async def _recall(self, message: Msg) -> None:
        client = self._client
        if client is None:
            return
        try:
            recent = [*self._of_others(), *self._relay.recent()]
            for subject, piece in recalled(message.data, self._kind, recent, self._subjects):
                await client.publish(subject, piece)
        except (BadField, NatsError, OSError) as error:
            self._refused.log(time.monotonic(), "logs_not_recalled", reason=str(error))
