"""The proxy's side of the control plane: the bucket's watch, reports, and the leader's notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import msgspec
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from serve_common.errors import BusUnavailable
from serve_common.nats.bucket_watch import BucketConnection
from serve_common.nats.client import ping_nats
from serve_common.ports import SnapshotListener
from serve_common.protocol.reports import ProxyReport
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.operations import local_host_of
from serve_common.runtime.settings import BusSettings
from serve_common.telemetry.log_lines import RefusedMessages


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
        refused: RefusedMessages,
    ) -> None:
        """``on_leader``: a controller began to lead. ``on_closed``: the connection is gone for good.

        ``refused`` counts snapshots that cannot be read.
        """
        self._subjects = Subjects(settings.subject_prefix)
        self._on_leader = on_leader
        self._connection = BucketConnection(
            settings,
            name=name,
            listener=listener,
            on_closed=on_closed,
            on_reconnect=on_leader,  # whoever leads may have missed reports
            refused=refused,
        )

    @property
    def reconnects(self) -> int:
        """How often the connection came back."""
        return self._connection.reconnects

    @property
    def is_connected(self) -> bool:
        """False while nothing can be sent."""
        client = self._connection.client
        return client is not None and client.is_connected

    async def ping(self, within_s: float) -> None:
        """See `BusPulse`."""
        if self._connection.client is None:
            raise BusUnavailable("not connected to NATS")
        await ping_nats(self._connection.client, within_s)

    @property
    def local_host(self) -> str | None:
        """This machine's address on the network of NATS; None while it is not connected."""
        return local_host_of(self._connection.client)

    async def connect(self) -> None:
        """Connect, however long that takes, and begin to watch. Raises `BusAuthorizationFailed`."""
        client = await self._connection.open()
        await client.subscribe(self._subjects.leader, cb=self._hear_leader)

    async def send_report(self, report: ProxyReport) -> None:
        """See `ControlPlane`; nothing is kept for later while NATS is away."""
        client = self._connection.client
        if client is None or not client.is_connected:
            raise BusUnavailable("not connected to NATS")
        try:
            await client.publish(self._subjects.proxy_report(report.proxy_id), msgspec.json.encode(report))
        except (NatsError, OSError) as error:
            raise BusUnavailable(f"the report could not be sent: {error}") from error

    async def close(self) -> None:
        """Send what was published and disconnect."""
        await self._connection.close()

    async def _hear_leader(self, _message: Msg) -> None:
        self._on_leader()
