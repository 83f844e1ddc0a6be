"""Asks NATS for a sign of life over a nats-py connection.

Why not the library's ``flush``: it gives up its own future when its time is over, and the answer that comes later then
ends the connection's reader without a word; and when that reader has ended it says that all is well.
"""

from __future__ import annotations

import asyncio

from nats.aio.client import Client
from nats.errors import Error as NatsError

from serve_common.errors import BusUnavailable


async def ping_nats(client: Client, within_s: float) -> None:
    """Return once NATS has answered. Raises `BusUnavailable` when it has not ``within_s`` seconds later."""
    answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    try:
        async with asyncio.timeout(within_s):
            await client._send_ping(answered)  # noqa: SLF001 - see above
    except (NatsError, OSError, RuntimeError, TimeoutError, AttributeError, AssertionError) as error:
        raise BusUnavailable(f"NATS could not be asked: {error!r}") from error
    done, _ = await asyncio.wait([answered], timeout=within_s)
    if not done:
        raise BusUnavailable(f"NATS has not answered a ping within {within_s:g} s")
