"""The routing state for handles, kept up by nats-py: a connection of its own that only watches the bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

import structlog
from nats.aio.client import Client

from serve_common.adapters.bucket_watch import SnapshotWatch
from serve_common.adapters.nats_client import close_nats, connect_nats
from serve_common.errors import BusUnavailable
from serve_common.ports import SnapshotListener
from serve_common.settings import BusSettings
from serve_common.subjects import Subjects

_log = structlog.get_logger(__name__)

_CONNECT_ROUND_S: Final = 10.0


@final
class Bucket:
    """Tells a listener what the bucket of snapshots holds, for as long as it is open."""

    def __init__(
        self, settings: BusSettings, *, name: str, listener: SnapshotListener, on_closed: Callable[[], None]
    ) -> None:
        """``on_closed``: the connection is gone for good."""
        self._settings = settings
        self._name = name
        self._listener = listener
        self._on_closed = on_closed
        self._client: Client | None = None
        self._watch: SnapshotWatch | None = None
        self._is_closing = False

    async def open(self) -> None:
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
        self._watch = SnapshotWatch(
            self._client, Subjects(self._settings.subject_prefix).bucket, self._listener
        )
        self._watch.start()

    async def close(self) -> None:
        """Stop watching and disconnect."""
        self._is_closing = True
        if self._watch is not None:
            await self._watch.close()
        if self._client is not None and not self._client.is_closed:
            await close_nats(self._client)

    def _reconnected(self) -> None:
        if self._watch is not None:
            self._watch.reopen()

    def _closed(self) -> None:
        if not self._is_closing:
            self._on_closed()
