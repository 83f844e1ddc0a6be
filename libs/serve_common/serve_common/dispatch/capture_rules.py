"""What is captured of an endpoint's requests, and what is redacted before anything leaves the process. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, final
from urllib.parse import unquote_plus

from serve_common.config.capture import CAPTURED_BODY_BYTES_MAX, CaptureConfig
from serve_common.errors import BadField
from serve_common.json_paths import REDACTED, parse_json_paths, redact_json
from serve_common.protocol.captures import BodyState, CapturedHeaders, CapturedMessage
from serve_common.protocol.frames import Headers

SECRET_HEADERS: Final = frozenset(
    {
        "authorization",
        "authentication-info",
        "cookie",
        "cookie2",
        "set-cookie",
        "set-cookie2",
        "proxy-authenticate",
        "proxy-authorization",
        "www-authenticate",
        "x-amz-security-token",
        "x-csrf-token",
        "x-xsrf-token",
    }
)
SECRET_PARTS: Final = (
    "api-key",
    "apikey",
    "auth",
    "credential",
    "passwd",
    "password",
    "secret",
    "session",
    "token",
)
"""A header or query parameter whose name has one of these is redacted always; ``_`` in names counts as ``-``."""
SECRET_PARAMETERS: Final = frozenset({"code", "key", "pwd", "sig", "signature", "x-amz-signature"})
HEADERS_MAX: Final = 100
"""Maximum captured headers of a message."""
HEADER_BYTES_MAX: Final = 4 * 1024
"""Maximum captured length of a header's value; the rest is cut off."""
TARGET_LENGTH_MAX: Final = 8 * 1024
REPLAY_HEADER: Final = b"x-serve-replay"
"""Marks a request that is sent by a replay; such a request is never captured."""


@final
class CaptureRule:
    """A `CaptureConfig`, prepared once per snapshot."""

    __slots__ = ("_headers", "_parameters", "_paths", "has_bodies", "share")

    def __init__(self, config: CaptureConfig) -> None:
        self.share: Final = config.share
        self._headers = frozenset(name.lower() for name in config.redact_headers)
        self._parameters = frozenset(name.lower() for name in config.redact_query)
        try:
            self._paths = parse_json_paths(config.redact, "redact")
        except BadField:
            # A path of a newer version, perhaps: what cannot be redacted must not be captured.
            self._paths, has_bodies = (), False
        else:
            has_bodies = config.bodies
        self.has_bodies: Final = has_bodies

    def keeps(self, body: bytes | memoryview) -> bool:
        """Whether a body is captured, and not only its size."""
        return self.has_bodies and len(body) <= CAPTURED_BODY_BYTES_MAX

    def message(
        self, headers: Headers, body: bytes | None, body_bytes: int, *, is_streamed: bool = False
    ) -> CapturedMessage:
        """The captured part of a request or response, redacted; ``body`` is None where it is not kept."""
        state, captured = BodyState.CAPTURED, b""
        if is_streamed:
            state, body_bytes = BodyState.STREAMED, 0
        elif not self.has_bodies:
            state = BodyState.OFF
        elif body is None:
            state = BodyState.TOO_LARGE
        elif self._paths and body:
            redacted = redact_json(body, self._paths)
            state, captured = (BodyState.NOT_JSON, b"") if redacted is None else (state, redacted)
        else:
            captured = body
        return CapturedMessage(
            headers=self._redact_headers(headers), body=captured, body_bytes=body_bytes, state=state
        )

    def _redact_headers(self, headers: Headers) -> CapturedHeaders:
        redacted: CapturedHeaders = []
        for raw_name, value in headers[:HEADERS_MAX]:
            name, is_secret = _read_name(raw_name)
            is_secret = is_secret or name in self._headers
            redacted.append((name, REDACTED if is_secret else value[:HEADER_BYTES_MAX].decode("latin-1")))
        return redacted

    def query(self, query: str) -> str:
        """The query with the values of secret parameters redacted."""
        if not query:
            return ""
        parts = []
        for part in query.split("&"):
            name, equals, _ = part.partition("=")
            plain = unquote_plus(name).lower()
            is_secret = (
                plain in self._parameters
                or plain.replace("_", "-") in SECRET_PARAMETERS
                or _has_secret_part(plain)
            )
            parts.append(f"{name}={REDACTED}" if is_secret and equals else part)
        return "&".join(parts)[:TARGET_LENGTH_MAX]


@lru_cache(maxsize=1024)
def _read_name(raw_name: bytes) -> tuple[str, bool]:
    """A header's name in lower case, and whether it has secrets; cached, because the same few recur."""
    name = raw_name.decode("latin-1").lower()
    return name, name in SECRET_HEADERS or _has_secret_part(name)


def _has_secret_part(name: str) -> bool:
    name = name.replace("_", "-")
    return any(part in name for part in SECRET_PARTS)
