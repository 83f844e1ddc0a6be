"""nats-py with the options that a service needs, and its reconnects made visible.

Why these options: by default nats-py gives up for good after 60 tries, waits 2 s between them and notices a dead
peer after minutes. Used for the control plane; the data plane has `serve_common.bus`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import structlog
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from serve_common.adapters.nats_login import login_of
from serve_common.bus.options import Login
from serve_common.errors import BusAuthorizationFailed, BusUnavailable, ServeError
from serve_common.settings import BusSettings
from serve_common.tasks import cancellations, raise_if_cancelled

_log = structlog.get_logger()
_TIMEOUT_S = 2.0
_ATTEMPT_S = 3.0
_PAUSE_S = 0.2
"""Between attempts."""


async def connect_nats(
    settings: BusSettings,
    *,
    name: str,
    deadline_s: float,
    login: Login | None = None,
    on_disconnect: Callable[[], None] = lambda: None,
    on_reconnect: Callable[[], None] = lambda: None,
    on_closed: Callable[[], None] = lambda: None,
) -> Client:
    """A connection that reconnects for ever, with ``login`` or else as ``settings`` say.

    Tries for ``deadline_s`` seconds; then raises `BusUnavailable`. Raises `BusAuthorizationFailed` at once when the
    user is refused. ``on_closed`` is called when the connection is closed, which the library also does by itself
    when it is refused for good: the process should then end, to be started anew.
    """
    login = login or login_of(settings)
    told = _Told(name, on_disconnect=on_disconnect, on_reconnect=on_reconnect, on_closed=on_closed)
    tls = ssl.create_default_context(cafile=settings.tls_ca_file) if settings.tls_ca_file else None
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + deadline_s
    known = cancellations()
    while True:
        client = NatsClient()
        try:
            # The library's own first connect tries for ever, also with a password that is wrong.
            async with asyncio.timeout(min(_ATTEMPT_S, max(give_up_at - loop.time(), 0.1))):
                await _connect_once(client, settings, login=login, name=name, tls=tls, told=told)
            raise_if_cancelled(known)
        except asyncio.CancelledError:
            await close_nats(client)  # or its socket outlives whoever connects
            raise
        except (NatsError, OSError, TimeoutError) as error:
            await close_nats(client)
            raise_if_cancelled(known)
            told.note(error)
            if told.is_refused:
                raise BusAuthorizationFailed(f"NATS refused the user {settings.user!r}") from error
            if loop.time() >= give_up_at:
                servers = ", ".join(settings.servers)
                raise BusUnavailable(f"NATS at {servers} does not answer: {error!r}") from error
            await asyncio.sleep(_PAUSE_S)
            continue
        client._closed_cb = told.closed  # noqa: SLF001 - an attempt that was given up must not count as closed
        return client


@final
class _Told:
    """What the library tells of a connection: logged, passed on, and remembered where the attempts need it."""

    def __init__(
        self,
        name: str,
        *,
        on_disconnect: Callable[[], None],
        on_reconnect: Callable[[], None],
        on_closed: Callable[[], None],
    ) -> None:
        self.is_refused = False
        """The server has not let the user in."""
        self._log = _log.bind(connection=name)
        self._on_disconnect = on_disconnect
        self._on_reconnect = on_reconnect
        self._on_closed = on_closed

    def note(self, error: Exception) -> None:
        """An attempt failed by ``error``, or the library met it."""
        self.is_refused = self.is_refused or "authorization" in str(error).lower()

    async def failed(self, error: Exception) -> None:
        """For the library: an error that belongs to no call."""
        self.note(error)
        self._log.warning("nats_error", error=str(error) or type(error).__name__)

    async def reconnected(self) -> None:
        """For the library."""
        self._log.info("nats_reconnected")
        self._on_reconnect()

    async def disconnected(self) -> None:
        """For the library."""
        self._log.warning("nats_disconnected")
        self._on_disconnect()

    async def closed(self) -> None:
        """For the library."""
        self._log.warning("nats_closed")
        self._on_closed()


class NatsClient(Client):
    """The library's client, which takes a token that has expired for a lost connection instead of for a refusal."""

    async def _process_err(self, err_msg: str) -> None:
        if "expired" in err_msg.lower() and self._user_jwt_cb is not None:
            await self._process_op_err(NatsError(f"nats: {err_msg}"))
        else:
            await super()._process_err(err_msg)


def login_arguments(login: Login | None, user: str, password: str) -> dict[str, Any]:
    """What the library's ``connect`` is to log in with: ``login``, or else a plain user."""
    if login is None:
        return {"user": user, "password": password}
    fields: dict[str, str] = {}

    def sign(nonce: str) -> bytes:
        try:
            fields.update(login.fields(nonce))
        except ServeError as error:  # any other kind would end the library's reconnecting
            raise NatsError(f"authorization: {error}") from error
        return fields["sig"].encode()

    def token() -> bytes:
        return fields["jwt"].encode()

    # The library asks for the signature first, and then for the token that belongs to it.
    return {"signature_cb": sign, "user_jwt_cb": token}


async def _connect_once(
    client: Client,
    settings: BusSettings,
    *,
    login: Login | None,
    name: str,
    tls: ssl.SSLContext | None,
    told: _Told,
) -> None:
    await client.connect(
        servers=settings.servers,
        **login_arguments(login, settings.user, settings.password),
        name=name,
        inbox_prefix=settings.inbox_prefix.encode(),
        tls=tls,
        connect_timeout=2,  # s, as below; the library's hints say int
        allow_reconnect=True,
        max_reconnect_attempts=-1,
        reconnect_time_wait=0.25,  # type: ignore[arg-type]  # seconds; a fraction is fine
        ping_interval=5,
        max_outstanding_pings=2,
        reconnected_cb=told.reconnected,
        disconnected_cb=told.disconnected,
        error_cb=told.failed,
    )


_TASK_NAMES: Final = ("_reconnection_task", "_reading_task", "_ping_interval_task", "_flusher_task")
"""Of a client; the library has no other way to them."""


async def close_nats(client: Client) -> None:
    """Close a client in bounded time. While NATS is away the library raises here, which says nothing new."""
    subscriptions = list(client._subs.values())  # noqa: SLF001 - closing empties it
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await client.close()
    except (NatsError, OSError, TimeoutError) as error:
        _log.debug("nats_not_closed", error=repr(error))
        _abort(client)
    await _end_tasks(client, subscriptions)


def _abort(client: Client) -> None:
    """Let go of the socket, which the library closes last: it may have come to nothing before that."""
    writer: asyncio.StreamWriter | None = getattr(client._transport, "_io_writer", None)  # noqa: SLF001 - the library has no other way
    if writer is not None:
        writer.transport.abort()


async def _end_tasks(client: Client, subscriptions: Sequence[Subscription]) -> None:
    """End what the library leaves behind when closing it raised.

    Then its reconnecting would go on for ever, for it looks at nothing but its cancellation; and that can be lost: in
    Python 3.11 `wait_for`, in which it connects, drops one that comes together with a result.
    """
    owned = [getattr(client, name, None) for name in _TASK_NAMES]
    owned += [getattr(subscription, "_wait_for_msgs_task", None) for subscription in subscriptions]
    left = {task for task in owned if task is not None and task is not asyncio.current_task()}
    give_up_at = asyncio.get_running_loop().time() + _TIMEOUT_S
    while left and asyncio.get_running_loop().time() < give_up_at:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.1)
    if left:
        _log.error("nats_tasks_left", count=len(left))
