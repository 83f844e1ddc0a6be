"""Publishes a process' log lines over a connection of the data plane."""

from __future__ import annotations

import asyncio
import time
from typing import final

import structlog

from serve_common.bus.connection import BusConnection
from serve_common.bus.errors import NotConnected, OutboundFull, PayloadTooLarge
from serve_common.bus.quiet_log import QuietLog
from serve_common.errors import BadField
from serve_common.logs.recall import recalled
from serve_common.logs.relay import LogRelay
from serve_common.subjects import Subjects

_log = structlog.get_logger(__name__)
_NOT_SENT = (NotConnected, OutboundFull, PayloadTooLarge)


@final
class BusLogOutlet:
    """A `LogOutlet` on the loop of a `BusConnection`."""

    def __init__(
        self, relay: LogRelay, bus: BusConnection, subjects: Subjects, kind: str, process_id: str
    ) -> None:
        """To be called on the connection's loop; publishes from now on."""
        self._relay = relay
        self._bus = bus
        self._subjects = subjects
        self._kind = kind
        self._subject = subjects.log(kind, process_id)
        self._loop = asyncio.get_running_loop()
        self._refused = QuietLog(_log.warning)
        bus.subscribe(subjects.log_recall, self._recall)
        relay.use(self)

    def publish(self, piece: bytes, lines: int) -> bool:
        """See `LogOutlet`."""
        if not self._bus.is_connected or self._loop.is_closed():
            return False
        try:
            self._loop.call_soon_threadsafe(self._send, piece, lines)
        except RuntimeError:  # closed in this moment
            return False
        return True

    async def close(self) -> None:
        """Publish what waits, and nothing after that; the connection may be closed then."""
        self._relay.flush()
        self._relay.use(None)
        await asyncio.sleep(0)  # what was just handed over is sent

    def _send(self, piece: bytes, lines: int) -> None:
        try:
            self._bus.publish(self._subject, piece)
        except _NOT_SENT:
            self._relay.count_lost(lines)

    def _recall(self, _subject: bytes, _reply: bytes, payload: bytes, _headers: bytes | None) -> None:
        try:
            for subject, piece in recalled(payload, self._kind, self._relay.recent(), self._subjects):
                self._bus.publish(subject, piece)
        except (BadField, *_NOT_SENT) as error:
            self._refused.log(time.monotonic(), "logs_not_recalled", reason=str(error))
