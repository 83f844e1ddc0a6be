"""One TCP connection to one NATS server, from its first byte to its end; it never comes back.

Why apart from BusConnection: a link has neither past nor future, so the handling of bytes, pings and
batches needs no thought of reconnects. What is written in one iteration of the loop leaves in one system
call: measured, that is where most of the throughput comes from.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol, cast, final

from serve_common.bus.errors import NotConnected, OutboundFull, PayloadTooLarge, ProtocolError
from serve_common.bus.options import BusOptions
from serve_common.bus.protocol import (
    CRLF,
    PING,
    PONG,
    Greeting,
    Message,
    Parser,
    ServerError,
    ServerOp,
    Signal,
    encode_hpub_line,
    encode_pub,
    encode_pub_line,
)
from serve_common.bus.shared_socket import SharedSocket
from serve_common.errors import BusAuthorizationFailed, BusUnavailable

_BATCH_BYTES_MAX: Final = 256 * 1024
"""A batch this large is written at once: waiting for more would only hide that the server is slow."""
_SMALL_BYTES_MAX: Final = 4 * 1024
"""Payloads up to this become one piece with their line: copying them costs less than handling three pieces."""
_COPY_BYTES_MAX: Final = 32 * 1024
"""Payloads up to this are copied into the batch's one buffer; larger ones are handed over as they are."""
_WRITE_BUFFER_BYTES_MAX: Final = 256 * 1024
"""Where the transport says "pause": small, so that chunks of large bodies do not delay small requests."""

_CLOSED_WORDLESSLY: Final = (
    "the server closed the connection without a word, as it does when it stops or its client reads too slowly"
)


class LinkOwner(Protocol):
    """Who a link tells what it hears, in the loop's read path: these must be quick and must not raise."""

    def take_message(self, message: Message) -> None:
        """A message came."""

    def take_pause(self) -> None:
        """No more messages have come for now."""

    def take_server_error(self, text: str) -> None:
        """The server refused something; it may or may not end the link after this."""

    def take_lame_duck(self, link: Link) -> None:
        """The server is about to leave."""

    def take_end(self, link: Link) -> None:
        """The link cannot be used any more, see `link.failure`. Comes once, and not after `Link.close`."""


@final
class Link(asyncio.Protocol):
    """One connection to one server; made by `dial.open_link`."""

    def __init__(self, owner: LinkOwner, options: BusOptions, loop: asyncio.AbstractEventLoop) -> None:
        self.failure: Exception | None = None
        """Why the link ended; None while it can be used."""
        self.server = ""
        """Its address, for logs."""
        self.max_payload = 0
        """Bytes of headers and payload that the server takes in one message."""
        self._owner = owner
        self._take_message = owner.take_message
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
        self._batch: list[bytes] = []
        self._batch_bytes = 0
        self._batch_room = 0
        """Bytes that the batch may reach before the limit of those that wait is exceeded; valid while it has any."""
        self._is_batch_copied = True
        self._pongs: deque[asyncio.Future[None] | None] = deque()
        self._has_heard = False
        self._unheard_pings = 0
        self._keepalive: asyncio.TimerHandle | None = None
        self._last_server_error = ""

    # -- what asyncio calls --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.use_transport(cast("asyncio.Transport", transport))

    def data_received(self, data: bytes) -> None:
        self._has_heard = True
        try:
            ops = self._parser.feed(data)
        except ProtocolError as error:
            self.end(error)
            return
        take_message = self._take_message
        for op in ops:
            if type(op) is Message:
                take_message(op)
            else:
                self._take_control(op)
        self._owner.take_pause()

    def take_data(self, data: bytes) -> None:
        """What another thread has read; calls of this must not overlap. It was an end when ``data`` is empty."""
        if self.failure is not None:
            return
        failure: Exception = BusUnavailable(
            f"connection lost: {self._last_server_error or _CLOSED_WORDLESSLY}"
        )
        if data:
            self._has_heard = True
            try:
                ops = self._parser.feed(data)
            except ProtocolError as error:
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
        reason = self._last_server_error or str(exc or _CLOSED_WORDLESSLY)
        self.end(BusUnavailable(f"connection lost: {reason}"))
        self._closed.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # -- from dialling to the end --

    def use_transport(self, transport: asyncio.Transport) -> None:
        """Write through `transport` from now on: at first, and again when TLS was put on top."""
        self._transport = transport
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES_MAX)

    async def greeting(self) -> Greeting:
        """What the server said first. Raises NotConnected when the link ends before."""
        await self._greeted.wait()
        self._require_alive()
        assert self._greeting is not None
        return self._greeting

    def start_keepalive(self) -> None:
        """Ping regularly from now on, and end the link when nothing is heard for too long."""
        self._keepalive = self._loop.call_later(self._options.ping_interval_s, self._ping)

    def end(self, failure: Exception) -> None:
        """Give the link up at once; what was not yet sent is lost."""
        if self.failure is not None:
            return
        self._release(failure)
        if self._transport is None:
            self._closed.set()
        else:
            self._transport.abort()
        self._owner.take_end(self)

    async def close(self, timeout_s: float) -> None:
        """Send what was written, then close. After `timeout_s` what the server has not taken is lost."""
        if self.failure is None:
            self._flush()
            self._write_left()
            self._release(NotConnected("the connection was closed on this side"))
            if self._transport is not None:
                self._transport.close()
        try:
            async with asyncio.timeout(timeout_s):
                await self._closed.wait()
        except TimeoutError:
            if self._transport is not None:
                self._transport.abort()

    # -- writing --

    @property
    def pending_bytes(self) -> int:
        """Bytes written here that the operating system has not taken yet."""
        assert self._transport is not None
        return self._batch_bytes + self._transport.get_write_buffer_size()

    def publish(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        """Put a message into this iteration's batch. Errors as for `BusConnection.publish`."""
        size_bytes = len(payload)
        if headers is not None or size_bytes > _SMALL_BYTES_MAX:
            self._publish_in_pieces(subject, reply, payload, headers)
            return
        message = encode_pub(subject, reply, payload)
        if size_bytes > self.max_payload:
            raise self._too_large(size_bytes)
        batch = self._batch
        is_first = not batch
        if is_first:
            self._measure_room()
        total_bytes = self._batch_bytes + len(message)
        if total_bytes > self._batch_room:
            raise self._full()
        if is_first:
            self._loop.call_soon(self._flush)
        batch.append(message)
        self._batch_bytes = total_bytes
        if total_bytes >= _BATCH_BYTES_MAX:
            self._flush()

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
            self._shared = SharedSocket(self._loop, transport, limit_bytes, self._write_left)

    @property
    def is_shared(self) -> bool:
        """Whether `write_shared` is possible."""
        return self._shared is not None and self.failure is None

    def write_shared(self, messages: Sequence[bytes]) -> bool:
        """Send whole messages, in pieces, from any thread. False when that is not possible (now)."""
        return self._shared is not None and self._shared.write(messages)

    def lend(self) -> SharedSocket | None:
        """Leave reading to others, who hand everything to `take_data`; None where the socket is not shared."""
        if self._shared is None or self._transport is None or self.failure is not None:
            return None
        self._transport.pause_reading()
        return self._shared

    def write(self, line: bytes) -> None:
        """Put a line of the protocol into this iteration's batch; after the end, do nothing."""
        if self.failure is None:
            if not self._batch:
                self._measure_room()
            self._append((line,), len(line))

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

    def _publish_in_pieces(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        size_bytes = len(payload)
        if headers is None:
            line = encode_pub_line(subject, reply, size_bytes)
            pieces: tuple[bytes, ...] = (line, payload, CRLF)
        else:
            line = encode_hpub_line(subject, reply, len(headers), size_bytes)
            size_bytes += len(headers)
            pieces = (line, headers, payload, CRLF)
        if size_bytes > self.max_payload:
            raise self._too_large(size_bytes)
        if not self._batch:
            self._measure_room()
        if self._batch_bytes + size_bytes > self._batch_room:
            raise self._full()
        if size_bytes > _COPY_BYTES_MAX:
            self._is_batch_copied = False
        self._append(pieces, len(line) + size_bytes + 2)

    def _too_large(self, size_bytes: int) -> PayloadTooLarge:
        return PayloadTooLarge(f"message of {size_bytes} bytes: the server takes at most {self.max_payload}")

    def _full(self) -> OutboundFull:
        return OutboundFull(f"{self.pending_bytes} bytes wait for the server to take them")

    def _measure_room(self) -> None:
        # At a batch's beginning: what waits below only shrinks until it leaves, and asking for each message is dear.
        assert self._transport is not None
        self._batch_room = self._options.pending_bytes_max - self._transport.get_write_buffer_size()

    def _append(self, pieces: tuple[bytes, ...], size_bytes: int) -> None:
        if not self._batch:
            self._loop.call_soon(self._flush)
        self._batch += pieces
        self._batch_bytes += size_bytes
        if self._batch_bytes >= _BATCH_BYTES_MAX:
            self._flush()

    def _flush(self) -> None:
        if not self._batch or self._transport is None:
            return
        pieces, is_copied = self._batch, self._is_batch_copied
        self._batch, self._batch_bytes, self._is_batch_copied = [], 0, True
        if self._shared is not None:
            self._shared.write_on_loop([b"".join(pieces)] if is_copied and len(pieces) > 1 else pieces)
        elif is_copied:
            self._transport.write(b"".join(pieces) if len(pieces) > 1 else pieces[0])
        else:
            self._transport.writelines(pieces)

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
                self.max_payload = op.max_payload
                self._greeted.set()
                if op.lame_duck:
                    self._owner.take_lame_duck(self)
            case ServerError(text):
                self._take_server_error(text)
            case Signal.OK | Message():
                pass

    def _take_server_error(self, text: str) -> None:
        words = text.lower()
        is_permission = words.startswith("permissions violation")
        if not is_permission and "timeout" not in words and "auth" in words:
            self.end(BusAuthorizationFailed(f"the server says: {text}"))
            return
        self._last_server_error = "" if is_permission else text
        self._owner.take_server_error(text)

    # -- ending --

    def _ping(self) -> None:
        is_silent = bool(self._pongs) and not self._has_heard
        self._unheard_pings = self._unheard_pings + 1 if is_silent else 0
        if self._unheard_pings >= self._options.outstanding_pings_max:
            self.end(BusUnavailable(f"the server did not answer {self._unheard_pings} pings"))
            return
        self._has_heard = False
        self._pongs.append(None)
        self.write(PING)
        self.start_keepalive()

    def _require_alive(self) -> None:
        if self.failure is not None:
            raise NotConnected(str(self.failure)) from self.failure

    def _release(self, failure: Exception) -> None:
        self.failure = failure
        if self._keepalive is not None:
            self._keepalive.cancel()
        if self._shared is not None:
            self._shared.close()
        self._batch.clear()
        self._batch_bytes = 0
        for waiter in self._pongs:
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        self._pongs.clear()
        self._greeted.set()
        self._writable.set()
