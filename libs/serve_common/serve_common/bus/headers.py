"""NATS message headers: the block `NATS/1.0`, its optional status, and its `Key: value` lines.

Why apart from the protocol: the data plane passes headers on as bytes and looks inside only for foreign
clients and for the one status that every request must understand, "no responders".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from serve_common.bus.errors import ProtocolError

NO_RESPONDERS_STATUS: Final = 503
_VERSION: Final = b"NATS/1.0"


def encode_headers(headers: Iterable[tuple[str, str]]) -> bytes:
    """The header block; a key may come more than once. Raises ProtocolError where it would break."""
    lines = [_VERSION]
    for key, value in headers:
        is_key_good = key.isascii() and key.isprintable() and key and ":" not in key and " " not in key
        if not is_key_good:
            raise ProtocolError(f"header key {key!r}: it must be printable ASCII without ':' and blanks")
        if "\r" in value or "\n" in value:
            raise ProtocolError(f"header {key!r}: its value has a line break")
        lines.append(f"{key}: {value.strip(' ')}".encode())
    return b"\r\n".join(lines) + b"\r\n\r\n"


def parse_headers(block: bytes) -> list[tuple[str, str]]:
    """Keys and values in order, values without surrounding blanks; bytes that are no UTF-8 become U+FFFD.

    Raises ProtocolError when the block is none.
    """
    if not block.startswith(_VERSION) or not block.endswith(b"\r\n\r\n"):
        raise ProtocolError(f"headers must begin with NATS/1.0 and end with an empty line: {block[:80]!r}")
    headers: list[tuple[str, str]] = []
    for line in block[:-4].split(b"\r\n")[1:]:
        key, colon, value = line.partition(b":")
        if not key or not colon:
            raise ProtocolError(f"header line without key and colon: {line[:80]!r}")
        headers.append((key.decode("utf-8", "replace"), value.strip(b" ").decode("utf-8", "replace")))
    return headers


def status_of(block: bytes) -> int | None:
    """The status code in the first line of a header block; None when it has none."""
    first_line = block.partition(b"\r\n")[0]
    words = first_line.split(b" ", 2)
    if len(words) < 2 or words[0] != _VERSION or len(words[1]) != 3 or not words[1].isdigit():
        return None
    return int(words[1])


def says_no_responders(block: bytes) -> bool:
    """True when the server answers in place of a subscriber, because there is none."""
    return status_of(block) == NO_RESPONDERS_STATUS
