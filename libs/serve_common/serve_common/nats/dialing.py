"""Dials NATS servers until one accepts, and moves a connection to a newer link that has logged in again."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Final, final

import structlog

from serve_common.errors import BusAuthorizationFailed, BusUnavailable
from serve_common.nats.link import Link, LinkOwner, open_link
from serve_common.nats.options import BusOptions, reconnect_wait_s
from serve_common.nats.protocol import (
    Message,
    ServerError,
    Subscription,
    encode_sub,
    encode_unsub,
)
from serve_common.telemetry.log_lines import RateLimitedLogger

_log = structlog.get_logger(__name__)


@final
class Dialer:
    """Tries the servers in turn until one accepts the owner's credentials."""

    def __init__(self, owner: LinkOwner, options: BusOptions, rng: random.Random) -> None:
        self._owner = owner
        self._options = options
        self._addresses = options.addresses
        self._rng = rng
        self._turn = 0
        self._failures = RateLimitedLogger(_log.bind(bus=options.name).warning, interval_s=5.0)

    async def dial(self, timeout_s: float | None) -> Link:
        """Open a link to the next server that accepts.

        With `timeout_s` raises BusAuthorizationFailed at once when a server refuses the credentials, and
        BusUnavailable when the time is over. Without it tries for ever and only logs: credentials that worked
        before may work again when the server's configuration is mended.
        """
        loop = asyncio.get_running_loop()
        deadline = math.inf if timeout_s is None else loop.time() + timeout_s
        failure: Exception | None = None
        failed_rounds = 0
        while True:
            started_at = loop.time()
            for _ in self._addresses:
                left_s = deadline - loop.time()
                try:
                    return await self._dial_next(min(left_s, self._options.connect_timeout_s))
                except (BusUnavailable, BusAuthorizationFailed) as error:
                    if timeout_s is not None and isinstance(error, BusAuthorizationFailed):
                        raise
                    self._failures.log(loop.time(), "bus_dial_failed", error=str(error))
                    # An attempt that was cut short carries no information; the failure before it does.
                    is_cut_short = left_s < self._options.connect_timeout_s
                    if failure is None or not (is_cut_short and isinstance(error.__cause__, TimeoutError)):
                        failure = error
            wait_s = reconnect_wait_s(self._options, failed_rounds, self._rng)
            if loop.time() - started_at >= self._options.connect_timeout_s:
                # No server refused: one hangs, and accepts connections as soon as it resumes.
                wait_s = self._options.reconnect_wait_min_s
            if loop.time() + wait_s >= deadline:
                raise BusUnavailable(f"no NATS server let us in for {timeout_s} s: {failure}") from failure
            await asyncio.sleep(wait_s)
            failed_rounds += 1

    async def dial_once(self, owner: LinkOwner) -> Link:
        """Open a link of ``owner`` to the next server. Raises BusAuthorizationFailed and BusUnavailable."""
        return await self._dial_next(self._options.connect_timeout_s, owner)

    async def _dial_next(self, timeout_s: float, owner: LinkOwner | None = None) -> Link:
        address = self._addresses[self._turn % len(self._addresses)]
        self._turn += 1
        return await open_link(address, self._options, owner or self._owner, timeout_s)


STEP_TIMEOUT_S: Final = 2.0
"""Seconds for each of the round trips."""
BEHIND_S: Final = 0.25
"""Seconds for which a thread of the server may stall over one message: between looking up its subscribers and
delivering it to them, or between the old link's subscription and the new one's."""


@final
class BufferingLinkOwner:
    """A `LinkOwner` that buffers messages and errors until the connection takes the link over."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.errors: list[ServerError] = []
        self.take_message: Final[Callable[[Message], None]] = self.messages.append

    def on_batch_end(self) -> None:
        """Do nothing: no message is delivered yet."""

    def on_server_error(self, error: ServerError) -> None:
        """Record a refused subscription."""
        self.errors.append(error)

    def on_lame_duck(self, link: Link) -> None:
        """Do nothing: the connection notices when the link ends."""

    def on_responsive_again(self, silent_since: float) -> None:
        """Do nothing: the old link was not silent."""

    def on_link_end(self, link: Link) -> None:
        """Do nothing: the connection checks `Link.failure`."""


@final
class Handover:
    """One move to a link that has logged in again, while messages flow both ways; used on the loop of both links.

    Why not just reconnect: a replica's token lasts an hour, a stream or WebSocket may last longer, and what they lose
    by a disconnect cannot be sent again.

    The order matters. `join`: the new link subscribes too; once the server has confirmed that, and is through with
    the messages whose subscribers it had looked up before, messages arrive on both. `part`: publishes wait, the old
    link unsubscribes, and the answer to its ping proves that the server has handled everything published on it and
    that all its messages are here. Only then is the new link read and written: `deliver` passes on what the old link
    did not bring. `finish`: the server delivers a message to its subscribers one after the other, so the new link may
    lag behind, and its messages are deduplicated a moment longer.

    Two messages of equal content to one subject count as duplicates; a sender whose second one must not be lost numbers
    them.
    """

    def __init__(
        self,
        old: Link,
        new: Link,
        buffering_owner: BufferingLinkOwner,
        take_message: Callable[[Message], None],
    ) -> None:
        """``take_message`` receives messages of ``old`` meanwhile, on the thread that reads them."""
        self._old = old
        self._new = new
        self._newcomer = buffering_owner
        self._take_message = take_message
        self._subscribed: dict[int, Subscription] = {}
        self._seen: list[Message] = []
        self._doubled: Counter[tuple[int, bytes, bytes, bytes, bytes | None]] = Counter()

    async def join(self, subscriptions: Callable[[], list[Subscription]]) -> None:
        """Subscribe on the new link too. Raises as `Link.round_trip`, and TimeoutError; then nothing has changed.

        ``subscriptions`` returns the current ones.
        """
        self._old.redirect(self._record)
        try:
            async with asyncio.timeout(STEP_TIMEOUT_S):
                while missing := [each for each in subscriptions() if each.sid not in self._subscribed]:
                    for each in missing:
                        self._subscribed[each.sid] = each
                        self._new.write(encode_sub(each.subject, each.queue, each.sid))
                    await self._new.round_trip()
                    await asyncio.sleep(BEHIND_S)
        except BaseException:
            self._old.redirect(self._take_message)
            raise

    async def part(self, subscriptions: list[Subscription]) -> bool:
        """Unsubscribe on the old link; publishes on the new one wait meanwhile. False when messages may be lost."""
        known = {each.sid for each in subscriptions}
        for sid in self._subscribed.keys() - known:
            self._new.write(encode_unsub(sid))
        self._new.buffer_writes()
        for sid in known:
            self._old.write(encode_unsub(sid))
        try:
            async with asyncio.timeout(STEP_TIMEOUT_S):
                await self._old.round_trip()
        except Exception:  # noqa: BLE001 - whatever it was, the old link delivers nothing more
            return False
        return True

    def deliver(self) -> None:
        """Deliver what came by the new link alone; later messages are deduplicated likewise until `finish`."""
        self._doubled = Counter(map(_content, self._seen))
        self._new.redirect(self._take_new)
        for message in self._newcomer.messages:
            self._take_new(message)

    async def finish(self) -> None:
        """Wait until no duplicate of the old link can arrive any more, then deliver from the new one directly.

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
