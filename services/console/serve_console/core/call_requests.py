"""A request to an endpoint as a person writes it: its parts, how they are checked, and how bodies are encoded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import quote

import msgspec

from serve_common.config.backend import METHODS
from serve_common.errors import BadField

BODY_BYTES_MAX: Final = 900 * 1024
"""Most bytes of a body: a NATS message carries 1 MiB, headers included."""
HEADERS_MAX: Final = 40
_HEADER_BYTES_MAX: Final = 4096
_TARGET_BYTES_MAX: Final = 8 * 1024
_TIMEOUT_S_MAX: Final = 120
DEFAULT_TIMEOUT_S: Final = 30
METHOD_CHOICES: Final = tuple(METHODS)
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_HEADER_VALUE: Final = re.compile(r"[\t -~]*")
_OWN_PREFIXES: Final = ("x-serve-method", "x-serve-path", "x-serve-query", "x-serve-stream", "nats-")
_PATH_SAFE: Final = "/%:@!$&'()*+,;=~"
_QUERY_SAFE: Final = "/%:@!$&'()*+,;=~?"
CONTENT_TYPES: Final = (
    "application/json", "text/plain; charset=utf-8", "application/x-www-form-urlencoded", "application/octet-stream",
)  # fmt: skip


class SentFile(msgspec.Struct, frozen=True):
    """A file that a browser sent."""

    name: str
    content_type: str
    content: bytes


class MultipartField(msgspec.Struct, frozen=True):
    """One field of a form that is sent with files."""

    name: str
    text: str
    file: SentFile | None = None
    """If set, ``text`` is ignored."""


class CallRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that can be sent."""

    method: str
    path: str
    """Percent-encoded, from ``/``."""
    query: str = ""
    """Percent-encoded, without ``?``."""
    headers: tuple[tuple[str, str], ...] = ()
    """Those of the application, ``Content-Type`` included."""
    body: bytes = b""
    file_name: str = ""
    """Name of the file that the body is; empty: it was written."""
    fields: tuple[MultipartField, ...] = ()
    """What the body was encoded from, if it is a form with files."""

    @property
    def target(self) -> str:
        """Path and query."""
        return f"{self.path}?{self.query}" if self.query else self.path


def parse_timeout(text: str) -> int:
    """Seconds until a call is given up. Raises `BadField`."""
    text = text.strip()
    if not text:
        return DEFAULT_TIMEOUT_S
    if not (text.isascii() and text.isdigit()) or len(text) > 6 or not 1 <= int(text) <= _TIMEOUT_S_MAX:
        raise BadField("timeout", f"must be whole seconds, 1 to {_TIMEOUT_S_MAX}")
    return int(text)


def parse_headers(text: str) -> list[tuple[str, str]]:
    """Headers, one on each line. Raises `BadField`."""
    headers: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines()[: HEADERS_MAX + 20], 1):
        if line.strip():
            name, colon, value = line.partition(":")
            if not colon:
                raise BadField("headers", f"line {number} is not written as Name: value")
            headers.append(check_header(name.strip(), value.strip(), "headers"))
    if len(headers) > HEADERS_MAX:
        raise BadField("headers", f"are more than {HEADERS_MAX}")
    return headers


def check_header(name: str, value: str, field: str) -> tuple[str, str]:
    """The header, if it can be sent. Raises `BadField` naming ``field``."""
    if _HEADER_NAME.fullmatch(name) is None:
        raise BadField(field, f"{name[:60]!r} is not a header's name")
    if name.lower().startswith(_OWN_PREFIXES):
        raise BadField(field, f"{name} is set by the console")
    if _HEADER_VALUE.fullmatch(value) is None:
        raise BadField(field, f"the value of {name} has characters other than printable ASCII")
    if len(value) > _HEADER_BYTES_MAX:
        raise BadField(field, f"the value of {name} is longer than {_HEADER_BYTES_MAX} bytes")
    return name, value


def check_request(request: CallRequest) -> CallRequest:
    """The request, if it fits into a NATS message. Raises `BadField`."""
    if len(request.target) > _TARGET_BYTES_MAX:
        raise BadField("path", f"path and query are longer than {_TARGET_BYTES_MAX} bytes")
    if len(request.headers) > HEADERS_MAX:
        raise BadField("headers", f"are more than {HEADERS_MAX}")
    if len(request.body) > BODY_BYTES_MAX:
        raise BadField(
            "file" if request.file_name else "body",
            f"is {len(request.body) / 1024:,.0f} KiB; the console sends at most {BODY_BYTES_MAX // 1024} KiB, "
            "because it calls over NATS, whose messages carry 1 MiB. Send it over HTTP, with the curl line below",
        )
    return request


def build_free_request(values: Mapping[str, str], file: SentFile | None) -> CallRequest:
    """The request that was written by hand; a body that is too large is left for `check_request`.

    Raises `BadField` naming the field.
    """
    method = values.get("method", "POST")
    if method not in METHOD_CHOICES:
        raise BadField("method", f"is none of {', '.join(METHOD_CHOICES)}")
    path, _, query = values.get("path", "").strip().partition("?")
    if path and not path.startswith("/"):
        raise BadField("path", "must start with a slash")
    written = values.get("query", "").strip().removeprefix("?")
    if query and written:
        raise BadField("query", "the path has a query too")
    headers = parse_headers(values.get("headers", ""))
    body, headers, file_name = build_raw_body(values, file, headers)
    return CallRequest(
        method=method,
        path=quote(path or "/", safe=_PATH_SAFE),
        query=quote(query or written, safe=_QUERY_SAFE),
        headers=tuple(headers),
        body=body,
        file_name=file_name,
    )


def build_raw_body(
    values: Mapping[str, str], file: SentFile | None, headers: Sequence[tuple[str, str]]
) -> tuple[bytes, list[tuple[str, str]], str]:
    """Body, headers and file's name of what was written or chosen as a body. Raises `BadField`."""
    text = values.get("body", "")
    chosen = values.get("content_type", "")
    if chosen and chosen not in CONTENT_TYPES:
        raise BadField("content_type", "is not one of the list")
    if file is not None and text.strip():
        raise BadField("file", "there is a written body too; send one of the two")
    body = text.encode() if file is None else file.content
    has_type = any(name.lower() == "content-type" for name, _ in headers)
    if not body or has_type:
        return body, list(headers), "" if file is None else file.name
    content_type = chosen or (_guess_type(text) if file is None else clean_type(file.content_type))
    return body, [*headers, ("Content-Type", content_type)], "" if file is None else file.name


def clean_type(text: str) -> str:
    """A browser's content type, or that of plain bytes where it is none."""
    return text if re.fullmatch(r"[\w.+-]{1,60}/[\w.+-]{1,60}", text, re.ASCII) else CONTENT_TYPES[-1]


def _guess_type(text: str) -> str:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return CONTENT_TYPES[1]
    return CONTENT_TYPES[0]


def encode_multipart(fields: Sequence[MultipartField], boundary: str) -> bytes:
    """A body of the type ``multipart/form-data``; ``boundary`` must come in no field."""
    parts: list[bytes] = []
    for field in fields:
        head = f'Content-Disposition: form-data; name="{_escape(field.name)}"'
        content = field.text.encode()
        if field.file is not None:
            head += f'; filename="{_escape(field.file.name)}"\r\nContent-Type: {clean_type(field.file.content_type)}'
            content = field.file.content
        parts.append(f"--{boundary}\r\n{head}\r\n\r\n".encode() + content + b"\r\n")
    return b"".join(parts) + f"--{boundary}--\r\n".encode()


def _escape(text: str) -> str:
    """A name within quotes, as browsers escape it."""
    return text.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
