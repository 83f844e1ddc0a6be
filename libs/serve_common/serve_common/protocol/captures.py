"""A captured request with its response, as proxies publish it and the stream of captures retains it."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from serve_common.protocol.subjects import Amount, Count, Label, Moment

_HEADERS_MAX: Final = 1_000
_TEXT: Final = 64 * 1024
CapturedHeaders = Annotated[list[tuple[str, str]], Meta(max_length=_HEADERS_MAX)]


class BodyState(Enum):
    """Whether a body was captured, or why not."""

    CAPTURED = "captured"
    """It is there, redacted as configured; also an empty one."""
    OFF = "off"
    """The endpoint's capture is without bodies."""
    TOO_LARGE = "too_large"
    """It exceeds 64 KiB."""
    NOT_JSON = "not_json"
    """It should have been redacted, and is no JSON."""
    STREAMED = "streamed"
    """It came in pieces, which are not collected."""


class CapturedMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The headers and the body of a request or a response."""

    headers: CapturedHeaders = []
    """Names in lower case; the value of a redacted one is ``redacted``."""
    body: bytes = b""
    body_bytes: Count = 0
    """Size of the body before it was redacted; 0 for one that came in pieces."""
    state: BodyState = BodyState.CAPTURED


class CapturedPair(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request and its response."""

    at: Moment
    """When the response came, in seconds since 1970."""
    request_id: Label
    endpoint_tag: Label
    backend_tag: Label
    """The backend that responded."""
    method: Label
    path: Annotated[str, Meta(max_length=_TEXT)]
    """Path below the endpoint's route."""
    query: Annotated[str, Meta(max_length=_TEXT)] = ""
    request: CapturedMessage
    status: Count
    response: CapturedMessage
    duration_ms: Amount = 0.0
    """Milliseconds from the dispatch of the request to its response."""
