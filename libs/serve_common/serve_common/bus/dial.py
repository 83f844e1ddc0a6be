"""Opens a link: TCP, the server's greeting, TLS where asked for, credentials, and the first answered ping.

Why apart: everything that can fail before a connection exists is here, and leaves as one of two errors.
"""

from __future__ import annotations

import asyncio
import math
import random
import ssl
from typing import final

import structlog

from serve_common.bus.link import Link, LinkOwner
from serve_common.bus.options import BusOptions, ServerAddress, reconnect_wait_s
from serve_common.bus.protocol import Greeting, encode_connect
from serve_common.bus.quiet_log import QuietLog
from serve_common.errors import BusAuthorizationFailed, BusUnavailable

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
        self._failures = QuietLog(_log.bind(bus=options.name).warning, interval_s=5.0)

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
