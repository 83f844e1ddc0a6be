"""Which captured requests can be sent again, and with which headers. Pure."""

from __future__ import annotations

from typing import Final

from serve_common.json_paths import REDACTED
from serve_common.protocol.captures import BodyState, CapturedPair

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing (RFC 9110, 9.2.1). Those that are only idempotent are not among them: a PUT of an hour
ago, sent again, would undo what came later."""
_NOT_SENT: Final = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-length",
        "date",
        "expect",
        "forwarded",
        "host",
        "keep-alive",
        "te",
        "traceparent",
        "tracestate",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "via",
        "x-real-ip",
        "x-request-id",
        "x-request-timeout-seconds",
    }
)
"""Headers of the first transport of a request, its identity or its deadline; and what would compress responses, which
could then only be compared as bytes."""
_NOT_SENT_PREFIXES: Final = ("x-forwarded-", "x-serve-")


def can_replay(pair: CapturedPair, *, is_unsafe: bool) -> bool:
    """Whether a captured request can be sent again: its body is there, and its method allows it."""
    request = pair.request
    has_body = request.state is BodyState.CAPTURED or (
        request.state is BodyState.OFF and not request.body_bytes
    )
    return has_body and (is_unsafe or pair.method in SAFE_METHODS)


def build_replay_headers(pair: CapturedPair, left_out: str = "") -> dict[str, str]:
    """The headers with which a captured request is sent again over a proxy's gateway, without the one of a name."""
    headers: dict[str, str] = {}
    for name, value in pair.request.headers:
        is_left_out = (
            name in _NOT_SENT
            or name.startswith(_NOT_SENT_PREFIXES)
            or value == REDACTED
            or not value.isascii()
            or not value.isprintable()
            or name == left_out.lower()
        )
        if not is_left_out:
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
    headers["X-Serve-Replay"] = "1"
    headers["X-Serve-Method"] = pair.method
    headers["X-Serve-Path"] = pair.path
    if pair.query:
        headers["X-Serve-Query"] = pair.query
    return headers
