"""The client's connection to a stack over nats-py: requests that fail at once, and feeds that reconnect.

Why requests do not use `connect_nats`: a service reconnects forever and logs it; a command must report the failure.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, final

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError, NoRespondersError

from muster.client.requests import AdminReply, FeedMessage, NoListeners, NoReply, StackAddress
from serve_common.errors import BadField, BusAuthorizationFailed, BusUnavailable
from serve_common.identities.roles import Role, inbox_prefix
from serve_common.nats.client import close_nats, connect_nats, login_arguments
from serve_common.nats.login import build_login
from serve_common.runtime.tasks import cancellations, raise_if_cancelled

_CONNECT_S: Final = 5.0
_FLUSH_S: Final = 5
_WAITING_MAX: Final = 10_000
"""Most messages that wait to be read; beyond that the oldest are dropped."""


@final
class NatsFeed:
    """Implements `muster.client.requests.Feed`; reconnects by itself."""

    def __init__(self, address: StackAddress) -> None:
        """Connects in `open`."""
        self._address = address
        self._client: Client | None = None
        self._queue: deque[FeedMessage] = deque(maxlen=_WAITING_MAX)
        self._arrived = asyncio.Event()

    async def open(self, subjects: Sequence[str]) -> None:
        """Connect and subscribe. Raises `BusUnavailable` and `BusAuthorizationFailed`."""
        address = self._address
        settings = address.bus_settings(inbox_prefix(Role.ADMIN))
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
        return self._queue.popleft()

    async def publish(self, subject: str, payload: bytes) -> None:
        """Publish a message. Raises `BusUnavailable`."""
        assert self._client is not None, "open comes first"
        try:
            await self._client.publish(subject, payload)
        except (NatsError, OSError) as error:
            raise BusUnavailable(f"NATS at {self._address.where} failed: {error!r}") from error

    async def _on_message(self, message: Msg) -> None:
        self._queue.append(FeedMessage(message.subject, message.data))
        self._arrived.set()


_REQUEST_CONNECT_S: Final = 2
_PAUSE_S: Final = 0.25
_INBOX_PREFIX: Final = inbox_prefix(Role.ADMIN)
"""Inbox that other roles may reply to and only admins may read."""


class NatsRequests:
    """Implements `muster.client.requests.Requests`.

    A lost connection ends the requests under way, so that `AdminClient` sends them again over a new one. A subject
    that NATS forbids is an error at once and not a timeout: nats-py reports it only to the error callback, and the
    request would go on waiting.
    """

    def __init__(self, address: StackAddress) -> None:
        """Connects at the first request, and again whenever the connection was lost."""
        self._address = address
        self._client: Client | None = None
        self._connect_lock = asyncio.Lock()
        self._limits: set[asyncio.Timeout] = set()
        self._forbidden: str | None = None
        self._last_error: Exception | None = None

    @property
    def where(self) -> str:
        """The URLs of NATS, without passwords."""
        return self._address.where

    async def connect(self, *, within_s: float, on_retry: Callable[[str], None] = lambda _why: None) -> None:
        """Retry for ``within_s`` until connected. Raises `BusUnavailable` or `BusAuthorizationFailed`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        while True:
            try:
                await self._connected()
                return
            except BusUnavailable as error:
                if loop.time() + _PAUSE_S >= deadline:
                    raise
                on_retry(str(error))
            await asyncio.sleep(_PAUSE_S)

    async def close(self) -> None:
        """Disconnect; requests under way end with `NoReply`."""
        client, self._client = self._client, None
        if client is not None:
            await close_nats(client)
            self._end_requests()  # a client that was closing already may have been stopped before its callback

    async def request(
        self, subject: str, body: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> AdminReply:
        """Send one request and wait for its reply, connecting first if needed; errors as in `Requests`."""
        client = await self._connected()
        self._forbidden = None
        limit, cancelled = asyncio.timeout(timeout_s), cancellations()
        try:
            async with limit:
                self._limits.add(limit)
                # The library's own timeout must not fire first: its error has no reason.
                message = await client.request(
                    subject, body, timeout=timeout_s + 60, headers=dict(headers) if headers else None
                )
        except NoRespondersError as error:
            raise NoListeners(f"nobody listens on {subject}") from error
        except MaxPayloadError as error:
            size = f"is {len(body)} bytes long; NATS carries at most {client.max_payload}"
            raise BadField("request", size) from error
        except (NatsError, OSError, TimeoutError) as error:
            if self._forbidden is not None:
                raise BusAuthorizationFailed(
                    f"NATS does not allow {self._address.identity} to do this: {self._forbidden}"
                ) from error
            if not client.is_connected:
                raise NoReply("the connection to NATS was lost") from error
            if isinstance(error, TimeoutError):
                raise NoReply(f"nothing came within {timeout_s:g} s") from error
            raise BusUnavailable(f"NATS at {self.where} failed: {error}") from error
        finally:
            self._limits.discard(limit)
        raise_if_cancelled(cancelled)  # callers retry in a loop
        return AdminReply(message.data, message.headers or {})

    async def _connected(self) -> Client:
        async with self._connect_lock:
            if self._client is not None and not self._client.is_connected:
                await self.close()
            if self._client is None:
                self._client = await self._open_connection()
            return self._client

    async def _open_connection(self) -> Client:
        address = self._address
        settings = address.bus_settings(_INBOX_PREFIX)
        client = Client()
        self._last_error = None
        cancelled = cancellations()
        try:
            tls = ssl.create_default_context(cafile=address.tls_ca_file) if address.tls_ca_file else None
            async with asyncio.timeout(2 * _REQUEST_CONNECT_S):
                await client.connect(
                    servers=settings.servers,
                    **login_arguments(build_login(settings), settings.user, settings.password),
                    name="muster admin client",
                    inbox_prefix=settings.inbox_prefix.encode(),
                    tls=tls,
                    connect_timeout=_REQUEST_CONNECT_S,
                    allow_reconnect=False,
                    # With 0 or less the library would retry forever without an error.
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    ping_interval=5,
                    max_outstanding_pings=2,
                    error_cb=self._on_error,
                    closed_cb=self._on_closed,
                )
        except (NatsError, OSError, TimeoutError, asyncio.CancelledError) as error:
            await close_nats(client)
            raise_if_cancelled(cancelled)  # the library may have raised another error for it
            if "authorization" in f"{error} {self._last_error}".lower():
                raise BusAuthorizationFailed(self._refusal()) from error
            reason = str(self._last_error or error) or type(error).__name__
            raise BusUnavailable(f"NATS at {self.where} does not answer: {reason}") from error
        return client

    def _refusal(self) -> str:
        if self._address.credentials_file is not None:
            return f"NATS at {self.where} refused the credentials in {self._address.credentials_file}"
        credentials_text = (
            "with the password that was given" if self._address.password else "without a password"
        )
        return f"NATS at {self.where} refused the user {self._address.user!r} {credentials_text}"

    async def _on_error(self, error: Exception) -> None:
        self._last_error = error
        if "permissions violation" in str(error).lower():
            self._forbidden = str(error).removeprefix("nats: ")
            self._end_requests()

    async def _on_closed(self) -> None:
        self._end_requests()

    def _end_requests(self) -> None:
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(now)
