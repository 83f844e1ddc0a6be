"""Replies to many requests through one subscription: each request gets its own subject under one wildcard.

Why: a subscription per request would cost the server and this process a round trip and a table entry each. Why the
subjects cannot be guessed: whoever gets one request learns the wildcard, and must not be able to answer, cancel or
probe another one, which is for another replica.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, final

from serve_common.bus.connection import BusConnection
from serve_common.bus.errors import InboxFull
from serve_common.bus.headers import says_no_responders
from serve_common.bus.protocol import check_subject

ReplyCallback = Callable[[bytes, bytes, bytes | None], None]
"""(payload, reply, headers). Runs in the read path, once for every message to the reply subject."""


_Receiver = tuple[ReplyCallback, Callable[[], None]]
"""A bare tuple: one is made for every request."""

_TOKEN_BYTES: Final = 8
_DRAWN_TOKENS: Final = 256
"""How many are drawn from the system at once: a call of it for each request would cost as much as the rest of this."""


def draw_tokens(count: int = _DRAWN_TOKENS) -> list[bytes]:
    """So many tokens, each of 64 bits of the system's randomness; of so many that they never meet."""
    text = os.urandom(count * _TOKEN_BYTES).hex().encode()
    size = 2 * _TOKEN_BYTES
    return [text[at : at + size] for at in range(0, len(text), size)]


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
        self._receivers: dict[bytes, _Receiver] = {}
        self._tokens: list[bytes] = []
        """Drawn and not used yet."""
        self._subscription = connection.subscribe(self._prefix + b"*", self._take)

    def __len__(self) -> int:
        """How many tokens are held."""
        return len(self._receivers)

    def new_reply(self, on_reply: ReplyCallback, on_no_responders: Callable[[], None]) -> tuple[bytes, bytes]:
        """A token that nobody can guess, and the reply subject to publish a request with.

        `on_reply` gets every reply; `on_no_responders` is called when the server says that nobody listens
        to the request's subject. The token is held until `forget`. Raises InboxFull when too many are held.
        """
        if len(self._receivers) >= self._open_max:
            raise InboxFull(f"{self._open_max} requests wait for replies")
        if not self._tokens:
            self._tokens = draw_tokens()
        token = self._tokens.pop()
        self._receivers[token] = (on_reply, on_no_responders)
        return token, self._prefix + token

    def forget(self, token: bytes) -> None:
        """Let go of a token: further replies to it are counted and dropped. May be called twice."""
        self._receivers.pop(token, None)

    def close(self) -> None:
        """End the subscription and forget all tokens."""
        self._subscription.unsubscribe()
        self._receivers.clear()

    def _take(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        receiver = self._receivers.get(subject[self._token_at :])
        if receiver is None:
            self.late_replies += 1
        elif headers is not None and not payload and says_no_responders(headers):
            receiver[1]()
        else:
            receiver[0](payload, reply, headers)
