"""nats-py with what a service needs: visible reconnects, a reliable ping, and log forwarding.

Used for the control plane; the data plane has `serve_common.nats.connection`.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from serve_common.errors import BadField, BusAuthorizationFailed, BusUnavailable, ServeError
from serve_common.nats.login import build_login
from serve_common.nats.options import Login
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.settings import BusSettings
from serve_common.runtime.tasks import TaskOwner, cancellations, raise_if_cancelled
from serve_common.telemetry.log_forwarder import LogForwarder, recalled
from serve_common.telemetry.log_lines import RateLimitedLogger

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
    on_disconnect: Callable[[], None] = lambda: None,
    on_reconnect: Callable[[], None] = lambda: None,
    on_closed: Callable[[], None] = lambda: None,
) -> Client:
    """Connect with ``login`` or else as ``settings`` say; the connection reconnects for ever.

    Tries for ``deadline_s`` seconds; then raises `BusUnavailable`. Raises `BusAuthorizationFailed` at once when the
    user is refused. ``on_closed`` is called when the connection is closed, which the library also does by itself
    when it is refused for good: the process should then exit, to be restarted.
    """
    login = login or build_login(settings)
    events = _ConnectionEvents(
        name, on_disconnect=on_disconnect, on_reconnect=on_reconnect, on_closed=on_closed
    )
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
                raise BusUnavailable(f"NATS at {servers} does not answer: {error!r}") from error
            await asyncio.sleep(_PAUSE_S)
            continue
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
        self._log.warning("nats_error", error=str(error) or type(error).__name__)

    async def reconnected(self) -> None:
        """Library callback."""
        self._log.info("nats_reconnected")
        self._on_reconnect()

    async def disconnected(self) -> None:
        """Library callback."""
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
    """Close a client in bounded time. While NATS is unreachable the library raises here; that is only logged."""
    subscriptions = list(client._subs.values())  # noqa: SLF001 - closing empties it
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await client.close()
    except (NatsError, OSError, TimeoutError) as error:
        _log.debug("nats_not_closed", error=repr(error))
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


async def ping_nats(client: Client, within_s: float) -> None:
    """Return once NATS has answered. Raises `BusUnavailable` when it has not ``within_s`` seconds later.

    Why not the library's ``flush``: on a timeout it cancels its own future, and an answer that comes later then ends
    the connection's reader without any error; once that reader has ended, ``flush`` reports success.
    """
    answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    try:
        async with asyncio.timeout(within_s):
            await client._send_ping(answered)  # noqa: SLF001 - the library has no other way
    except (NatsError, OSError, RuntimeError, TimeoutError, AttributeError, AssertionError) as error:
        raise BusUnavailable(f"NATS could not be asked: {error!r}") from error
    done, _ = await asyncio.wait([answered], timeout=within_s)
    if not done:
        raise BusUnavailable(f"NATS has not answered a ping within {within_s:g} s")


_PUBLISHES_MAX: Final = 16
"""Concurrent publishes of log lines."""
_CLOSE_TIMEOUT_S: Final = 1.0


@final
class NatsClientLogSink:
    """A `LogSink` that publishes on the event loop on which it was created."""

    def __init__(
        self,
        forwarder: LogForwarder,
        subjects: Subjects,
        kind: str,
        process_id: str,
        of_others: Callable[[], list[bytes]] = list,
    ) -> None:
        """Publishes nothing before `join`. ``of_others`` returns recent lines of other processes, kept by this one."""
        self._of_others = of_others
        self._forwarder = forwarder
        self._subjects = subjects
        self._kind = kind
        self._subject = subjects.log(kind, process_id)
        self._loop = asyncio.get_running_loop()
        self._tasks = TaskOwner("logs")
        self._client: Client | None = None
        self._refused = RateLimitedLogger(_log.warning)

    async def join(self, client: Client) -> None:
        """Publish with ``client`` from now on. Raises what its `subscribe` raises."""
        await client.subscribe(self._subjects.log_recall, cb=self._recall)
        self._client = client
        self._forwarder.use(self)

    def publish(self, piece: bytes, lines: int) -> bool:
        client = self._client
        if client is None or not client.is_connected or len(self._tasks) >= _PUBLISHES_MAX:
            return False
        try:
            self._loop.call_soon_threadsafe(self._start, client, piece, lines)
        except RuntimeError:  # the loop is closed: the process ends
            return False
        return True

    async def close(self) -> None:
        """Publish the lines that wait, and none after that."""
        self._forwarder.flush()
        self._forwarder.use(None)
        await asyncio.sleep(0)  # the tasks just scheduled start
        await self._tasks.close(_CLOSE_TIMEOUT_S)

    def _start(self, client: Client, piece: bytes, lines: int) -> None:
        self._tasks.start(self._send(client, piece, lines), "publish")

    async def _send(self, client: Client, piece: bytes, lines: int) -> None:
        try:
            await client.publish(self._subject, piece)
        except (NatsError, OSError):
            self._forwarder.count_lost(lines)

    async def _recall(self, message: Msg) -> None:
        client = self._client
        if client is None:
            return
        try:
            recent = [*self._of_others(), *self._forwarder.recent()]
            for subject, piece in recalled(message.data, self._kind, recent, self._subjects):
                await client.publish(subject, piece)
        except (BadField, NatsError, OSError) as error:
            self._refused.log(time.monotonic(), "logs_not_recalled", reason=str(error))
