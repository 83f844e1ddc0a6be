"""The host's connection to the control plane, by nats-py: receives goals and leader notices, publishes reports.

Why it reconnects by itself: nats-py closes for good when it is refused, for example while the server's users are
being changed. The host's replicas continue to serve meanwhile, so the host must not exit for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, final

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from serve_common.errors import BusAuthorizationFailed, BusUnavailable
from serve_common.names import HostId
from serve_common.nats.client import close_nats, connect_nats, join_log_sink, ping_nats, publish_now
from serve_common.protocol.code import PAGES_HEADER
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.operations import get_local_host
from serve_common.runtime.settings import BusSettings
from serve_common.telemetry.log_forwarder import NatsLogSink

_log = structlog.get_logger(__name__)

_DIAL_S: Final = 10.0
_RETRY_S: Final = 1.0
_CLOSE_TIMEOUT_S: Final = 1.0
_READ_TIMEOUT_S: Final = 5.0


@final
class ControlBus:
    """Stays connected until closed; messages are passed to the callbacks as bytes."""

    def __init__(
        self,
        settings: BusSettings,
        host_id: HostId,
        *,
        on_goal: Callable[[bytes], None],
        on_leader: Callable[[bytes], None],
        on_evaluation: Callable[[bytes], None],
        on_connected: Callable[[], None],
        on_reconnect: Callable[[], None],
        logs: NatsLogSink | None = None,
    ) -> None:
        """``logs`` publishes over the current connection."""
        self._logs = logs
        self._settings = settings
        self._host_id = host_id
        self._subjects = Subjects(settings.subject_prefix)
        self._on_goal = on_goal
        self._on_leader = on_leader
        self._on_evaluation = on_evaluation
        self._on_connected = on_connected
        self._on_reconnect = on_reconnect
        self._client: Client | None = None
        self._closed = asyncio.Event()

    @property
    def is_connected(self) -> bool:
        """True while messages can be sent."""
        return self._client is not None and self._client.is_connected

    @property
    def local_host(self) -> str | None:
        """This machine's address on the network of NATS; None while it is not connected."""
        return get_local_host(self._client)

    async def ping(self, within_s: float) -> None:
        """Round trip to the server within ``within_s`` seconds. Raises `BusUnavailable`."""
        await ping_nats(self._client, within_s)

    async def run(self) -> None:
        """Connect, and reconnect whenever the client has closed for good; runs until cancelled.

        Raises `BusAuthorizationFailed` when the credentials were never accepted.
        """
        has_connected = False
        while True:
            self._closed.clear()
            try:
                client = await connect_nats(
                    self._settings,
                    name=f"host {self._host_id}",
                    deadline_s=_DIAL_S,
                    on_reconnect=self._on_reconnect,
                    on_closed=self._closed.set,
                )
            except BusUnavailable as error:
                _log.warning("nats_away", error=str(error))
                continue
            except BusAuthorizationFailed as error:
                if not has_connected:
                    raise
                _log.error("nats_refused", error=str(error))
                await asyncio.sleep(_RETRY_S)
                continue
            has_connected = True
            self._client = client
            await self._subscribe(client)
            self._on_connected()
            await self._closed.wait()
            self._client = None
            await asyncio.sleep(_RETRY_S)

    async def publish_report(self, payload: bytes) -> None:
        """Publish one report; it is dropped when it cannot be sent."""
        if not self.is_connected:
            return
        try:
            await publish_now(self._client, self._subjects.host_report(self._host_id), payload)
        except BusUnavailable as error:
            _log.warning("report_not_sent", error=str(error))

    async def publish_evaluation(self, payload: bytes) -> None:
        """Publish what came of an evaluation; it is dropped when it cannot be sent."""
        try:
            await publish_now(self._client, self._subjects.evaluation_report(self._host_id), payload)
        except BusUnavailable as error:
            _log.debug("evaluation_not_sent", error=str(error))

    async def read_code_page(self, digest: str, page: int) -> tuple[bytes, int]:
        """A page of code from the bucket, and the number of pages.

        Raises `NotFoundError` when the bucket lacks it, `BusUnavailable`, and other errors of NATS.
        """
        client = self._client
        if client is None or not client.is_connected:
            raise BusUnavailable("NATS is not connected")
        stream = client.jetstream(timeout=_READ_TIMEOUT_S)
        message = await stream.get_msg(
            self._subjects.code_bucket, subject=self._subjects.code(digest, page), direct=True
        )
        pages = (message.headers or {}).get(PAGES_HEADER, "")
        return (message.data or b"")[1:], int(pages) if pages.isdecimal() else 0

    async def close(self) -> None:
        """Flush what was published and disconnect; takes at most a few seconds."""
        client, self._client = self._client, None
        if self._logs is not None:
            await self._logs.close()
        if client is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                if client.is_connected:
                    await client.flush()
        except (NatsError, OSError, TimeoutError) as error:
            _log.warning("nats_close_incomplete", error=str(error) or type(error).__name__)
        await close_nats(client)

    async def _subscribe(self, client: Client) -> None:
        async def goal(message: Msg) -> None:
            self._on_goal(message.data)

        async def leader(message: Msg) -> None:
            self._on_leader(message.data)

        async def evaluation(message: Msg) -> None:
            self._on_evaluation(message.data)

        await client.subscribe(self._subjects.host_goal(self._host_id), cb=goal)
        await client.subscribe(self._subjects.host_evaluation(self._host_id), cb=evaluation)
        await client.subscribe(self._subjects.leader, cb=leader)
        if self._logs is not None:
            await join_log_sink(self._logs, client)
