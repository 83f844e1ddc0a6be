"""The proxy's side of the control plane: the bucket watch, reports, and leader notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import msgspec
from nats.aio.msg import Msg

from serve_common.nats.bucket_watch import BucketConnection
from serve_common.nats.client import ping_nats, publish_now
from serve_common.protocol.reports import ProxyReport
from serve_common.protocol.snapshots import SnapshotListener
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.operations import get_local_host
from serve_common.runtime.settings import BusSettings
from serve_common.telemetry.log_lines import RefusedMessages


@final
class NatsControlPlane:
    """The connection to the controller, for as long as the process runs."""

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
        """``on_leader`` is called when a controller starts to lead, ``on_closed`` when the connection closes for good.

        ``refused`` counts snapshots that cannot be read.
        """
        self._subjects = Subjects(settings.subject_prefix)
        self._on_leader = on_leader
        self._connection = BucketConnection(
            settings,
            name=name,
            listener=listener,
            on_closed=on_closed,
            on_reconnect=on_leader,  # the leader may have missed reports
            refused=refused,
        )

    @property
    def reconnects(self) -> int:
        """Number of reconnects so far."""
        return self._connection.reconnects

    @property
    def is_connected(self) -> bool:
        """True while messages can be sent."""
        client = self._connection.client
        return client is not None and client.is_connected

    async def ping(self, within_s: float) -> None:
        """Round trip to the server within ``within_s`` seconds. Raises `BusUnavailable`."""
        await ping_nats(self._connection.client, within_s)

    @property
    def local_host(self) -> str | None:
        """This machine's address on the network of NATS; None while it is not connected."""
        return get_local_host(self._connection.client)

    async def connect(self) -> None:
        """Connect, retrying without a limit, and start the watch. Raises `BusAuthorizationFailed`."""
        client = await self._connection.open()
        await client.subscribe(self._subjects.leader, cb=self._on_leader_message)

    async def send_report(self, report: ProxyReport) -> None:
        """Publish the report; nothing is buffered while disconnected. Raises `BusUnavailable`."""
        subject = self._subjects.proxy_report(report.proxy_id)
        await publish_now(self._connection.client, subject, msgspec.json.encode(report))

    async def close(self) -> None:
        """Flush what was published and disconnect."""
        await self._connection.close()

    async def _on_leader_message(self, _message: Msg) -> None:
        self._on_leader()
