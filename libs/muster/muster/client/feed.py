"""What is told to whoever listens: log lines and events, as they happen.

Why apart from requests: this must go on over a restart of NATS, while a request that is lost must be known to be lost.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import msgspec

from muster.client.address import StackAddress


class Heard(msgspec.Struct, frozen=True):
    """One message."""

    subject: str
    payload: bytes


class Feed(Protocol):
    """Messages of some subjects, in the order in which they came."""

    async def hear(self, within_s: float | None = None) -> Heard | None:
        """The next one; None when none came in time. None as a time waits for ever."""
        ...

    async def publish(self, subject: str, payload: bytes) -> None:
        """Say something to all who hear it. Raises `BusUnavailable`."""
        ...


class Listen(Protocol):
    """Opens a feed; see `listen_to_stack`."""

    def __call__(self, address: StackAddress, subjects: Sequence[str]) -> AbstractAsyncContextManager[Feed]:
        """Raises `BusUnavailable` and `BusAuthorizationFailed` when entered."""
        ...


@asynccontextmanager
async def listen_to_stack(address: StackAddress, subjects: Sequence[str]) -> AsyncIterator[Feed]:
    """Hear ``subjects``, wildcards included, until the end; NATS may go and come back meanwhile.

    Raises `BusUnavailable` when NATS does not answer within seconds, and `BusAuthorizationFailed`.
    """
    # Only here: the driver takes longer to import than `muster --help` should take.
    from muster.client.adapters.nats_feed import NatsFeed  # noqa: PLC0415 - as above

    feed = NatsFeed(address)
    try:
        await feed.open(subjects)
        yield feed
    finally:
        await feed.close()
