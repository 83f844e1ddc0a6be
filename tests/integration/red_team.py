"""An intruder on the bus: somebody's credentials, a connection of its own, and what became of each attempt."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Final, final

from nats.aio.client import Client

from serve_common.nats.client import close_nats, login_arguments
from serve_common.nats.login import build_login
from serve_common.runtime.settings import BusSettings
from tests.support.waiting import eventually

_WITHIN_S: Final = 60.0
_REFUSED_WITHIN_S: Final = 20.0
"""After the server has answered a later ping: this only guards against a slow machine."""


@final
class Intruder:
    """One connection, and the server's refusals in the order in which they came."""

    def __init__(self, client: Client, refusals: list[str]) -> None:
        self.client = client
        self._refusals = refusals

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, settings: BusSettings) -> AsyncIterator[Intruder]:
        """As whoever these settings belong to."""
        refusals: list[str] = []

        async def hear(error: Exception) -> None:
            refusals.append(str(error))

        client = Client()
        try:
            await client.connect(
                settings.servers,
                inbox_prefix=settings.inbox_prefix.encode(),
                error_cb=hear,
                allow_reconnect=False,
                **login_arguments(build_login(settings), settings.user, settings.password),
            )
            yield cls(client, refusals)
        finally:
            await close_nats(client)

    async def publish(self, subject: str, payload: bytes = b"{}", reply: str = "") -> None:
        """Send a message, and wait until the server has read it."""
        await self.client.publish(subject, payload, reply=reply)
        await self.client.flush(timeout=int(_WITHIN_S))

    async def is_refused(self, verb: str, subject: str) -> bool:
        """Whether the server refuses a ``PUB`` or a ``SUB`` of that subject."""
        if verb == "PUB":
            await self.client.publish(subject, b"{}")
        else:
            await self.client.subscribe(subject)
        await self.client.flush(timeout=int(_WITHIN_S))
        # The library tells errors in a task of its own, and in small letters.
        try:
            await eventually(
                lambda: any(
                    "permissions" in text and f'"{subject.lower()}"' in text for text in self._refusals
                ),
                within_s=_REFUSED_WITHIN_S,
            )
        except TimeoutError:
            return False
        return True
