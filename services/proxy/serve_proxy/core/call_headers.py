"""The headers by which a plain NATS call says what an HTTP client says in the request line, and how it is answered."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from serve_common.config.backend import METHODS
from serve_proxy.core.headers import RequestHeaders
from serve_proxy.core.problems import BadRequest

STREAM: Final = "x-serve-stream"
"""Any value but ``0`` and ``false`` requests a response in several messages, the last one empty."""
HEARTBEATS: Final = b"heartbeat"
"""Value of `STREAM` for a caller who can tell heartbeats from the end: both are empty, but these have a header."""
TARGET_BYTES_MAX: Final = 8 * 1024
"""Maximum size of path and query of a call, together; as for HTTP."""
_METHOD: Final = "POST"
_METHODS: Final = frozenset(METHODS)
_TARGET: Final = re.compile(r"[!-\"$-~]*")
"""Path or query as in a request line: visible ASCII without ``#``, all else percent-encoded."""
_METHOD_HEADER: Final = "X-Serve-Method"
_PATH_HEADER: Final = "X-Serve-Path"
_QUERY_HEADER: Final = "X-Serve-Query"
_OWN_HEADERS: Final = {
    name.lower().encode(): name for name in (_METHOD_HEADER, _PATH_HEADER, _QUERY_HEADER, STREAM)
}
"""Headers for the gateway itself; applications do not get them."""
_WANTS_PIECES: Final = re.compile(rb"(?i)\r\nx-serve-stream: *+(?!(?:0|false)? *\r)")


class CallTarget(NamedTuple):
    """What a call says of its request beside its body and the headers that are forwarded."""

    method: str = _METHOD
    path: str = "/"
    query: str = ""
    stream: bytes = b""


DEFAULT_TARGET: Final = CallTarget()


def take_target(read: RequestHeaders) -> CallTarget:
    """Take the headers for the gateway out of ``read.forwarded``. Raises `BadRequest` naming the header."""
    found = [header for header in read.forwarded if header[0] in _OWN_HEADERS]
    if not found:
        return DEFAULT_TARGET
    read.forwarded = [header for header in read.forwarded if header[0] not in _OWN_HEADERS]
    values: dict[str, str] = {}
    for raw_name, value in found:
        name = _OWN_HEADERS[raw_name]
        if name in values:
            raise BadRequest(name, "it is there twice")
        values[name] = value.decode("utf-8", "replace")
    method = values.get(_METHOD_HEADER, _METHOD)
    if method not in _METHODS:
        raise BadRequest(_METHOD_HEADER, f"{method[:40]!r} is none of {', '.join(METHODS)}")
    path, mark, query = values.get(_PATH_HEADER, "/").partition("?")
    if not path.startswith("/"):
        raise BadRequest(_PATH_HEADER, f"{path[:80]!r} does not begin with '/'")
    if _QUERY_HEADER in values:
        if mark:
            raise BadRequest(_QUERY_HEADER, f"{_PATH_HEADER} has a query too")
        query = values[_QUERY_HEADER]
    for name, text in ((_PATH_HEADER, path), (_QUERY_HEADER, query)):
        if _TARGET.fullmatch(text) is None:
            raise BadRequest(name, f"{text[:80]!r} has characters that must be percent-encoded")
    if len(path) + len(query) > TARGET_BYTES_MAX:
        raise BadRequest(_PATH_HEADER, f"path and query may have {TARGET_BYTES_MAX} bytes together")
    return CallTarget(method, path, query, values.get(STREAM, "").lower().encode())


def wants_pieces(headers: bytes | None) -> bool:
    """Whether an error needs an end of its own; by the raw block, because it may be the block that is wrong."""
    return headers is not None and _WANTS_PIECES.search(headers) is not None
