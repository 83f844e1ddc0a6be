"""The data plane's connection to NATS: stays connected, renews its subscriptions, matches replies to requests."""

from __future__ import annotations

import asyncio
import functools
import os
import random
from collections.abc import Callable, Sequence
from typing import Final, Protocol, final

import structlog

from serve_common.errors import BusAuthorizationFailed, BusUnavailable
from serve_common.nats.dialing import BufferingLinkOwner, Dialer, Handover
from serve_common.nats.link import Link
from serve_common.nats.options import BusOptions, InboxFull, Login, NotConnected, reconnect_wait_s
from serve_common.nats.protocol import (
    MessageCallback,
    ServerError,
    Subscription,
    Subscriptions,
    check_subject,
    is_no_responders,
)
from serve_common.runtime.tasks import TaskOwner
from serve_common.telemetry.log_lines import RateLimitedLogger

_log = structlog.get_logger(__name__)

_CLOSE_TIMEOUT_S: Final = 1.0


class LinkReader(Protocol):
    """Reads from links in another thread."""

    def attach(self, link: Link) -> None:
        """Read from ``link`` from now on, if its reader can be detached."""

    def detach(self) -> None:
        """Stop reading from the link of the last `attach`."""


@final
class BusConnection:
    """One connection to the bus, for use from one event loop.

    `on_connected` and `on_disconnected` hold functions to be called at each (re)connect, after
    subscriptions were sent, and at each loss. They run in the read path, as callbacks do; `close` calls
    neither.

    Why nothing is buffered while disconnected: a message that leaves seconds late does harm, because its caller has
    given up or tried another replica. So `publish` fails at once, and the caller decides.
    """

    def __init__(self, options: BusOptions, rng: random.Random) -> None:
        """`rng` spreads the waits between reconnects."""
        self.on_connected: Final[list[Callable[[], None]]] = []
        self.on_disconnected: Final[list[Callable[[], None]]] = []
        self.on_bus_responds_again: Final[list[Callable[[float], None]]] = []
        """Called when the bus responds again after it did not for `ping_interval_s`, or was disconnected (then after
        `on_connected`), with the loop's time since when nothing may have come through."""
        self.after_messages: Callable[[], None] | None = None
        """Called in the read path when all messages of one read were delivered."""
        self.reader: LinkReader | None = None
        """Reads in place of the loop, where links can be shared."""
        self.reconnects = 0
        """How often the connection was re-established."""
        self.permission_violations = 0
        """How many publishes and subscriptions the server refused."""
        self._options = options
        self._rng = rng
        self._link: Link | None = None
        self._linked_at_s = 0.0
        self._disconnected_since: float | None = None
        """Set while there is no link."""
        self._is_started = False
        self._is_closed = False
        self._subscriptions = Subscriptions(self._write, self._flush_quietly, self._log_failure)
        self.take_message: Final = self._subscriptions.take_message
        """Implements `LinkOwner`; an attribute, to save a call."""
        self._link_ended = asyncio.Event()
        self._tasks = TaskOwner("bus")
        self._log = _log.bind(bus=options.name)
        self._failed_callbacks = RateLimitedLogger(self._log.error)
        self._server_errors = RateLimitedLogger(self._log.warning)
        self._dialer = Dialer(self, options, rng)
        self._is_renewing = False

    # -- life --

    async def connect(self, timeout_s: float) -> None:
        """Connect for the first time, trying for up to `timeout_s`; afterwards it stays connected by itself.

        Raises BusAuthorizationFailed at once when a server refuses the credentials, BusUnavailable (which
        names the last failure) when the time is over.
        """
        if self._is_started:
            raise RuntimeError("connect succeeds once")
        link = await self._dialer.dial(timeout_s)
        if self._is_closed:
            await link.close(_CLOSE_TIMEOUT_S)
            raise NotConnected("the connection was closed on this side")
        self._is_started = True
        self._adopt(link)
        self._tasks.start(self._stay_connected(), "stay_connected")
        if self._options.login is not None and self._options.login.renew_in_s() is not None:
            self._tasks.start(self._stay_logged_in(self._options.login), "stay_logged_in")

    async def renew(self) -> bool:
        """Log in again without losing or reordering anything (`Handover`). False when that failed.

        Then the old link stays in use until the server ends it; a link lost meanwhile is replaced as usual.
        """
        old = self._link
        if old is None or self._is_renewing:
            return False
        self._is_renewing = True
        try:
            return await self._move_from(old)
        except (BusUnavailable, BusAuthorizationFailed, TimeoutError) as error:
            self._log.warning("bus_not_renewed", error=str(error) or type(error).__name__)
            return False
        finally:
            self._is_renewing = False

    async def close(self) -> None:
        """Send what was published, for at most a second, and disconnect for good. May be called twice."""
        self._is_closed = True
        await self._tasks.close(_CLOSE_TIMEOUT_S)
        self._subscriptions.clear()
        link, self._link = self._link, None
        if self.reader is not None:
            self.reader.detach()
        if link is not None:
            await link.close(_CLOSE_TIMEOUT_S)

    # -- state --

    @property
    def is_connected(self) -> bool:
        """True while publishing is possible."""
        return self._link is not None

    @property
    def is_responding(self) -> bool:
        """False while disconnected, and while the server has not answered for `ping_interval_s` and more."""
        link = self._link
        return link is not None and link.silent_since is None

    @property
    def max_payload(self) -> int:
        """Bytes of headers and payload that the server takes in one message; 0 while disconnected."""
        return self._link.max_payload if self._link is not None else 0

    @property
    def pending_bytes(self) -> int:
        """Bytes published that the operating system has not taken yet; for any thread."""
        link = self._link
        return link.pending_bytes if link is not None else 0

    @property
    def local_host(self) -> str:
        """This end's address of the connection to NATS; empty while disconnected."""
        return "" if self._link is None else self._link.local_host

    @property
    def inbox_prefix(self) -> bytes:
        """First tokens of the subjects on which this user may receive replies."""
        return self._options.inbox_prefix.encode()

    # -- messages --

    def publish(
        self, subject: str | bytes, payload: bytes, reply: bytes = b"", headers: bytes | None = None
    ) -> None:
        """Write a message; it leaves with all others of this iteration of the loop. Sent at most once.

        `headers` is a block made by `encode_headers`. Raises NotConnected, OutboundFull, PayloadTooLarge or
        InvalidSubject; after each of them nothing was sent.
        """
        link = self._link
        if link is None:
            raise NotConnected("not connected to the bus")
        link.publish(subject.encode() if isinstance(subject, str) else subject, reply, payload, headers)

    @property
    def can_write_shared(self) -> bool:
        """Whether `write_shared` is possible now: needs `BusOptions.is_shared` and a connection without TLS."""
        link = self._link
        return link is not None and link.is_shared

    def write_shared(self, messages: Sequence[bytes]) -> bool:
        """Send whole messages, in pieces as of `encode_pub`, from any thread. False when nothing was sent."""
        link = self._link
        return link is not None and link.write_shared(messages)

    def subscribe(
        self, subject: str | bytes, callback: MessageCallback, queue: str | bytes = b""
    ) -> Subscription:
        """Call `callback` with each message, in order of arrival, from now on and after every reconnect.

        Of all members of a `queue` group one gets each message. May be called while disconnected. To know
        that the server has taken it, await `flush`. Raises InvalidSubject; NotConnected after `close`.
        """
        if self._is_closed:
            raise NotConnected("the connection was closed on this side")
        subject = subject.encode() if isinstance(subject, str) else subject
        queue = queue.encode() if isinstance(queue, str) else queue
        return self._subscriptions.add(subject, queue, callback)

    async def flush(self, timeout_s: float) -> None:
        """Wait until the server has handled all that was published and subscribed. Not for hot paths.

        Raises BusUnavailable when the connection is lost or `timeout_s` pass.
        """
        link = self._link
        if link is None:
            raise NotConnected("not connected to the bus")
        try:
            async with asyncio.timeout(timeout_s):
                await link.round_trip()
        except TimeoutError as error:
            raise BusUnavailable(f"the server did not answer a flush within {timeout_s} s") from error

    async def wait_writable(self) -> None:
        """Wait while the server takes bytes slower than they are published. Raises NotConnected on a loss."""
        link = self._link
        if link is None:
            raise NotConnected("not connected to the bus")
        await link.wait_writable()

    # -- callbacks of the link (LinkOwner) --

    def on_batch_end(self) -> None:
        """Run `after_messages`: a burst of messages has been delivered."""
        if self.after_messages is not None:
            self.after_messages()

    def on_server_error(self, error: ServerError) -> None:
        """Count and log a refusal that does not end the link by itself."""
        if error.is_permission_violation:
            self.permission_violations += 1
        self._server_errors.log(asyncio.get_running_loop().time(), "bus_server_error", error=error.text)

    def on_lame_duck(self, link: Link) -> None:
        """Move to another server when there is one; else stay until this one is gone."""
        has_other = len(self._options.servers) > 1
        self._log.warning("bus_server_leaves", moves_on=has_other)
        if has_other and link is self._link:
            link.end(BusUnavailable("the server is shutting down"))

    def on_responsive_again(self, silent_since: float) -> None:
        """Notify listeners that the server responds again after silence since ``silent_since``."""
        silent_s = asyncio.get_running_loop().time() - silent_since
        self._log.warning("bus_answers_again", silent_s=round(silent_s, 1))
        listeners = [functools.partial(listener, silent_since) for listener in self.on_bus_responds_again]
        self._notify(listeners, "on_bus_responds_again")

    def on_link_end(self, link: Link) -> None:
        """Report the loss and wake the loop that reconnects."""
        if link is not self._link:
            return
        self._link = None
        now = asyncio.get_running_loop().time()
        self._disconnected_since = now if link.silent_since is None else link.silent_since
        if self.reader is not None:
            self.reader.detach()
        self._log.warning("bus_disconnected", server=link.server, reason=str(link.failure))
        self._link_ended.set()
        self._notify(self.on_disconnected, "on_disconnected")

    # -- staying connected --

    async def _stay_connected(self) -> None:
        loop = asyncio.get_running_loop()
        short_lives = 0
        while True:
            await self._link_ended.wait()
            self._link_ended.clear()
            # A server that accepts and drops at once must not be dialled in a tight loop.
            lived_s = loop.time() - self._linked_at_s
            short_lives = short_lives + 1 if lived_s < self._options.reconnect_wait_max_s else 0
            await asyncio.sleep(reconnect_wait_s(self._options, short_lives, self._rng))
            link = await self._dialer.dial(None)
            self.reconnects += 1
            self._adopt(link)

    async def _stay_logged_in(self, login: Login) -> None:
        while (wait_s := login.renew_in_s()) is not None:
            await asyncio.sleep(wait_s)
            await self.renew()

    async def _move_from(self, old: Link) -> bool:
        buffering_owner = BufferingLinkOwner()
        new = await self._dialer.dial_once(buffering_owner)
        handover = Handover(old, new, buffering_owner, self.take_message)
        try:
            await handover.join(self._subscriptions.lasting)
        except BaseException:
            new.end(NotConnected("it was not needed"))
            raise
        if self._is_closed or old is not self._link or new.has_ended():
            new.end(NotConnected("it was not needed"))
            return False
        if self._options.is_shared:
            new.share()
        self._link = new
        self._linked_at_s = asyncio.get_running_loop().time()
        try:
            is_whole = await handover.part(self._subscriptions.lasting())
        finally:
            old.end(NotConnected("another link has taken over"))
        if not is_whole:
            self._log.warning("bus_renewal_cut", server=old.server)
            self._notify(self.on_disconnected, "on_disconnected")
        if self.reader is not None:
            self.reader.detach()
        new.set_owner(self)
        handover.deliver()
        new.release()
        for error in buffering_owner.errors:
            self.on_server_error(error)
        if new.has_ended():
            self.on_link_end(new)
            return False
        if self.reader is not None:
            self.reader.attach(new)
        self.on_batch_end()
        self._log.info("bus_renewed", server=new.server)
        if not is_whole:
            self._notify(self.on_connected, "on_connected")
        await handover.finish()
        return True

    def _adopt(self, link: Link) -> None:
        if self._options.is_shared:
            link.share()
        self._link = link
        self._linked_at_s = asyncio.get_running_loop().time()
        self._subscriptions.renew()
        self._log.info("bus_connected", server=link.server, reconnects=self.reconnects)
        if self.reader is not None:
            self.reader.attach(link)
        self._notify(self.on_connected, "on_connected")
        since, self._disconnected_since = self._disconnected_since, None
        if since is not None:
            self.on_responsive_again(since)

    def _write(self, line: bytes) -> None:
        if self._link is not None:
            self._link.write(line)

    async def _flush_quietly(self, timeout_s: float) -> None:
        if self._link is None:
            return
        try:
            await self.flush(timeout_s)
        except BusUnavailable as error:
            self._log.warning("bus_drain_incomplete", reason=str(error))

    def _notify(self, listeners: Sequence[Callable[[], None]], which: str) -> None:
        for listener in tuple(listeners):
            try:
                listener()
            except Exception as error:  # noqa: BLE001 - as for callbacks
                self._log_failure(error, which, "")

    def _log_failure(self, error: Exception, which: str, subject: str) -> None:
        now_s = asyncio.get_running_loop().time()
        self._failed_callbacks.log(now_s, "bus_callback_failed", which=which, subject=subject, exc_info=error)


ReplyCallback = Callable[[bytes, bytes, bytes | None], None]
"""(payload, reply, headers). Runs in the read path, once for every message to the reply subject."""


_Receiver = tuple[ReplyCallback, Callable[[], None]]
"""A bare tuple: one is made for every request."""

OTHER_WAY: Final = b"."
"""In the place of the reply subject, which is never this, of replies that did not come over the bus."""
_TOKEN_BYTES: Final = 8
_TOKEN_BATCH: Final = 256
"""Tokens generated per call of the system's random source: one call per request would double the cost."""


def generate_tokens() -> list[bytes]:
    """Generate a batch of tokens, each of 64 bits from the system's random source: collisions are negligible."""
    text = os.urandom(_TOKEN_BATCH * _TOKEN_BYTES).hex().encode()
    size = 2 * _TOKEN_BYTES
    return [text[at : at + size] for at in range(0, len(text), size)]


@final
class Inbox:
    """Hands out reply subjects `<inbox prefix>.<inbox id>.<token>` and brings replies to their callbacks.

    Why one subscription for all: one per request would cost the server and this process a round trip and a table entry
    each. Why tokens cannot be guessed: the receiver of one request knows the prefix, and must not be able to answer,
    cancel or probe a request that was sent to another replica.
    """

    def __init__(self, connection: BusConnection, inbox_id: str, *, open_max: int = 65536) -> None:
        """Subscribe. `inbox_id` is a token that no other process uses; `open_max` limits the tokens in use.

        Raises InvalidSubject for a bad id.
        """
        self._prefix = check_subject(b"%b.%b" % (connection.inbox_prefix, inbox_id.encode())) + b"."
        self._token_at = len(self._prefix)
        self._open_max = open_max
        self._receivers: dict[bytes, _Receiver] = {}
        self._tokens: list[bytes] = []
        """Generated and not used yet."""
        self._subscription = connection.subscribe(self._prefix + b"*", self._take)

    def __len__(self) -> int:
        """How many tokens are in use."""
        return len(self._receivers)

    def new_reply(self, on_reply: ReplyCallback, on_no_responders: Callable[[], None]) -> tuple[bytes, bytes]:
        """An unguessable token, and the reply subject to publish a request with.

        `on_reply` gets every reply; `on_no_responders` is called when the server reports that the request's
        subject has no subscriber. The token stays registered until `forget`. Raises InboxFull at the limit.
        """
        if len(self._receivers) >= self._open_max:
            raise InboxFull(f"{self._open_max} requests wait for replies")
        if not self._tokens:
            self._tokens = generate_tokens()
        token = self._tokens.pop()
        self._receivers[token] = (on_reply, on_no_responders)
        return token, self._prefix + token

    def replace(self, token: bytes, on_reply: ReplyCallback) -> None:
        """Let further replies to a token go to `on_reply`."""
        self._receivers[token] = (on_reply, lambda: None)

    def forget(self, token: bytes) -> None:
        """Release a token: further replies to it are dropped. May be called twice."""
        self._receivers.pop(token, None)

    def deliver(self, token: bytes, payload: bytes) -> None:
        """Bring a reply that came another way to its callback, whose ``reply`` is then `OTHER_WAY`."""
        receiver = self._receivers.get(token)
        if receiver is not None:
            receiver[0](payload, OTHER_WAY, None)

    def close(self) -> None:
        """End the subscription and forget all tokens."""
        self._subscription.unsubscribe()
        self._receivers.clear()

    def _take(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        receiver = self._receivers.get(subject[self._token_at :])
        if receiver is None:
            return  # its request is over
        if headers is not None and not payload and is_no_responders(headers):
            receiver[1]()
        else:
            receiver[0](payload, reply, headers)
