"""Heads of replicas' responses, as bytes."""

from __future__ import annotations

from functools import lru_cache
from http import HTTPStatus
from typing import Final

from aiohttp.helpers import rfc822_formatted_time

from serve_common.protocol.frames import Headers
from serve_proxy.core.headers import REQUEST_ID, read_response_head

SERVER_NAME: Final = "muster"
_BODILESS: Final = frozenset({204, 304})
_CACHED_HEADERS_MAX: Final = 8
"""Maximum headers of a response whose head is cached."""
_LENGTH: Final = b"content-length: "
_TAIL: Final = f"\r\nserver: {SERVER_NAME}\r\n{REQUEST_ID.lower()}: ".encode()


def status_line(status: int) -> bytes:
    """The first line, with its end."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return b"HTTP/1.1 %d %b\r\n" % (status, phrase.encode())


def response_start(status: int, headers: Headers) -> tuple[bytes, bool, int | None]:
    """Status line and headers, up to where the length belongs; whether the status allows no body; and the length, if
    the replica has named it.

    Cached, because the same few heads recur. Raises ValueError for a head that would corrupt the response.
    """
    if len(headers) <= _CACHED_HEADERS_MAX:
        return _response_start(status, tuple(headers))
    return _response_start.__wrapped__(status, tuple(headers))


@lru_cache(maxsize=512)
def _response_start(status: int, headers: tuple[tuple[bytes, bytes], ...]) -> tuple[bytes, bool, int | None]:
    forwarded, content_length = read_response_head(status, headers)
    lines = [status_line(status)]
    lines += [b"%b: %b\r\n" % header for header in forwarded]
    if status not in _BODILESS:
        lines.append(_LENGTH)
        return b"".join(lines), False, content_length
    if status == HTTPStatus.NOT_MODIFIED and content_length is not None:
        lines.append(b"%b%d\r\n" % (_LENGTH, content_length))
    return b"".join(lines)[:-2], True, content_length


def response_end(request_id: str, *, closes: bool) -> bytes:
    """What follows the length: the other headers that the proxy sets, and the empty line."""
    end = b"\r\nconnection: close\r\n\r\n" if closes else b"\r\n\r\n"
    return b"".join((_date_line(rfc822_formatted_time()), _TAIL, request_id.encode(), end))


def stream_head(start: bytes, content_length: int | None, request_id: str, *, closes: bool) -> bytes:
    """The head of a response whose body comes in pieces; without a length it is chunked. ``start`` is that of
    `response_start`."""
    end = response_end(request_id, closes=closes)
    if content_length is None:
        return b"%btransfer-encoding: chunked%b" % (start.removesuffix(_LENGTH), end)
    return b"%b%d%b" % (start, content_length, end)


@lru_cache(maxsize=2)
def _date_line(date: str) -> bytes:
    return f"\r\ndate: {date}".encode()
