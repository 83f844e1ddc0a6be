"""Moves a connection from one link to a newer one that has logged in anew, while messages go on in both directions.

Why not just reconnect: a token lasts an hour and a stream or WebSocket may last longer; what a cut connection loses of
them cannot be said again.

In this order: the new link subscribes as well, and once the server knows that, messages come by both. Then what is
published is kept back, the old link unsubscribes, and its answered ping proves that the server has handled all that was
published by it and that all its messages are here. Only then is the new link read and written; what both brought is
handed over once. The server hands a message to one of its subscribers after the other, so the new link may be behind:
its messages are looked at for a moment longer.

Two messages of equal content to one subject count as one and the same: who must not lose the second numbers them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final, final

from serve_common.bus.link import Link
from serve_common.bus.protocol import Message, ServerError, encode_sub, encode_unsub
from serve_common.bus.subscriptions import Subscription

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
