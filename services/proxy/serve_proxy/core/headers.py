"""Which headers go through a proxy and which end at it.

Why text is latin-1 here: HTTP header fields are bytes, and latin-1 is the one reading that gives the same bytes back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

Headers = list[tuple[str, str]]

REQUEST_ID: Final = "X-Request-ID"
REQUEST_ID_LENGTH_MAX: Final = 128

_ENDS_HERE: Final = frozenset(
    {
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
    }
)
"""About one connection only (RFC 9110, 7.6.1), and `Expect`, which the proxy answers itself."""
_OURS: Final = _ENDS_HERE | {"content-length", "x-request-id", "date", "server"}

_PASSED: Final = frozenset({"traceparent", "idempotency-key"})
_SPECIAL: Final = _ENDS_HERE | _PASSED | {"x-request-id"}


@lru_cache(maxsize=1024)
def _read_name(raw_name: bytes) -> tuple[str, str, bool]:
    """The name, its lower-case form, and whether the proxy looks at it; the same few names come again and again."""
    name = raw_name.decode("latin-1")
    lower = name.lower()
    return name, lower, lower in _SPECIAL


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
    request_id = traceparent = connection = ""
    has_idempotency_key = False
    for raw_name, raw_value in raw:
        name, lower, is_special = _read_name(raw_name)
        value = raw_value.decode("latin-1")
        if is_special:
            if lower == "x-request-id":
                request_id = usable_request_id(value)
            elif lower == "connection":
                connection += "," + value
            elif lower == "traceparent":
                traceparent = value
            elif lower == "idempotency-key":
                has_idempotency_key = True
            if lower not in _PASSED:
                continue
        forwarded.append((name, value))
    if connection and connection.lower() not in (",keep-alive", ",close"):
        named = {token.strip().lower() for token in connection.split(",")}
        forwarded = [(name, value) for name, value in forwarded if name.lower() not in named]
    return RequestHeaders(forwarded, request_id, traceparent, has_idempotency_key)


def usable_request_id(value: str) -> str:
    """``value`` when it may appear in logs and headers, otherwise an empty text."""
    is_usable = 0 < len(value) <= REQUEST_ID_LENGTH_MAX and value.isascii() and value.isprintable()
    return value if is_usable else ""


class ResponseHeaders(NamedTuple):
    """What a replica's headers say to the proxy, and what goes on to the client."""

    forwarded: Headers
    content_length: int | None


def read_response_head(status: int, headers: Sequence[tuple[str, str]]) -> ResponseHeaders:
    """Sort out the headers of an answer. Raises ValueError for a head that would break the answer apart."""
    if not 200 <= status <= 599:
        raise ValueError(f"{status} is no status of a final answer")
    forwarded: Headers = []
    content_length: int | None = None
    for name, value in headers:
        lower = name.lower()
        if lower in _OURS:
            if lower == "content-length" and value.isascii() and value.isdigit():
                content_length = int(value)
            continue
        if not name.isascii() or not name.isprintable() or not name or " " in name or ":" in name:
            raise ValueError(f"{name[:80]!r} cannot be the name of a header")
        if not value.isprintable() and any(c in value for c in "\r\n\0"):
            raise ValueError(f"header {name[:80]!r} has a line break or NUL in its value")
        forwarded.append((name, value if value.isascii() else _as_sent(value)))
    return ResponseHeaders(forwarded, content_length)


def _as_sent(value: str) -> str:
    """The text whose UTF-8 form, which the HTTP library writes, is the bytes that the replica meant."""
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return value.encode("ascii", "replace").decode("ascii")
