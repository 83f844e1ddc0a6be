"""nats-py with what a service needs: visible reconnects, a reliable ping, and log forwarding.

Used for the control plane; the data plane has `serve_common.nats.connection`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, final

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from serve_common.errors import BusAuthorizationFailed, BusUnavailable, ServeError
from serve_common.nats.login import build_login
from serve_common.nats.options import Login
from serve_common.runtime.settings import BusSettings
from serve_common.runtime.tasks import cancellations, raise_if_cancelled
from serve_common.telemetry.log_forwarder import NatsLogSink

_log = structlog.get_logger()
_TIMEOUT_S = 2.0
_ATTEMPT_S = 3.0
_PAUSE_S = 0.2
"""Seconds between attempts."""


async def connect_nats(
    settings: BusSettings,
    *,
    name: str,
    deadline_s: float,
    login: Login | None = None,
    logs_attempts: bool = True,
    on_disconnect: Callable[[], None] = lambda: None,
    on_reconnect: Callable[[], None] = lambda: None,
    on_closed: Callable[[], None] = lambda: None,
) -> Client:
    """Connect with ``login`` or else as ``settings`` say; the connection reconnects for ever.

    Tries for ``deadline_s`` seconds; then raises `BusUnavailable`. Raises `BusAuthorizationFailed` at once when the
    user is refused. ``logs_attempts`` False: only the error that is raised tells of failed attempts, for a program that
    prints it. ``on_closed`` is called when the connection is closed, which the library also does by itself
    when it is refused for good: the process should then exit, to be restarted.
    """
    login = login or build_login(settings)
    events = _ConnectionEvents(
        name, on_disconnect=on_disconnect, on_reconnect=on_reconnect, on_closed=on_closed
    )
    events.is_logging = logs_attempts
    tls = ssl.create_default_context(cafile=settings.tls_ca_file) if settings.tls_ca_file else None
    loop = asyncio.get_running_loop()
    deadline = loop.time() + deadline_s
    known = cancellations()
    while True:
        client = NatsClient()
        try:
            # The library's own first connect tries for ever, also with a password that is wrong.
            async with asyncio.timeout(min(_ATTEMPT_S, max(deadline - loop.time(), 0.1))):
                await _connect_once(client, settings, login=login, name=name, tls=tls, events=events)
            raise_if_cancelled(known)
        except asyncio.CancelledError:
            await close_nats(client)  # or its socket outlives the caller
            raise
        except (NatsError, OSError, TimeoutError) as error:
            await close_nats(client)
            raise_if_cancelled(known)
            events.note(error)
            if events.is_refused:
                raise BusAuthorizationFailed(f"NATS refused the user {settings.user!r}") from error
            if loop.time() >= deadline:
                servers = ", ".join(settings.servers)
                reason = events.last_error or repr(error)
                raise BusUnavailable(f"NATS at {servers} does not answer: {reason}") from error
            await asyncio.sleep(_PAUSE_S)
            continue
        events.is_logging = True
        client._closed_cb = events.closed  # noqa: SLF001 - an attempt that was given up must not count as closed
        return client


@final
class _ConnectionEvents:
    """The library's callbacks for a connection: logs, forwards, and remembers what the attempts need."""

    def __init__(
        self,
        name: str,
        *,
        on_disconnect: Callable[[], None],
        on_reconnect: Callable[[], None],
        on_closed: Callable[[], None],
    ) -> None:
        self.is_refused = False
        """The server has refused the user."""
        self.is_logging = True
        """Whether losses and errors are logged."""
        self.last_error = ""
        """The error that the library reported last."""
        self._log = _log.bind(connection=name)
        self._on_disconnect = on_disconnect
        self._on_reconnect = on_reconnect
        self._on_closed = on_closed

    def note(self, error: Exception) -> None:
        """Record that an attempt failed with ``error``, or that the library reported it."""
        self.is_refused = self.is_refused or "authorization" in str(error).lower()

    async def failed(self, error: Exception) -> None:
        """Library callback: an error that belongs to no call."""
        self.note(error)
        self.last_error = str(error) or type(error).__name__
        if self.is_logging:
            self._log.warning("nats_error", error=self.last_error)

    async def reconnected(self) -> None:
        """Library callback."""
        self._log.info("nats_reconnected")
        self._on_reconnect()

    async def disconnected(self) -> None:
        """Library callback."""
        if self.is_logging:
            self._log.warning("nats_disconnected")
        self._on_disconnect()

    async def closed(self) -> None:
        """Library callback."""
        self._log.warning("nats_closed")
        self._on_closed()


class NatsClient(Client):
    """The library's client, which treats an expired token as a lost connection instead of as a refusal."""

    async def _process_err(self, err_msg: str) -> None:
        if "expired" in err_msg.lower() and self._user_jwt_cb is not None:
            await self._process_op_err(NatsError(f"nats: {err_msg}"))
        else:
            await super()._process_err(err_msg)


def login_arguments(login: Login | None, user: str, password: str) -> dict[str, Any]:
    """Arguments for the library's ``connect``: ``login``, or else a plain user."""
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
    events: _ConnectionEvents,
) -> None:
    # By default the library gives up for good after 60 attempts, waits 2 s between them, and detects a dead peer only
    # after minutes.
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
        reconnected_cb=events.reconnected,
        disconnected_cb=events.disconnected,
        error_cb=events.failed,
    )


_TASK_NAMES: Final = ("_reconnection_task", "_reading_task", "_ping_interval_task", "_flusher_task")
"""Attributes of a client that hold its tasks; the library has no public access to them."""


async def close_nats(client: Client) -> None:
    """Close a client in bounded time. While NATS is unreachable the library raises here; that is only logged.

    Also for a client that says it is closed: it says so before its socket is.
    """
    subscriptions = list(client._subs.values())  # noqa: SLF001 - closing empties it
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await client.close()
    except (NatsError, OSError, RuntimeError, TimeoutError) as error:
        # uvloop raises RuntimeError for what is written to a socket that is closed already.
        _log.debug("nats_not_closed", error=repr(error))
    finally:
        _abort(client)
    await _end_tasks(client, subscriptions)


def _abort(client: Client) -> None:
    """Abort the socket, which the library closes last: it may have failed before that."""
    writer: asyncio.StreamWriter | None = getattr(client._transport, "_io_writer", None)  # noqa: SLF001 - the library has no other way
    if writer is not None:
        writer.transport.abort()


async def _end_tasks(client: Client, subscriptions: Sequence[Subscription]) -> None:
    """Cancel the tasks that the library leaves behind when closing it raised.

    Otherwise it would reconnect for ever, for it checks nothing but its cancellation; and that can be lost: in Python
    3.11 `wait_for`, in which it connects, drops one that comes together with a result.
    """
    owned = [getattr(client, name, None) for name in _TASK_NAMES]
    owned += [getattr(subscription, "_wait_for_msgs_task", None) for subscription in subscriptions]
    left = {task for task in owned if task is not None and task is not asyncio.current_task()}
    deadline = asyncio.get_running_loop().time() + _TIMEOUT_S
    while left and asyncio.get_running_loop().time() < deadline:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.1)
    if left:
        _log.error("nats_tasks_left", count=len(left))


async def publish_now(client: Client | None, subject: str, payload: bytes) -> None:
    """Publish a message. Raises `BusUnavailable`, also while disconnected: the library would buffer it."""
    if client is None or not client.is_connected:
        raise BusUnavailable("not connected to NATS")
    try:
        await client.publish(subject, payload)
    except (NatsError, OSError) as error:
        raise BusUnavailable(f"{subject} could not be published: {error!r}") from error


async def ping_nats(client: Client | None, within_s: float) -> None:
    """Return once NATS has answered. Raises `BusUnavailable` when it has not ``within_s`` seconds later.

    Why not the library's ``flush``: on a timeout it cancels its own future, and an answer that comes later then ends
    the connection's reader without any error; once that reader has ended, ``flush`` reports success.
    """
    if client is None:
        raise BusUnavailable("not connected to NATS")
    pong: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    try:
        async with asyncio.timeout(within_s):
            await client._send_ping(pong)  # noqa: SLF001 - the library has no other way
    except (NatsError, OSError, RuntimeError, TimeoutError, AttributeError, AssertionError) as error:
        raise BusUnavailable(f"NATS could not be asked: {error!r}") from error
    done, _ = await asyncio.wait([pong], timeout=within_s)
    if not done:
        raise BusUnavailable(f"NATS has not answered a ping within {within_s:g} s")


async def join_log_sink(sink: NatsLogSink, client: Client) -> None:
    """Let ``sink`` publish with ``client`` from now on. Raises what its `subscribe` raises."""

    async def replay(message: Msg) -> None:
        await sink.replay_recent(message.data)

    await client.subscribe(sink.replay_subject, cb=replay)
    sink.open(lambda: client.is_connected, partial(publish_now, client))
