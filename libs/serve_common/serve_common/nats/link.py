"""One TCP connection to one NATS server, from its first byte to its end; it never comes back.

Why apart from BusConnection: a link has neither past nor future, so the handling of bytes and pings needs no
thought of reconnects.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast, final

from serve_common.errors import BusAuthorizationFailed, BusUnavailable
from serve_common.nats.options import BusOptions, NatsProtocolError, NotConnected, ServerAddress
from serve_common.nats.outbox import Outbox, SharedSocket
from serve_common.nats.protocol import (
    PING,
    PONG,
    Greeting,
    Message,
    Parser,
    ServerError,
    ServerOp,
    Signal,
    encode_connect,
)

_WRITE_BUFFER_BYTES_MAX: Final = 256 * 1024
"""Where the transport says "pause": small, so that chunks of large bodies do not delay small requests."""

_CLOSED_SILENTLY: Final = (
    "the server closed the connection without a word, as it does when it stops or its client reads too slowly"
)


class LinkOwner(Protocol):
    """Receives a link's events, in the loop's read path: the methods must be quick and must not raise."""

    def take_message(self, message: Message) -> None:
        """A message was received."""

    def on_batch_end(self) -> None:
        """No more messages have come for now."""

    def on_server_error(self, error: ServerError) -> None:
        """The server refused something; it may or may not end the link after this."""

    def on_lame_duck(self, link: Link) -> None:
        """The server is about to shut down (lame duck mode)."""

    def on_responsive_again(self, silent_since: float) -> None:
        """The server responds again, after none since ``silent_since`` (loop's clock); called before the messages."""

    def on_link_end(self, link: Link) -> None:
        """The link cannot be used any more; `link.failure` is why. Called once, and not after `Link.close`."""


@final
class Link(asyncio.Protocol):
    """One connection to one server; made by `open_link`."""

    def __init__(self, owner: LinkOwner, options: BusOptions, loop: asyncio.AbstractEventLoop) -> None:
        self.failure: Exception | None = None
        """Why the link ended; None while it can be used."""
        self.server = ""
        """Its address, for logs."""
        self.max_payload = 0
        """Bytes of headers and payload that the server takes in one message; also set on the outbox."""
        self._owner = owner
        self._take_message: Callable[[Message], None] = owner.take_message
        self._options = options
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._shared: SharedSocket | None = None
        self._parser = Parser()
        self._greeting: Greeting | None = None
        self._greeted = asyncio.Event()
        self._closed = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._outbox = Outbox(loop, options.pending_bytes_max)
        self.publish: Final = self._outbox.publish
        """`Outbox.publish`; an attribute, to save a call."""
        self._pongs: deque[asyncio.Future[None] | None] = deque()
        self._has_received = False
        self._unanswered_pings = 0
        self._pinged_at = 0.0
        self.silent_since: float | None = None
        """Since when the server may have been hanging; None while it responds within `ping_interval_s`."""
        self._keepalive: asyncio.TimerHandle | None = None
        self._last_server_error = ""

    # -- what asyncio calls --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.use_transport(cast("asyncio.Transport", transport))

    def data_received(self, data: bytes) -> None:
        self._has_received = True
        if self.silent_since is not None:
            self._end_silence()
        try:
            ops = self._parser.feed(data)
        except NatsProtocolError as error:
            self.end(error)
            return
        take_message = self._take_message
        for op in ops:
            if type(op) is Message:
                take_message(op)
            else:
                self._take_control(op)
        self._owner.on_batch_end()

    def take_data(self, data: bytes) -> None:
        """Process ``data`` read by another thread; empty means end of file. Calls must not overlap."""
        if self.failure is not None:
            return
        failure: Exception = BusUnavailable(f"connection lost: {self._last_server_error or _CLOSED_SILENTLY}")
        if data:
            self._has_received = True
            try:
                ops = self._parser.feed(data)
            except NatsProtocolError as error:
                failure = error
            else:
                take_message = self._take_message
                for op in ops:
                    if type(op) is Message:
                        take_message(op)
                    else:
                        self._loop.call_soon_threadsafe(self._take_control, op)
                return
        self._loop.call_soon_threadsafe(self.end, failure)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._shared is not None:
            self._shared.shut_down()
        reason = self._last_server_error or str(exc or _CLOSED_SILENTLY)
        self.end(BusUnavailable(f"connection lost: {reason}"))
        self._closed.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # -- from dialling to the end --

    def use_transport(self, transport: asyncio.Transport) -> None:
        """Write through `transport` from now on: at first, and again when TLS was put on top."""
        self._transport = self._outbox.transport = transport
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES_MAX)

    async def greeting(self) -> Greeting:
        """Wait for the server's INFO. Raises NotConnected when the link ends before."""
        await self._greeted.wait()
        self._require_alive()
        assert self._greeting is not None
        return self._greeting

    def start_keepalive(self) -> None:
        """Ping regularly from now on, and end the link when nothing is received for too long."""
        self._pinged_at = self._loop.time()
        self._keepalive = self._loop.call_later(self._options.ping_interval_s, self._ping)

    @property
    def local_host(self) -> str:
        """This end's address; empty before it is connected."""
        name = None if self._transport is None else self._transport.get_extra_info("sockname")
        return str(name[0]) if isinstance(name, tuple) else ""

    def has_ended(self) -> bool:
        """Whether it cannot be used any more."""
        return self.failure is not None

    def end(self, failure: Exception) -> None:
        """Give the link up at once; what was not yet sent is lost."""
        if self.failure is not None:
            return
        self._release(failure)
        if self._transport is None:
            self._closed.set()
        else:
            self._transport.abort()
        self._owner.on_link_end(self)

    async def close(self, timeout_s: float) -> None:
        """Send what was written, then close. After `timeout_s` what the server has not taken is lost."""
        if self.failure is None:
            self._outbox.release()
            self._release(NotConnected("the connection was closed on this side"))
            if self._transport is not None:
                self._transport.close()
        try:
            async with asyncio.timeout(timeout_s):
                await self._closed.wait()
        except TimeoutError:
            if self._transport is not None:
                self._transport.abort()

    # -- from one link to the next, for `Handover` --

    def redirect(self, take_message: Callable[[Message], None]) -> None:
        """Hand messages to ``take_message`` instead of to the owner."""
        self._take_message = take_message

    def set_owner(self, owner: LinkOwner) -> None:
        """Call ``owner`` from now on."""
        self._owner = owner
        self._take_message = owner.take_message

    def buffer_writes(self) -> None:
        """Send what was written so far, and keep what is written from now on, by any thread, until `release`."""
        self._outbox.buffer_writes()

    def release(self) -> None:
        """Send what was kept."""
        self._outbox.release()

    # -- writing --

    @property
    def pending_bytes(self) -> int:
        """Bytes written here that the operating system has not taken yet."""
        return self._outbox.pending_bytes

    def share(self) -> None:
        """Let other threads write too from now on, by `write_shared`; over TLS they cannot."""
        transport = self._transport
        if (
            transport is None
            or self.failure is not None
            or transport.get_extra_info("ssl_object") is not None
        ):
            return
        if transport.get_extra_info("socket") is not None and not transport.get_write_buffer_size():
            limit_bytes = self._options.pending_bytes_max
            self._shared = self._outbox.shared = SharedSocket(
                self._loop, transport, limit_bytes, self._write_left
            )

    @property
    def is_shared(self) -> bool:
        """Whether `write_shared` is possible."""
        return self._shared is not None and self.failure is None

    def write_shared(self, messages: Sequence[bytes]) -> bool:
        """Send whole messages, in pieces, from any thread. False when that is not possible (now)."""
        return self._shared is not None and self._shared.write(messages)

    def detach_reader(self) -> SharedSocket | None:
        """Stop reading, so that another thread reads and calls `take_data`; None where the socket is not shared."""
        if self._shared is None or self._transport is None or self.failure is not None:
            return None
        self._transport.pause_reading()
        return self._shared

    def write(self, line: bytes) -> None:
        """Put a line of the protocol into this iteration's batch; after the end, do nothing."""
        if self.failure is None:
            self._outbox.write(line)

    async def wait_writable(self) -> None:
        """Wait until the server took most of what was written. Raises NotConnected when the link ends."""
        await self._writable.wait()
        self._require_alive()

    async def round_trip(self) -> None:
        """Wait until the server has handled all that was written before.

        Raises NotConnected when the link ends.
        """
        waiter = self._loop.create_future()
        self._pongs.append(waiter)
        self.write(PING)
        self._require_alive()
        await waiter
        self._require_alive()

    def _write_left(self) -> None:
        if self.failure is None and self._shared is not None:
            self._shared.write_on_loop([])

    # -- reading --

    def _take_control(self, op: ServerOp) -> None:
        match op:
            case Signal.PING:
                self.write(PONG)
            case Signal.PONG:
                waiter = self._pongs.popleft() if self._pongs else None
                if waiter is not None and not waiter.done():
                    waiter.set_result(None)
            case Greeting():
                self._greeting = op
                self.max_payload = self._outbox.max_payload = op.max_payload
                self._greeted.set()
                if op.lame_duck:
                    self._owner.on_lame_duck(self)
            case ServerError():
                self._take_server_error(op)
            case Signal.OK | Message():
                pass

    def _take_server_error(self, error: ServerError) -> None:
        if error.is_authorization_failure:
            self.end(BusAuthorizationFailed(f"the server says: {error.text}"))
            return
        self._last_server_error = "" if error.is_permission_violation else error.text
        self._owner.on_server_error(error)

    # -- ending --

    def _ping(self) -> None:
        is_silent = bool(self._pongs) and not self._has_received
        self._unanswered_pings = self._unanswered_pings + 1 if is_silent else 0
        if self._unanswered_pings >= self._options.outstanding_pings_max:
            self.end(BusUnavailable(f"the server did not answer {self._unanswered_pings} pings"))
            return
        self._check_silence(is_silent=is_silent)
        self._has_received = False
        self._pongs.append(None)
        self.write(PING)
        self.start_keepalive()

    def _check_silence(self, *, is_silent: bool) -> None:
        interval_s = self._options.ping_interval_s
        if not is_silent:
            self._end_silence()
        elif self.silent_since is None and self._loop.time() - self._pinged_at < 1.5 * interval_s:
            # Later than that, this loop itself was blocked, and the response may have arrived.
            self.silent_since = self._pinged_at - interval_s

    def _end_silence(self) -> None:
        since, self.silent_since = self.silent_since, None
        if since is not None:
            self._owner.on_responsive_again(since)

    def _require_alive(self) -> None:
        if self.failure is not None:
            raise NotConnected(str(self.failure)) from self.failure

    def _release(self, failure: Exception) -> None:
        self.failure = failure
        if self._keepalive is not None:
            self._keepalive.cancel()
        if self._shared is not None:
            self._shared.close()
        self._outbox.clear()
        for waiter in self._pongs:
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        self._pongs.clear()
        self._greeted.set()
        self._writable.set()


async def open_link(address: ServerAddress, options: BusOptions, owner: LinkOwner, timeout_s: float) -> Link:
    """Open a link to `address`, with credentials that the server has accepted.

    Raises BusAuthorizationFailed when it refuses them, and BusUnavailable for failures that may be temporary.
    """
    link = Link(owner, options, asyncio.get_running_loop())
    try:
        async with asyncio.timeout(timeout_s):
            await _shake_hands(link, address, options)
    except TimeoutError as error:
        link.end(error)
        raise BusUnavailable(f"{address}: no answer within {timeout_s:.2g} s") from error
    except Exception as error:  # an unexpected error must not stop a client from dialling
        link.end(error)
        if isinstance(link.failure, BusAuthorizationFailed):
            raise BusAuthorizationFailed(f"{address}: {link.failure}") from error
        raise BusUnavailable(f"{address}: {error}") from error
    except BaseException:
        link.end(BusUnavailable("dialling was given up"))
        raise
    link.server = str(address)
    link.start_keepalive()
    return link


async def _shake_hands(link: Link, address: ServerAddress, options: BusOptions) -> None:
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(lambda: link, address.host, address.port)
    if address.is_tls and options.tls_first:
        await _secure(link, transport, address, options)
        greeting = await link.greeting()
    else:
        greeting = await link.greeting()
        _check_tls(address, greeting)
        if address.is_tls:
            await _secure(link, transport, address, options)
    login = options.login_fields(greeting.nonce)
    link.write(encode_connect(name=options.name, login=login, tls_required=address.is_tls))
    await link.round_trip()


async def _secure(
    link: Link, transport: asyncio.Transport, address: ServerAddress, options: BusOptions
) -> None:
    authorities = ssl.create_default_context(cafile=options.tls_ca_file)
    loop = asyncio.get_running_loop()
    secure = await loop.start_tls(transport, link, authorities, server_hostname=address.host)
    if secure is None:
        raise BusUnavailable("the connection was lost in the TLS handshake")
    link.use_transport(secure)


def _check_tls(address: ServerAddress, greeting: Greeting) -> None:
    # Credentials must never leave in the clear when TLS was asked for.
    if address.is_tls and not (greeting.tls_required or greeting.tls_available):
        raise BusUnavailable("the server does not offer TLS")
    if greeting.tls_required and not address.is_tls:
        raise BusUnavailable("the server requires TLS; use a tls:// URL")
