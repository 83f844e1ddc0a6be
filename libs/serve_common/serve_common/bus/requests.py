"""Replies to many requests through one subscription: each request gets its own subject under one wildcard.

Why: a subscription per request would cost the server and this process a round trip and a table entry each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from serve_common.bus.connection import BusConnection
from serve_common.bus.errors import InboxFull
from serve_common.bus.headers import says_no_responders
from serve_common.bus.protocol import check_subject

ReplyCallback = Callable[[bytes, bytes, bytes | None], None]
"""(payload, reply, headers). Runs in the read path, once for every message to the reply subject."""


_Receiver = tuple[ReplyCallback, Callable[[], None]]
"""A bare tuple: one is made for every request."""


@final
class Inbox:
    """Hands out reply subjects `<inbox prefix>.<inbox id>.<token>` and brings replies to their callbacks."""

    def __init__(self, connection: BusConnection, inbox_id: str, *, open_max: int = 65536) -> None:
        """Subscribe. `inbox_id` is a token that no other process uses; `open_max` limits the tokens held.

        Raises InvalidSubject for a bad id.
        """
        self.late_replies = 0
        """How many replies came for tokens that nobody waits for (any more)."""
        self._prefix = check_subject(b"%b.%b" % (connection.inbox_prefix, inbox_id.encode())) + b"."
        self._token_at = len(self._prefix)
        self._open_max = open_max
        self._receivers: dict[int, _Receiver] = {}
        self._last_token = 0
        self._subscription = connection.subscribe(self._prefix + b"*", self._take)

    def __len__(self) -> int:
        """How many tokens are held."""
        return len(self._receivers)

    def new_reply(self, on_reply: ReplyCallback, on_no_responders: Callable[[], None]) -> tuple[int, bytes]:
        """A rising token and the reply subject to publish a request with.

        `on_reply` gets every reply; `on_no_responders` is called when the server says that nobody listens
        to the request's subject. The token is held until `forget`. Raises InboxFull when too many are held.
        """
        if len(self._receivers) >= self._open_max:
            raise InboxFull(f"{self._open_max} requests wait for replies")
        self._last_token += 1
        token = self._last_token
        self._receivers[token] = (on_reply, on_no_responders)
        return token, b"%b%d" % (self._prefix, token)

    def forget(self, token: int) -> None:
        """Let go of a token: further replies to it are counted and dropped. May be called twice."""
        self._receivers.pop(token, None)

    def close(self) -> None:
        """End the subscription and forget all tokens."""
        self._subscription.unsubscribe()
        self._receivers.clear()

    def _take(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        token = subject[self._token_at :]
        receiver = self._receivers.get(int(token)) if token.isdigit() else None
        if receiver is None:
            self.late_replies += 1
        elif headers is not None and not payload and says_no_responders(headers):
            receiver[1]()
        else:
            receiver[0](payload, reply, headers)
