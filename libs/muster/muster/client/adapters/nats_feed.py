"""A feed over nats-py, which connects again by itself and then subscribes again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final, final

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from muster.client.address import StackAddress
from muster.client.feed import Heard
from serve_common.adapters.nats_client import close_nats, connect_nats
from serve_common.errors import BusUnavailable
from serve_common.identities.roles import Role, inbox_prefix

_CONNECT_S: Final = 5.0
_FLUSH_S: Final = 5
_WAITING_MAX: Final = 10_000
"""Messages that nobody has taken yet; beyond that the oldest are forgotten."""


@final
class NatsFeed:
    """Implements `muster.client.feed.Feed`."""

    def __init__(self, address: StackAddress) -> None:
        """Connects at `open`."""
        self._address = address
        self._client: Client | None = None
        self._heard: deque[Heard] = deque(maxlen=_WAITING_MAX)
        self._came = asyncio.Event()

    async def open(self, subjects: Sequence[str]) -> None:
        """Connect and subscribe. Raises `BusUnavailable` and `BusAuthorizationFailed`."""
        address = self._address
        settings = address.bus_settings(inbox_prefix(Role.ADMIN))
        client = self._client = await connect_nats(settings, name="muster feed", deadline_s=_CONNECT_S)
        try:
            for subject in subjects:
                await client.subscribe(subject, cb=self._take)
            await client.flush(_FLUSH_S)
        except (NatsError, OSError, TimeoutError) as error:
            raise BusUnavailable(f"NATS at {address.where} failed: {error!r}") from error

    async def close(self) -> None:
        """Disconnect."""
        client, self._client = self._client, None
        if client is not None and not client.is_closed:
            # They would tell of a loss that was meant.
            client._disconnected_cb = client._closed_cb = None  # noqa: SLF001 - the library has no other way
            await close_nats(client)

    async def hear(self, within_s: float | None = None) -> Heard | None:
        """See `Feed.hear`."""
        try:
            async with asyncio.timeout(within_s):
                while not self._heard:
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            return None
        return self._heard.popleft()

    async def publish(self, subject: str, payload: bytes) -> None:
        """See `Feed.publish`."""
        assert self._client is not None, "open comes first"
        try:
            await self._client.publish(subject, payload)
        except (NatsError, OSError) as error:
            raise BusUnavailable(f"NATS at {self._address.where} failed: {error!r}") from error

    async def _take(self, message: Msg) -> None:
        self._heard.append(Heard(message.subject, message.data))
        self._came.set()
