"""The response of a call as a page shows it: never as markup, and never more than a person can read."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final, Literal

import msgspec

from muster.client.requests import ERROR_CODE_HEADER, ERROR_HEADER, AdminReply

_TEXT_MAX: Final = 200_000
"""Characters that are shown."""
_PRETTY_BYTES_MAX: Final = 256 * 1024
_PRETTY_DEPTH_MAX: Final = 24
"""Deeper JSON would mostly be indentation, megabytes of it."""
_IMAGE_BYTES_MAX: Final = 512 * 1024
_HEX_BYTES: Final = 256
_IMAGES: Final = {
    b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF87a": "image/gif", b"GIF89a": "image/gif",
}  # fmt: skip
_STATUS_HEADER: Final = "x-serve-status"
_OWN_HEADERS: Final = frozenset({_STATUS_HEADER, ERROR_HEADER.lower(), ERROR_CODE_HEADER.lower()})
_HIDDEN: Final = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in (9, 10, 13)
} | {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F)}
"""Control characters, and those that turn the direction of text."""
_HINTS: Final = {
    "no_replica": "No replica could take the call. See the deployment's page for why.",
    "queue_full": "All replicas are busy and the queue is full.",
    "deadline_exceeded": "Choose a longer timeout, or see the deployment's log for what takes long.",
    "user_code_raised": "The application raised an exception; its traceback is in the deployment's log.",
}
_STATUS_HINTS: Final = {
    502: "A replica died, or lost the call, after it may have started.",
    503: "No replica could take the call: none runs, or all are busy.",
    504: "There was no response in time.",
}

Tone = Literal["good", "warn", "bad"]


class CallFailure(msgspec.Struct, frozen=True):
    """Why a call did not lead to the application's own response."""

    text: str
    hint: str = ""


class CallResult(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown of a call."""

    status: int = 0
    """0: there was no response."""
    reason: str = ""
    tone: Tone = "good"
    elapsed_ms: float
    size: int = 0
    """Bytes of the body."""
    headers: tuple[tuple[str, str], ...] = ()
    trace_id: str = ""
    kind: Literal["empty", "json", "text", "image", "bytes"] = "empty"
    text: str = ""
    """The body as text, or its first bytes in hexadecimal digits."""
    image: str = ""
    """Address of the image, with the image in it."""
    note: str = ""
    failure: CallFailure | None = None


class _Problem(msgspec.Struct, frozen=True):
    code: str
    message: str


class _Problems(msgspec.Struct, frozen=True):
    type: str
    error: _Problem


def describe_reply(reply: AdminReply, *, elapsed_s: float, trace_id: str) -> CallResult:
    """What is shown of a response, whatever its status is."""
    headers = {name.lower(): value for name, value in reply.headers.items()}
    number = headers.get(ERROR_CODE_HEADER.lower()) or headers.get(_STATUS_HEADER) or "200"
    status = int(number) if number.isdecimal() and len(number) == 3 else 500
    body = reply.body
    kind, text, image, note = describe_body(body, headers)
    return CallResult(
        status=status,
        reason=_get_reason(status),
        tone="good" if status < 400 else "warn" if status < 500 else "bad",
        elapsed_ms=elapsed_s * 1000,
        size=len(body),
        headers=tuple(
            (show_harmlessly(name), show_harmlessly(value)[:2000])
            for name, value in sorted(reply.headers.items())
            if name.lower() not in _OWN_HEADERS
        ),
        trace_id=trace_id,
        kind=kind,
        text=text,
        image=image,
        note=note,
        failure=_find_failure(body, headers, status),
    )


def describe_body(
    body: bytes, headers: Mapping[str, str]
) -> tuple[Literal["empty", "json", "text", "image", "bytes"], str, str, str]:
    """Kind, text, image and note of a body."""
    if not body:
        return "empty", "", "", ""
    image_type = next((found for start, found in _IMAGES.items() if body.startswith(start)), "")
    if body[:4] == b"RIFF" and body[8:12] == b"WEBP":
        image_type = "image/webp"
    if image_type and len(body) <= _IMAGE_BYTES_MAX:
        return "image", "", f"data:{image_type};base64,{base64.b64encode(body).decode()}", ""
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return "bytes", _dump(body[:_HEX_BYTES]), "", f"The first {min(len(body), _HEX_BYTES)} bytes."
    if "\x00" in text:
        return "bytes", _dump(body[:_HEX_BYTES]), "", f"The first {min(len(body), _HEX_BYTES)} bytes."
    pretty = _format_json(body) if "json" in content_type or body[:1] in b"{[" else None
    shown = show_harmlessly(text if pretty is None else pretty)
    note = f"The first {_TEXT_MAX:,} characters." if len(shown) > _TEXT_MAX else ""
    if pretty is None and "html" in content_type:
        note = f"HTML is shown as its text. {note}".strip()
    if "event-stream" in content_type:
        note = f"A stream is shown whole, when it has ended. {note}".strip()
    return "text" if pretty is None else "json", shown[:_TEXT_MAX], "", note


def describe_size(count: int) -> str:
    """A number of bytes in the unit that people read."""
    if count < 1024:
        return f"{count} B"
    return f"{count / 1024:.1f} KiB" if count < 1024 * 1024 else f"{count / 1024 / 1024:.2f} MiB"


def show_harmlessly(text: str) -> str:
    """The text with its control characters written out."""
    return text.translate(_HIDDEN)


def _format_json(body: bytes) -> str | None:
    if len(body) > _PRETTY_BYTES_MAX:
        return None
    depth = deepest = 0
    for byte in body:  # brackets within texts count too, which only makes the bound stricter
        if byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    if deepest > _PRETTY_DEPTH_MAX:
        return None
    try:
        msgspec.json.decode(body)
        return msgspec.json.format(body, indent=2).decode()
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def _dump(body: bytes) -> str:
    """Bytes as hexadecimal digits with their characters, 16 in a line."""
    lines = []
    for at in range(0, len(body), 16):
        part = body[at : at + 16]
        shown = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in part)
        lines.append(f"{at:04x}  {part.hex(' '):<47}  {shown}")
    return "\n".join(lines)


def _get_reason(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


def _find_failure(body: bytes, headers: Mapping[str, str], status: int) -> CallFailure | None:
    """The failure that the proxy reports; None for a response of the application."""
    if ERROR_HEADER.lower() not in headers:
        return None
    try:
        found = msgspec.json.decode(body, type=_Problems)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not found.type.startswith("urn:muster:"):
        return None
    problem = found.error
    hint = _HINTS.get(problem.code) or _STATUS_HINTS.get(status, "")
    return CallFailure(show_harmlessly(problem.message)[:2000], hint)
