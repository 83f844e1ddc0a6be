"""The words of the NATS client protocol, as few as the data plane needs: what a server says, as values, and the lines
that a client writes.

Why: the general client costs a third of the data plane's throughput. What is here is pure, and can be tested byte by
byte.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, NoReturn

import msgspec

from serve_common.bus.errors import InvalidSubject

CLIENT_LINE_BYTES_MAX: Final = 4096
"""Servers drop a client that writes a longer line."""
SUBJECT_BYTES_MAX: Final = 255

CRLF: Final = b"\r\n"
PING: Final = b"PING\r\n"
PONG: Final = b"PONG\r\n"
_WORD_BREAKS: Final = b" \t\r\n\x00"
_WORDS_BYTES_MAX: Final = CLIENT_LINE_BYTES_MAX - 64
_CONTROL_BYTES: Final = bytes(range(33)) + b"\x7f"


class Message(msgspec.Struct, frozen=True, gc=False):
    """MSG or HMSG: a message for the subscription `sid`. `reply` is empty when no answer is expected."""

    subject: bytes
    sid: int
    reply: bytes
    payload: bytes
    headers: bytes | None = None


class Greeting(msgspec.Struct, frozen=True):
    """INFO: what the server says about itself, at first and again when it changes. Sizes in bytes."""

    server_id: str = ""
    max_payload: int = 1024 * 1024
    tls_required: bool = False
    tls_available: bool = False
    lame_duck: bool = msgspec.field(default=False, name="ldm")
    nonce: str = ""
    """To be signed by who logs in with a key."""


class ServerError(msgspec.Struct, frozen=True):
    """-ERR: the server refused something; `text` comes without its quotes."""

    text: str

    @property
    def is_permission_violation(self) -> bool:
        """One publish or subscription was refused; the connection goes on."""
        return self.text.lower().startswith("permissions violation")

    @property
    def is_authorization_failure(self) -> bool:
        """The server does not let this user in (any more). Who only took too long to say its name, or whose token has
        expired since, may try again."""
        words = self.text.lower()
        may_try_again = "timeout" in words or "expired" in words
        return not self.is_permission_violation and not may_try_again and "auth" in words


class Signal(enum.Enum):
    """The verbs that carry nothing."""

    PING = "PING"
    PONG = "PONG"
    OK = "+OK"


ServerOp = Message | Greeting | ServerError | Signal


def encode_connect(*, name: str, login: Mapping[str, str], tls_required: bool = False) -> bytes:
    """The CONNECT line; ``login`` has the fields that say who connects."""
    options: dict[str, str | int | bool] = {
        "verbose": False,
        "pedantic": False,
        "tls_required": tls_required,
        "headers": True,
        "no_responders": True,
        "echo": True,
        "lang": "python",
        "version": "0.1.0",
        "name": name,
        # 1 asks for INFO while connected, which is how a lame duck makes itself known
        "protocol": 1,
        **login,
    }
    return b"CONNECT " + msgspec.json.encode(options) + CRLF


def encode_pub(subject: bytes, reply: bytes, payload: bytes) -> bytes:
    """A whole PUB with its payload, which is copied: for small ones. Else as `encode_pub_line`."""
    words = subject + reply
    length = len(words)
    if not subject or length > _WORDS_BYTES_MAX or len(words.translate(None, _WORD_BREAKS)) != length:
        _refuse_words(subject, reply)
    if reply:
        return b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(payload), payload)
    return b"PUB %b %d\r\n%b\r\n" % (subject, len(payload), payload)


def encode_pub_line(subject: bytes, reply: bytes, payload_bytes: int) -> bytes:
    """The PUB line; the payload and a CRLF must follow it (so that a large payload need not be copied).

    `reply` may be empty. Raises InvalidSubject where the words would not reach the server as they are.
    """
    _check_words(subject, reply)
    if reply:
        return b"PUB %b %b %d\r\n" % (subject, reply, payload_bytes)
    return b"PUB %b %d\r\n" % (subject, payload_bytes)


def encode_hpub_line(subject: bytes, reply: bytes, headers_bytes: int, payload_bytes: int) -> bytes:
    """The HPUB line; headers, payload and a CRLF must follow it. Else as `encode_pub_line`."""
    _check_words(subject, reply)
    total_bytes = headers_bytes + payload_bytes
    if reply:
        return b"HPUB %b %b %d %d\r\n" % (subject, reply, headers_bytes, total_bytes)
    return b"HPUB %b %d %d\r\n" % (subject, headers_bytes, total_bytes)


def encode_sub(subject: bytes, queue: bytes, sid: int) -> bytes:
    """The SUB line; `queue` may be empty. Raises InvalidSubject for a bad pattern or queue name."""
    check_subject(subject, may_have_wildcards=True)
    if not queue:
        return b"SUB %b %d\r\n" % (subject, sid)
    check_subject(queue)
    return b"SUB %b %b %d\r\n" % (subject, queue, sid)


def encode_unsub(sid: int) -> bytes:
    """The UNSUB line; takes effect at once."""
    return b"UNSUB %d\r\n" % sid


def check_subject(subject: bytes, *, may_have_wildcards: bool = False) -> bytes:
    """Return `subject` when it is 1 to 255 bytes of non-empty tokens without blanks or control characters.

    Wildcards `*` (a whole token) and `>` (the last token) pass only where `may_have_wildcards`.
    Raises InvalidSubject, which says what is wrong.
    """
    if not 1 <= len(subject) <= SUBJECT_BYTES_MAX:
        raise InvalidSubject(f"subject of {len(subject)} bytes: it must have 1 to {SUBJECT_BYTES_MAX}")
    if subject.translate(None, _CONTROL_BYTES) != subject:
        raise InvalidSubject(f"subject {subject!r} has a blank or a control character")
    tokens = subject.split(b".")
    if b"" in tokens:
        raise InvalidSubject(f"subject {subject!r} has an empty token")
    if not may_have_wildcards and (b"*" in tokens or b">" in tokens):
        raise InvalidSubject(f"subject {subject!r} has a wildcard where none is allowed")
    if b">" in tokens[:-1]:
        raise InvalidSubject(f"subject {subject!r} has '>' before its last token")
    return subject


def _check_words(subject: bytes, reply: bytes) -> None:
    words = subject + reply
    length = len(words)
    if not subject or length > _WORDS_BYTES_MAX or len(words.translate(None, _WORD_BREAKS)) != length:
        _refuse_words(subject, reply)


def _refuse_words(subject: bytes, reply: bytes) -> NoReturn:
    length = len(subject) + len(reply)
    if length > _WORDS_BYTES_MAX:
        raise InvalidSubject(f"subject and reply of {length} bytes: too long for one line")
    raise InvalidSubject(f"subject {subject!r}, reply {reply!r}: each must be one word")
