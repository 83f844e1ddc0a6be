"""The client's requests to a stack: over the data plane's links, because nats-py takes longer to import than a command.

Why requests do not use `BusConnection`: it reconnects for ever and logs it; a command must report the failure.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Final, final

from muster.client.requests import AdminReply, NoListeners, NoReply, StackAddress
from serve_common.errors import BadField, BusAuthorizationFailed, BusUnavailable
from serve_common.identities.roles import inbox_prefix
from serve_common.nats.link import Link, open_link
from serve_common.nats.login import build_login
from serve_common.nats.options import BusOptions, PayloadTooLarge
from serve_common.nats.protocol import (
    Greeting,
    Message,
    ServerError,
    encode_headers,
    encode_sub,
    is_no_responders,
    parse_headers,
)

_CONNECT_S: Final = 2.0
_CLOSE_S: Final = 2.0
_PAUSE_S: Final = 0.25
_TOKEN_BYTES: Final = 8


@final
class NatsRequests:
    """Implements `muster.client.requests.Requests`, and the link's `LinkOwner`.

    A lost connection ends the requests under way, so that `AdminClient` sends them again over a new one. A subject
    that NATS forbids is an error at once and not a timeout: NATS does not say which request it was, so all end.
    """

    def __init__(self, address: StackAddress) -> None:
        """Connects at the first request, and again whenever the connection was lost."""
        self._address = address
        self._link: Link | None = None
        self._connect_lock = asyncio.Lock()
        self._inbox_prefix = inbox_prefix(address.role)
        self._inbox = f"{self._inbox_prefix}.{os.urandom(_TOKEN_BYTES).hex()}".encode()
        self._waiting: dict[bytes, asyncio.Future[Message]] = {}
        """Requests without a reply, by the last token of its subject."""
        self._forbidden: str | None = None
        self.greeting: Greeting | None = None
        """What the server last connected to says of itself."""

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
        link, self._link = self._link, None
        self._end_requests(NoReply("the connection to NATS was closed"))
        if link is not None:
            await link.close(_CLOSE_S)

    async def request(
        self, subject: str, body: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> AdminReply:
        """Send one request and wait for its reply, connecting first if needed; errors as in `Requests`."""
        link = await self._connected()
        token = os.urandom(_TOKEN_BYTES).hex().encode()
        reply = self._waiting[token] = asyncio.get_running_loop().create_future()
        block = encode_headers(headers.items()) if headers else None
        try:
            link.publish(subject.encode(), b"%b.%b" % (self._inbox, token), body, block)
            async with asyncio.timeout(timeout_s):
                message = await reply
        except PayloadTooLarge as error:
            size = f"is {len(body)} bytes long; NATS carries at most {link.max_payload}"
            raise BadField("request", size) from error
        except TimeoutError as error:
            raise NoReply(f"nothing came within {timeout_s:g} s") from error
        finally:
            del self._waiting[token]
        if message.headers is None:
            return AdminReply(message.payload)
        if not message.payload and is_no_responders(message.headers):
            raise NoListeners(f"nobody listens on {subject}")
        return AdminReply(message.payload, dict(parse_headers(message.headers)))

    async def _connected(self) -> Link:
        async with self._connect_lock:
            if self._link is None or self._link.has_ended():
                self._link = await self._open_link()
            return self._link

    async def _open_link(self) -> Link:
        settings = self._address.bus_settings(self._inbox_prefix)
        options = BusOptions(
            servers=settings.servers,
            login=build_login(settings),
            user=settings.user,
            password=settings.password,
            name="muster admin client",
            inbox_prefix=settings.inbox_prefix,
            connect_timeout_s=_CONNECT_S,
            tls_ca_file=settings.tls_ca_file,
        )
        failures = []
        for server in options.addresses:
            self._forbidden = None
            try:
                link = await open_link(server, options, self, options.connect_timeout_s)
                link.write(encode_sub(self._inbox + b".*", b"", 1))
                await link.round_trip()
                self.greeting = await link.greeting()
            except BusAuthorizationFailed as error:
                raise BusAuthorizationFailed(self._refusal()) from error
            except BusUnavailable as error:
                failures.append(str(error).removeprefix(f"{server}: "))
                continue
            try:
                self._check_allowed()
            except BusAuthorizationFailed:
                await link.close(_CLOSE_S)
                raise
            return link
        raise BusUnavailable(f"NATS at {self.where} does not answer: {'; '.join(failures)}")

    def _refusal(self) -> str:
        if self._address.identity is not None:
            return f"NATS at {self.where} refused the identity of {self._address.user!r}"
        if self._address.credentials_file is not None:
            return f"NATS at {self.where} refused the credentials in {self._address.credentials_file}"
        credentials_text = (
            "with the password that was given" if self._address.password else "without a password"
        )
        return f"NATS at {self.where} refused the user {self._address.user!r} {credentials_text}"

    def _check_allowed(self) -> None:
        if self._forbidden is not None:
            raise self._forbidden_error()

    def _forbidden_error(self) -> BusAuthorizationFailed:
        return BusAuthorizationFailed(
            f"NATS does not allow {self._address.shown_identity} to do this: {self._forbidden}"
        )

    def take_message(self, message: Message) -> None:
        """Hand a reply to its request; one that comes too late is dropped."""
        reply = self._waiting.get(message.subject.rpartition(b".")[2])
        if reply is not None and not reply.done():
            reply.set_result(message)

    def on_batch_end(self) -> None:
        """Do nothing: each reply has its own request."""

    def on_server_error(self, error: ServerError) -> None:
        """End all requests when NATS forbade a subject."""
        if error.is_permission_violation:
            self._forbidden = error.text
            self._end_requests(self._forbidden_error())

    def on_lame_duck(self, link: Link) -> None:
        """Do nothing: the link ends by itself, and the next request opens another."""

    def on_responsive_again(self, silent_since: float) -> None:
        """Do nothing: a request has a timeout of its own."""

    def on_link_end(self, link: Link) -> None:
        """End the requests under way, unless the link was never used."""
        if link is self._link:
            self._end_requests(NoReply("the connection to NATS was lost"))

    def _end_requests(self, error: Exception) -> None:
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(error)
