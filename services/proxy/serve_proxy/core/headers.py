"""Which headers go through a proxy and which end at it.

Why bytes: HTTP header fields are bytes, and whatever text they mean is the application's matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NamedTuple

from serve_common.wires.frames import Headers

REQUEST_ID: Final = "X-Request-ID"
REQUEST_ID_LENGTH_MAX: Final = 128

_ENDS_HERE: Final = frozenset(
    name.encode()
    for name in (
        "connection",
        "expect",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
"""About one connection only (RFC 9110, 7.6.1), and `Expect`, which the proxy answers itself."""
_OURS: Final = _ENDS_HERE | {b"content-length", b"x-request-id", b"date", b"server"}

_PASSED: Final = frozenset({b"traceparent", b"idempotency-key"})
_SPECIAL: Final = _ENDS_HERE | _PASSED | {b"x-request-id"}


@lru_cache(maxsize=1024)
def _read_name(raw_name: bytes) -> tuple[bytes, bool]:
    """The name in lower case, and whether the proxy looks at it; the same few names come again and again."""
    name = raw_name.lower()
    return name, name in _SPECIAL


class RequestHeaders(NamedTuple):
    """What a request's headers say to the proxy, and what goes on to the replica."""

    forwarded: Headers
    request_id: str
    """As the client sent it when that is usable; otherwise empty."""
    traceparent: str
    has_idempotency_key: bool


def read_request_headers(raw: Iterable[tuple[bytes, bytes]]) -> RequestHeaders:
    """Sort out the headers of a request."""
    forwarded: Headers = []
    request_id = traceparent = ""
    connection = b""
    has_idempotency_key = False
    for raw_name, raw_value in raw:
        name, is_special = _read_name(raw_name)
        if is_special:
            if name == b"x-request-id":
                request_id = usable_request_id(raw_value.decode("latin-1"))
            elif name == b"connection":
                connection += b"," + raw_value
            elif name == b"traceparent":
                traceparent = raw_value.decode("latin-1")
            elif name == b"idempotency-key":
                has_idempotency_key = True
            if name not in _PASSED:
                continue
        forwarded.append((name, raw_value))
    if connection and connection.lower() not in (b",keep-alive", b",close"):
        named = {token.strip().lower() for token in connection.split(b",")}
        forwarded = [(name, value) for name, value in forwarded if name not in named]
    return RequestHeaders(forwarded, request_id, traceparent, has_idempotency_key)


def usable_request_id(value: str) -> str:
    """``value`` when it may appear in logs and headers, otherwise an empty text."""
    is_usable = 0 < len(value) <= REQUEST_ID_LENGTH_MAX and value.isascii() and value.isprintable()
    return value if is_usable else ""


class ResponseHeaders(NamedTuple):
    """What a replica's headers say to the proxy, and what goes on to the client."""

    forwarded: Headers
    content_length: int | None


_NOT_IN_NAMES: Final = bytes(range(0x21)) + b'()<>@,;:\\"/[]?={}\x7f'
"""What is no part of a token (RFC 9110, 5.6.2); bytes above ASCII are found apart."""


@lru_cache(maxsize=1024)
def _read_answer_name(raw_name: bytes) -> bytes:
    """The name in lower case. Raises ValueError when it cannot be one."""
    if not raw_name or not raw_name.isascii() or raw_name.translate(None, _NOT_IN_NAMES) != raw_name:
        raise ValueError(f"{raw_name[:80]!r} cannot be the name of a header")
    return raw_name.lower()


def read_response_head(status: int, headers: Headers) -> ResponseHeaders:
    """Sort out the headers of an answer. Raises ValueError for a head that would break the answer apart."""
    if not 200 <= status <= 599:
        raise ValueError(f"{status} is no status of a final answer")
    forwarded: Headers = []
    content_length: int | None = None
    for raw_name, value in headers:
        name = _read_answer_name(raw_name)
        if name in _OURS:
            if name == b"content-length" and value.isdigit():
                content_length = int(value)
            continue
        if b"\r" in value or b"\n" in value or b"\0" in value:
            raise ValueError(f"header {name[:80]!r} has a line break or NUL in its value")
        forwarded.append((raw_name, value))
    return ResponseHeaders(forwarded, content_length)


def as_text(headers: Headers) -> list[tuple[str, str]]:
    """For a library that takes text and writes it as UTF-8: the text whose UTF-8 form is the bytes that are meant."""
    return [(name.decode("latin-1"), _as_sent(value)) for name, value in headers]


def _as_sent(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeError:
        return value.decode("latin-1").encode("ascii", "replace").decode("ascii")
