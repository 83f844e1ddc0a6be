"""nats-py with the options that a service needs, and its reconnects made visible.

Why these options: by default nats-py gives up for good after 60 tries, waits 2 s between them and notices a dead
peer after minutes. Used for the control plane; the data plane has `serve_common.bus`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

import nats
import structlog
from nats.aio.client import Client
from nats.errors import Error as NatsError

from serve_common.errors import BusAuthorizationFailed, BusUnavailable
from serve_common.settings import BusSettings

_log = structlog.get_logger()
_TIMEOUT_S = 2.0


async def connect_nats(
    settings: BusSettings,
    *,
    name: str,
    deadline_s: float,
    on_disconnect: Callable[[], None] = lambda: None,
    on_reconnect: Callable[[], None] = lambda: None,
    on_closed: Callable[[], None] = lambda: None,
) -> Client:
    """A connection that reconnects for ever.

    Tries for ``deadline_s`` seconds; then raises `BusUnavailable`. Raises `BusAuthorizationFailed` at once when the
    user is refused. ``on_closed`` is called when the connection is closed, which the library also does by itself
    when it is refused for good: the process should then end, to be started anew.
    """

    async def reconnected() -> None:
        _log.info("nats_reconnected", connection=name)
        on_reconnect()

    async def disconnected() -> None:
        _log.warning("nats_disconnected", connection=name)
        on_disconnect()

    async def closed() -> None:
        _log.warning("nats_closed", connection=name)
        on_closed()

    async def failed(error: Exception) -> None:
        _log.warning("nats_error", connection=name, error=str(error) or type(error).__name__)

    tls = ssl.create_default_context(cafile=settings.tls_ca_file) if settings.tls_ca_file else None
    give_up_at = asyncio.get_running_loop().time() + deadline_s
    while True:
        try:
            return await nats.connect(
                servers=settings.servers,
                user=settings.user,
                password=settings.password,
                name=name,
                inbox_prefix=settings.inbox_prefix.encode(),
                tls=tls,
                connect_timeout=_TIMEOUT_S,
                allow_reconnect=True,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.25,
                ping_interval=5,
                max_outstanding_pings=2,
                reconnected_cb=reconnected,
                disconnected_cb=disconnected,
                closed_cb=closed,
                error_cb=failed,
            )
        except (NatsError, OSError, TimeoutError) as error:
            if "authorization" in str(error).lower():
                raise BusAuthorizationFailed(f"NATS refused the user {settings.user!r}") from error
            if asyncio.get_running_loop().time() >= give_up_at:
                raise BusUnavailable(
                    f"NATS at {', '.join(settings.servers)} does not answer: {error}"
                ) from error
            await asyncio.sleep(0.2)
