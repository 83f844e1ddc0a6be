"""Opens a link to a NATS server, and moves a connection from one link to a newer one that has logged in anew."""

from __future__ import annotations

import asyncio
import math
import random
import ssl
from collections import Counter
from collections.abc import Callable
from typing import Final, final

import structlog

from serve_common.errors import BusAuthorizationFailed, BusUnavailable
from serve_common.nats.link import Link, LinkOwner
from serve_common.nats.options import BusOptions, ServerAddress, reconnect_wait_s
from serve_common.nats.protocol import (
    Greeting,
    Message,
    ServerError,
    encode_connect,
    encode_sub,
    encode_unsub,
)
from serve_common.nats.subscriptions import Subscription
from serve_common.telemetry.log_lines import RateLimitedLogger

_log = structlog.get_logger(__name__)


@final
class Dialer:
    """Tries the servers in turn until one lets the owner in."""

    def __init__(self, owner: LinkOwner, options: BusOptions, chance: random.Random) -> None:
        self._owner = owner
        self._options = options
        self._addresses = options.addresses
        self._chance = chance
        self._turn = 0
        self._failures = RateLimitedLogger(_log.bind(bus=options.name).warning, interval_s=5.0)

    async def dial(self, timeout_s: float | None) -> Link:
        """A link to the next server that accepts.

        With `timeout_s` raises BusAuthorizationFailed at once when a server refuses the credentials, and
        BusUnavailable when the time is over. Without it tries for ever and only logs: credentials that worked
        before may work again when the server's configuration is mended.
        """
        loop = asyncio.get_running_loop()
        until_s = math.inf if timeout_s is None else loop.time() + timeout_s
        failure: Exception | None = None
        failed_rounds = 0
        while True:
            begun = loop.time()
            for _ in self._addresses:
                left_s = until_s - loop.time()
                try:
                    return await self._dial_next(min(left_s, self._options.connect_timeout_s))
                except (BusUnavailable, BusAuthorizationFailed) as error:
                    if timeout_s is not None and isinstance(error, BusAuthorizationFailed):
                        raise
                    self._failures.log(loop.time(), "bus_dial_failed", error=str(error))
                    # An attempt that had no time says nothing; what failed before it does.
                    is_cut_short = left_s < self._options.connect_timeout_s
                    if failure is None or not (is_cut_short and isinstance(error.__cause__, TimeoutError)):
                        failure = error
            wait_s = reconnect_wait_s(self._options, failed_rounds, self._chance)
            if loop.time() - begun >= self._options.connect_timeout_s:
                # Nobody refused: a server hangs, and lets in whoever knocks in the moment in which it goes on.
                wait_s = self._options.reconnect_wait_min_s
            if loop.time() + wait_s >= until_s:
                raise BusUnavailable(f"no NATS server let us in for {timeout_s} s: {failure}") from failure
            await asyncio.sleep(wait_s)
            failed_rounds += 1

    async def dial_once(self, owner: LinkOwner) -> Link:
        """A link of ``owner`` to the next server. Raises BusAuthorizationFailed and BusUnavailable."""
        return await self._dial_next(self._options.connect_timeout_s, owner)

    async def _dial_next(self, timeout_s: float, owner: LinkOwner | None = None) -> Link:
        address = self._addresses[self._turn % len(self._addresses)]
        self._turn += 1
        return await open_link(address, self._options, owner or self._owner, timeout_s)


async def open_link(address: ServerAddress, options: BusOptions, owner: LinkOwner, timeout_s: float) -> Link:
    """A link to `address` whose credentials the server has accepted.

    Raises BusAuthorizationFailed when it has not, and BusUnavailable for all that may pass.
    """
    link = Link(owner, options, asyncio.get_running_loop())
    try:
        async with asyncio.timeout(timeout_s):
            await _shake_hands(link, address, options)
    except TimeoutError as error:
        link.end(error)
        raise BusUnavailable(f"{address}: no answer within {timeout_s:.2g} s") from error
    except Exception as error:  # a client that stops dialling because of an odd error is away for good
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


STEP_TIMEOUT_S: Final = 2.0
"""For each of the round trips."""
BEHIND_S: Final = 0.25
"""How much later than the old link the new one may get a message, at most, when the server's threads stand still."""


@final
class Newcomer:
    """A `LinkOwner` that keeps what its link brings until the connection takes the link over."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.errors: list[ServerError] = []
        self.take_message: Final[Callable[[Message], None]] = self.messages.append

    def take_pause(self) -> None:
        """Nothing is handed over yet."""

    def take_server_error(self, error: ServerError) -> None:
        """A refused subscription."""
        self.errors.append(error)

    def take_lame_duck(self, link: Link) -> None:
        """The connection finds out when the link ends."""

    def take_answer_again(self, silent_since: float) -> None:
        """The old link was not silent."""

    def take_end(self, link: Link) -> None:
        """The connection looks at `Link.failure`."""


@final
class Handover:
    """One move; used on the loop of both links."""

    def __init__(
        self, old: Link, new: Link, newcomer: Newcomer, take_message: Callable[[Message], None]
    ) -> None:
        """``take_message`` takes what ``old`` brings meanwhile, from whichever thread reads it."""
        self._old = old
        self._new = new
        self._newcomer = newcomer
        self._take_message = take_message
        self._told: dict[int, Subscription] = {}
        self._seen: list[Message] = []
        self._doubled: Counter[tuple[int, bytes, bytes, bytes, bytes | None]] = Counter()

    async def join(self, subscriptions: Callable[[], list[Subscription]]) -> None:
        """Subscribe by the new link too. Raises what `Link.round_trip` raises, and TimeoutError; nothing has changed.

        ``subscriptions`` are those of the moment.
        """
        self._old.redirect(self._record)
        try:
            async with asyncio.timeout(STEP_TIMEOUT_S):
                while missing := [each for each in subscriptions() if each.sid not in self._told]:
                    for each in missing:
                        self._told[each.sid] = each
                        self._new.write(encode_sub(each.subject, each.queue, each.sid))
                    await self._new.round_trip()
        except BaseException:
            self._old.redirect(self._take_message)
            raise

    async def part(self, subscriptions: list[Subscription]) -> bool:
        """End the old link's part; what is published by the new one waits meanwhile. False: something may be lost."""
        known = {each.sid for each in subscriptions}
        for sid in self._told.keys() - known:
            self._new.write(encode_unsub(sid))
        self._new.hold_back()
        for sid in known:
            self._old.write(encode_unsub(sid))
        try:
            async with asyncio.timeout(STEP_TIMEOUT_S):
                await self._old.round_trip()
        except Exception:  # noqa: BLE001 - whatever it was, the old link has brought all that it will
            return False
        return True

    def deliver(self) -> None:
        """Hand over what came by the new link alone; what comes further goes the same way until `finish`."""
        self._doubled = Counter(map(_content, self._seen))
        self._new.redirect(self._take_new)
        for message in self._newcomer.messages:
            self._take_new(message)

    async def finish(self) -> None:
        """Wait until nothing of the old link's can come any more, and let the new one bring the rest by itself.

        Raises NotConnected when it ends.
        """
        try:
            async with asyncio.timeout(STEP_TIMEOUT_S):
                await self._new.round_trip()
                await asyncio.sleep(BEHIND_S)
        finally:
            self._new.redirect(self._take_message)

    def _take_new(self, message: Message) -> None:
        content = _content(message)
        if self._doubled.get(content, 0):
            self._doubled[content] -= 1
        else:
            self._take_message(message)

    def _record(self, message: Message) -> None:
        self._seen.append(message)
        self._take_message(message)


def _content(message: Message) -> tuple[int, bytes, bytes, bytes, bytes | None]:
    return message.sid, message.subject, message.reply, message.payload, message.headers
