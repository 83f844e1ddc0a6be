"""Reads what a NATS server writes, however the network has cut it.

Why apart from the protocol's words: this is the part that must be quick with every byte and must not believe any: all
it keeps has a limit. It accepts what a server writes (upper-case verbs, single spaces), not every spelling that the
description of the protocol would allow.
"""

from __future__ import annotations

from typing import Final

import msgspec

from serve_common.bus.errors import ProtocolError
from serve_common.bus.protocol import (
    CLIENT_LINE_BYTES_MAX,
    CRLF,
    Greeting,
    Message,
    ServerError,
    ServerOp,
    Signal,
)

SERVER_LINE_BYTES_MAX: Final = CLIENT_LINE_BYTES_MAX + 256
"""A server's own line repeats a client's words and adds an id, a size or an error's text."""
GREETING_BYTES_MAX: Final = 32 * 1024
PAYLOAD_BYTES_MAX: Final = 64 * 1024 * 1024
"""No NATS server can be configured above this."""

_CR: Final = 13
_MESSAGE_VERBS: Final = frozenset((b"MSG", b"HMSG"))
_SMALL_NUMBERS: Final = {b"%d" % number: number for number in range(2048)}
"""Ids and sizes as nearly all lines have them: looking one up is a third of checking and reading it."""
_SIGNALS: Final = {signal.value.encode(): signal for signal in Signal}
_greeting_decoder = msgspec.json.Decoder(Greeting)


class Parser:
    """Turns the server's bytes, cut anywhere, into values. Keeps at most one incomplete value."""

    __slots__ = ("_kept", "_kept_bytes", "_needed_bytes", "_payload_bytes_max")

    def __init__(self, *, payload_bytes_max: int = PAYLOAD_BYTES_MAX) -> None:
        """`payload_bytes_max` counts headers and payload of one message together."""
        self._payload_bytes_max = payload_bytes_max
        # A large payload arrives in many pieces: they are joined once, when the last one is there.
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._needed_bytes = 0

    def feed(self, data: bytes) -> list[ServerOp]:
        """The values that `data` completes, in order.

        Raises ProtocolError, which names the verb and what is wrong; the parser must not be used after that.
        """
        if self._kept:
            self._kept.append(data)
            self._kept_bytes += len(data)
            if self._kept_bytes < self._needed_bytes:
                return []
            data = b"".join(self._kept)
            self._kept.clear()
        ops: list[ServerOp] = []
        at, end = 0, len(data)
        while at < end:
            # Looking for one byte is three times as fast as looking for two.
            line_end = data.find(b"\n", at) - 1
            if line_end < at or data[line_end] != _CR:
                line_end = data.find(CRLF, at)
                if line_end < 0:
                    _check_line_length(data, at, end - 1)
                    self._keep(data, at, end - at + 1)
                    break
            if line_end - at > SERVER_LINE_BYTES_MAX:
                _check_line_length(data, at, line_end)
            words = data[at:line_end].split(b" ")
            if words[0] not in _MESSAGE_VERBS:
                ops.append(_decode_line(data[at:line_end]))
                at = line_end + 2
                continue
            subject, sid, reply, headers_bytes, total_bytes = _decode_message(words)
            if total_bytes > self._payload_bytes_max:
                raise ProtocolError(f"message of {total_bytes} bytes: at most {self._payload_bytes_max}")
            body = line_end + 2
            body_end = body + total_bytes
            at_next = body_end + 2
            if at_next > end:
                self._keep(data, at, at_next - at)
                break
            if data[body_end:at_next] != CRLF:
                raise ProtocolError(f"message of {total_bytes} bytes is not ended by CRLF")
            if headers_bytes < 0:
                ops.append(Message(subject, sid, reply, data[body:body_end]))
            else:
                split = body + headers_bytes
                ops.append(Message(subject, sid, reply, data[split:body_end], data[body:split]))
            at = at_next
        return ops

    def _keep(self, data: bytes, at: int, needed_bytes: int) -> None:
        rest = data[at:]
        self._kept.append(rest)
        self._kept_bytes = len(rest)
        self._needed_bytes = needed_bytes


def _check_line_length(data: bytes, at: int, line_end: int) -> None:
    length = line_end - at
    if length > SERVER_LINE_BYTES_MAX:
        limit = GREETING_BYTES_MAX if data.startswith(b"INFO ", at) else SERVER_LINE_BYTES_MAX
        if length > limit:
            verb = data[at : at + 8].split(b" ")[0]
            raise ProtocolError(f"{verb!r} line of {length} bytes or more: at most {limit}")


def _decode_message(words: list[bytes]) -> tuple[bytes, int, bytes, int, int]:
    """Subject, sid, reply, size of the headers (-1: a MSG has none) and size of headers and payload."""
    if words[0] == b"MSG":
        if len(words) == 5:
            _, subject, sid, reply, size = words
        elif len(words) == 4:
            _, subject, sid, size = words
            reply = b""
        else:
            raise ProtocolError(f"MSG has 3 or 4 words after it, not {len(words) - 1}: {_shown(words)}")
        try:
            return subject, _SMALL_NUMBERS[sid], reply, -1, _SMALL_NUMBERS[size]
        except KeyError:
            return subject, _number(words, sid), reply, -1, _number(words, size)
    if not 5 <= len(words) <= 6:
        raise ProtocolError(f"HMSG has 4 or 5 words after it, not {len(words) - 1}: {_shown(words)}")
    reply = words[3] if len(words) == 6 else b""
    headers_bytes, total_bytes = _number(words, words[-2]), _number(words, words[-1])
    if headers_bytes > total_bytes:
        raise ProtocolError(f"HMSG headers of {headers_bytes} bytes in {total_bytes} bytes: {_shown(words)}")
    return words[1], _number(words, words[2]), reply, headers_bytes, total_bytes


def _decode_line(line: bytes) -> ServerOp:
    signal = _SIGNALS.get(line)
    if signal is not None:
        return signal
    verb, _, rest = line.partition(b" ")
    if verb == b"INFO":
        try:
            return _greeting_decoder.decode(rest)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"INFO cannot be read: {error}") from error
    if verb == b"-ERR":
        return ServerError(rest.decode("utf-8", "replace").strip().strip("'"))
    if verb in _SIGNALS:
        raise ProtocolError(f"{verb.decode()} stands alone: {line[:200]!r}")
    raise ProtocolError(f"unknown verb {verb[:32]!r}")


def _number(words: list[bytes], word: bytes) -> int:
    if word.isdigit() and len(word) <= 19:
        return int(word)
    raise ProtocolError(f"{word[:32]!r} is no number: {_shown(words)}")


def _shown(words: list[bytes]) -> str:
    return repr(b" ".join(words)[:200])
