"""The client's subscriptions over nats-py, which reconnect by themselves: log lines, events, reports."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final, final

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from muster.client.requests import FeedMessage, StackAddress
from serve_common.errors import BusUnavailable
from serve_common.identities.roles import inbox_prefix
from serve_common.nats.client import close_nats, connect_nats

_CONNECT_S: Final = 5.0
_FLUSH_S: Final = 5
_WAITING_MAX: Final = 10_000
_WAITING_BYTES_MAX: Final = 32 * 1024 * 1024
"""Most messages that wait to be read, and bytes of them; beyond that the oldest are dropped."""


@final
class NatsFeed:
    """Implements `muster.client.requests.Feed`; reconnects by itself."""

    def __init__(self, address: StackAddress) -> None:
        """Connects in `open`."""
        self._address = address
        self._client: Client | None = None
        self._queue: deque[FeedMessage] = deque()
        self._queue_bytes = 0
        self._arrived = asyncio.Event()

    async def open(self, subjects: Sequence[str]) -> None:
        """Connect and subscribe. Raises `BusUnavailable` and `BusAuthorizationFailed`."""
        address = self._address
        settings = address.bus_settings(inbox_prefix(address.role))
        client = self._client = await connect_nats(
            settings, name="muster feed", deadline_s=_CONNECT_S, logs_attempts=False
        )
        try:
            for subject in subjects:
                await client.subscribe(subject, cb=self._on_message)
            await client.flush(_FLUSH_S)
        except (NatsError, OSError, TimeoutError) as error:
            raise BusUnavailable(f"NATS at {address.where} failed: {error!r}") from error

    async def close(self) -> None:
        """Disconnect."""
        client, self._client = self._client, None
        if client is not None:
            # These callbacks would report the intended disconnection as a loss.
            client._disconnected_cb = client._closed_cb = None  # noqa: SLF001 - the library has no other way
            await close_nats(client)

    async def receive(self, within_s: float | None = None) -> FeedMessage | None:
        """Wait for the next message; None after ``within_s`` seconds."""
        try:
            async with asyncio.timeout(within_s):
                while not self._queue:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            return None
        return self._take()

    async def publish(self, subject: str, payload: bytes) -> None:
        """Publish a message. Raises `BusUnavailable`."""
        assert self._client is not None, "open comes first"
        try:
            await self._client.publish(subject, payload)
        except (NatsError, OSError) as error:
            raise BusUnavailable(f"NATS at {self._address.where} failed: {error!r}") from error

    async def _on_message(self, message: Msg) -> None:
        self._queue.append(FeedMessage(message.subject, message.data))
        self._queue_bytes += len(message.data)
        while len(self._queue) > _WAITING_MAX or self._queue_bytes > _WAITING_BYTES_MAX:
            self._take()
        self._arrived.set()

    def _take(self) -> FeedMessage:
        message = self._queue.popleft()
        self._queue_bytes -= len(message.payload)
        return message
