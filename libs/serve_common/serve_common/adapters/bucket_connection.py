"""A router's connection to the control plane: nats-py, and the watch of the bucket of snapshots.

Why it tries for ever: a router may come up before NATS does, and must then serve as soon as it can, without anybody's
help.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, final

import structlog
from nats.aio.client import Client

from serve_common.adapters.bucket_watch import SnapshotWatch
from serve_common.adapters.nats_client import close_nats, connect_nats
from serve_common.bus.options import Login
from serve_common.errors import BusUnavailable
from serve_common.ports import SnapshotListener
from serve_common.refused_messages import RefusedMessages
from serve_common.settings import BusSettings
from serve_common.subjects import Subjects

_log = structlog.get_logger(__name__)

_CONNECT_ROUND_S: Final = 10.0
"""After so many seconds of trying, a log line says so and it goes on."""


@final
class BucketConnection:
    """Tells a listener what the bucket of snapshots holds, for as long as it is open."""

    def __init__(
        self,
        settings: BusSettings,
        *,
        name: str,
        login: Login | None = None,
        listener: SnapshotListener,
        on_closed: Callable[[], None],
        on_reconnect: Callable[[], None] | None = None,
        refused: RefusedMessages | None = None,
    ) -> None:
        """``login`` goes before what ``settings`` say. ``on_closed``: the connection is gone for good. ``refused``
        counts snapshots that cannot be read.
        """
        self._refused = RefusedMessages(asyncio.get_running_loop().time) if refused is None else refused
        self.client: Client | None = None
        """None until it is connected for the first time."""
        self.reconnects = 0
        self._settings = settings
        self._name = name
        self._login = login
        self._listener = listener
        self._on_closed = on_closed
        self._on_reconnect = on_reconnect
        self._watch: SnapshotWatch | None = None
        self._is_closing = False

    async def open(self) -> Client:
        """Connect, however long that takes, and begin to watch. Raises `BusAuthorizationFailed`."""
        while self.client is None:
            try:
                self.client = await connect_nats(
                    self._settings,
                    name=self._name,
                    deadline_s=_CONNECT_ROUND_S,
                    login=self._login,
                    on_reconnect=self._reconnected,
                    on_closed=self._closed,
                )
            except BusUnavailable as error:
                _log.warning("nats_unavailable", reason=str(error))
        subjects = Subjects(self._settings.subject_prefix)
        self._watch = SnapshotWatch(self.client, subjects, self._listener, self._refused)
        self._watch.start()
        return self.client

    async def close(self) -> None:
        """Stop watching and disconnect."""
        self._is_closing = True
        if self._watch is not None:
            await self._watch.close()
        if self.client is not None and not self.client.is_closed:
            await close_nats(self.client)

    def _reconnected(self) -> None:
        self.reconnects += 1
        if self._watch is not None:
            self._watch.reopen()
        if self._on_reconnect is not None:
            self._on_reconnect()

    def _closed(self) -> None:
        if not self._is_closing:
            self._on_closed()
