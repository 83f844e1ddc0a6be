"""The control plane's NATS connection: the bucket's watch, reports, and the leader's notice.

Why it starts in the background and tries for ever: a proxy may come up before NATS does, and must then serve as soon as
it can, without anybody's help.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, final

import msgspec
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from serve_common.adapters.bucket_watch import SnapshotWatch
from serve_common.adapters.nats_client import connect_nats
from serve_common.errors import BusUnavailable
from serve_common.ports import SnapshotListener
from serve_common.settings import BusSettings
from serve_common.subjects import Subjects
from serve_common.wires.proxy import ProxyReport

_log = structlog.get_logger(__name__)

_CONNECT_ROUND_S: Final = 10.0
"""After so many seconds of trying, a log line says so and it goes on."""
_TIMEOUT_S: Final = 2.0


@final
class NatsControlPlane:
    """Connected for as long as the process runs; a `ControlPlane`."""

    def __init__(
        self,
        settings: BusSettings,
        *,
        name: str,
        listener: SnapshotListener,
        on_leader: Callable[[], None],
        on_closed: Callable[[], None],
    ) -> None:
        """``on_leader``: a controller began to lead. ``on_closed``: the connection is gone for good."""
        self.reconnects = 0
        self._settings = settings
        self._subjects = Subjects(settings.subject_prefix)
        self._name = name
        self._listener = listener
        self._on_leader = on_leader
        self._on_closed = on_closed
        self._client: Client | None = None
        self._watch: SnapshotWatch | None = None
        self._is_closing = False

    async def connect(self) -> None:
        """Connect, however long that takes, and begin to watch. Raises `BusAuthorizationFailed`."""
        while self._client is None:
            try:
                self._client = await connect_nats(
                    self._settings,
                    name=self._name,
                    deadline_s=_CONNECT_ROUND_S,
                    on_reconnect=self._reconnected,
                    on_closed=self._closed,
                )
            except BusUnavailable as error:
                _log.warning("nats_unavailable", reason=str(error))
        await self._client.subscribe(self._subjects.leader, cb=self._hear_leader)
        self._watch = SnapshotWatch(self._client, self._subjects.bucket, self._listener)
        self._watch.start()

    async def send_report(self, report: ProxyReport) -> None:
        """See `ControlPlane`; nothing is kept for later while NATS is away."""
        client = self._client
        if client is None or not client.is_connected:
            raise BusUnavailable("not connected to NATS")
        try:
            await client.publish(self._subjects.proxy_report(report.proxy_id), msgspec.json.encode(report))
        except (NatsError, OSError) as error:
            raise BusUnavailable(f"the report could not be sent: {error}") from error

    async def close(self) -> None:
        """Send what was published and disconnect."""
        self._is_closing = True
        if self._watch is not None:
            await self._watch.close()
        client = self._client
        if client is None or client.is_closed:
            return
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                if client.is_connected:
                    await client.flush(timeout=1)
                await client.close()
        except (NatsError, OSError, TimeoutError) as error:
            _log.warning("nats_close_failed", error=repr(error))

    def _reconnected(self) -> None:
        self.reconnects += 1
        if self._watch is not None:
            self._watch.reopen()
        self._on_leader()  # whoever leads may have missed reports

    def _closed(self) -> None:
        if not self._is_closing:
            self._on_closed()

    async def _hear_leader(self, _message: Msg) -> None:
        self._on_leader()
