"""What a connection subscribes to, the same after a reconnect; and many requests through one subscription."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import final

from serve_common.nats.protocol import Message, encode_sub, encode_unsub

MessageCallback = Callable[[bytes, bytes, bytes, bytes | None], None]
"""(subject, reply, payload, headers). Runs in the read path: it must be quick and must not block."""


@final
class Subscription:
    """A callback for the messages of a subject; made by `BusConnection.subscribe`."""

    __slots__ = ("_all", "callback", "is_ending", "queue", "sid", "subject")

    def __init__(
        self, subscriptions: Subscriptions, sid: int, subject: bytes, queue: bytes, callback: MessageCallback
    ) -> None:
        self._all = subscriptions
        self.sid = sid
        self.subject = subject
        self.queue = queue
        self.callback = callback
        self.is_ending = False
        """Not renewed any more, but what comes still reaches the callback."""

    def unsubscribe(self) -> None:
        """End it at once: messages that are on their way are dropped. May be called twice."""
        self._all.end(self)

    async def drain(self, timeout_s: float) -> None:
        """End it without losing what the server has already sent: those messages still reach the callback.

        When this returns no further message comes. A connection that is lost, or an answer that does not
        come in `timeout_s`, ends it as well.
        """
        await self._all.drain_one(self, timeout_s)


@final
class Subscriptions:
    """All subscriptions of one connection."""

    def __init__(
        self,
        write: Callable[[bytes], None],
        flush: Callable[[float], Awaitable[None]],
        on_failure: Callable[[Exception, str, str], None],
    ) -> None:
        """`write` sends to the server, if connected; `flush` waits for it, so many seconds, and raises nothing.

        `on_failure` gets what a callback raised, the word "callback", and the subject.
        """
        self._write = write
        self._flush = flush
        self._on_failure = on_failure
        self._by_sid: dict[int, Subscription] = {}
        self._last_sid = 0

    def take_message(self, message: Message) -> None:
        """Hand a message to its subscription; one that was ended meanwhile gets none."""
        subscription = self._by_sid.get(message.sid)
        if subscription is None:
            return
        try:
            subscription.callback(message.subject, message.reply, message.payload, message.headers)
        except Exception as error:  # noqa: BLE001 - a bad callback must not end the connection of others
            self._on_failure(error, "callback", subscription.subject.decode("utf-8", "replace"))

    def add(self, subject: bytes, queue: bytes, callback: MessageCallback) -> Subscription:
        """Subscribe `callback`, as `BusConnection.subscribe`."""
        sid = self._last_sid + 1
        line = encode_sub(subject, queue, sid)
        self._last_sid = sid
        subscription = self._by_sid[sid] = Subscription(self, sid, subject, queue, callback)
        self._write(line)
        return subscription

    def lasting(self) -> list[Subscription]:
        """All subscriptions that are not about to end."""
        return [subscription for subscription in self._by_sid.values() if not subscription.is_ending]

    def renew(self) -> None:
        """Send all subscriptions to a new server."""
        for subscription in self.lasting():
            self._write(encode_sub(subscription.subject, subscription.queue, subscription.sid))

    def end(self, subscription: Subscription) -> None:
        """Unsubscribe at once."""
        if self._by_sid.pop(subscription.sid, None) is not None:
            self._write(encode_unsub(subscription.sid))

    async def drain_one(self, subscription: Subscription, timeout_s: float) -> None:
        """Unsubscribe without losing what the server has already sent."""
        subscription.is_ending = True
        self._write(encode_unsub(subscription.sid))
        await self._flush(timeout_s)
        self._by_sid.pop(subscription.sid, None)

    async def drain(self, timeout_s: float) -> None:
        """Unsubscribe all, and let what the server has already sent reach the callbacks."""
        for subscription in self._by_sid.values():
            subscription.is_ending = True
            self._write(encode_unsub(subscription.sid))
        await self._flush(timeout_s)

    def clear(self) -> None:
        """Forget all: the connection is closed."""
        self._by_sid.clear()
