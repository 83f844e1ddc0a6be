"""Heads of requests that are known from the request before, on the same connection.

Why: clients that keep a connection send the same headers again and again, and parsing them was a quarter of what a
quick request cost here. What is known was parsed by aiohttp, and is the same byte by byte; only the target and the
length of the body may differ, each in a form so plain that there is one way to read it.
"""

from __future__ import annotations

import re
from copy import copy
from typing import Final, Self, final

from aiohttp.http_parser import RawRequestMessage

from serve_proxy.core.headers import RequestHeaders, forward

_HEAD_END: Final = b"\r\n\r\n"
_VERSION: Final = b" HTTP/1.1\r\n"
_BYTES_MAX: Final = 2048
"""Maximum of a target, and of the headers; longer ones are always parsed. Each connection remembers one head."""
_LENGTH_DIGITS_MAX: Final = 12
_TARGET_FORM: Final = re.compile(rb"/[A-Za-z0-9\-._~!$&'()*+,;=:@%/?]*")
"""RFC 9112, 3.2.1, without what it allows besides: anything else is parsed."""
_LENGTH_LINE: Final = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)\r\n", re.IGNORECASE)
_LENGTH: Final = b"content-length"


class KnownBody:
    """The body of a request that was received whole, as far as `FastPathRequest` reads it."""

    __slots__ = ("_data", "total_bytes")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.total_bytes = len(data)

    def read_nowait(self) -> bytes:
        """All of it."""
        return self._data


@final
class KnownHead:
    """The head of the last request on a connection, which took the fast path."""

    __slots__ = ("_after", "_before", "_method", "_target", "headers", "message")

    def __init__(
        self, message: RawRequestMessage, headers: RequestHeaders, before: bytes, after: bytes
    ) -> None:
        """``before`` is what comes after the target, up to the digits of the length; ``after`` what follows those.

        Without a length, ``before`` is all and ``after`` empty.
        """
        self.message: Final = message
        """The request of that head; its target and the length of its body are not those of the next."""
        self.headers: Final = headers
        """Those of each request with this head, forwarding headers included; an observer needs a copy to change."""
        self._method = message.method.encode() + b" "
        self._target = b""
        """The last target that was found to be plain."""
        self._before = before
        self._after = after

    @classmethod
    def remember(
        cls, data: bytes, message: RawRequestMessage, headers: RequestHeaders, peer: str, scheme: str
    ) -> Self | None:
        """``data`` is what was received of ``message``, when nothing of another request was waiting to be parsed.

        ``headers`` are the message's, and nothing has changed them yet; ``peer`` and ``scheme`` as of `forward`.

        None unless it is this request and nothing else, in a form that `read` understands.
        """
        start = message.method.encode() + b" " + message.path.encode("utf-8", "surrogateescape")
        head_end = data.find(_HEAD_END) + len(_HEAD_END)
        block = data[len(start) : head_end]
        if (
            not data.startswith(start)
            or not block.startswith(_VERSION)
            or len(block) > _BYTES_MAX
            or message.chunked
        ):
            return None
        lengths = [value for name, value in message.raw_headers if name.lower() == _LENGTH]
        found = _LENGTH_LINE.search(block)
        before, after, size = block, b"", 0
        if lengths:
            if found is None or lengths != [found[1]]:
                return None
            before, after, size = block[: found.start(1)], block[found.end(1) :], int(found[1])
        if len(data) != head_end + size:
            return None
        own = copy(headers)
        own.forwarded = headers.forwarded.copy()
        own.sender = forward(own, peer, scheme)
        return cls(message, own, before, after)

    def read(self, data: bytes) -> tuple[str, bytes] | None:
        """Target and body of the request in ``data`` if it has this head, whatever those are, and is there whole.

        None otherwise; then it must be parsed.
        """
        if not data.startswith(self._method):
            return None
        at, start = data.find(_VERSION), len(self._method)
        target = data[start:at]
        if not data.startswith(self._before, at) or at < 0:
            return None
        if target != self._target:
            if len(target) > _BYTES_MAX or not _TARGET_FORM.fullmatch(target):
                return None
            self._target = target
        at += len(self._before)
        if not self._after:
            return (target.decode(), b"") if at == len(data) else None
        end = data.find(b"\r", at, at + _LENGTH_DIGITS_MAX + 1)
        digits = data[at:end]
        if end < 0 or not digits.isdigit() or not data.startswith(self._after, end):
            return None
        at = end + len(self._after)
        return (target.decode(), data[at:]) if len(data) == at + int(digits) else None
