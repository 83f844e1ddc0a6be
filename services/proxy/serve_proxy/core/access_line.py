"""One line of the access log: its fields, and how long it may get.

Why so little: headers, bodies and queries may hold secrets and are never in it. Why bounded: a client must not be able
to fill a log, and a line of at most `LINE_BYTES_MAX` is written atomically beside other writers.
"""

from __future__ import annotations

from typing import Final, final

import msgspec

from serve_common.telemetry.log_lines import cut, encode_line, timestamp

LINE_BYTES_MAX: Final = 4096
"""Bytes that Linux writes to a pipe atomically (PIPE_BUF)."""
PATH_LENGTH_MAX: Final = 384
METHOD_LENGTH_MAX: Final = 20
_SECOND_LENGTH: Final = len("1970-01-01T00:00:00.")
_TRUNCATED_LENGTH_MAX: Final = 64
"""Maximum length of each text when the line would be too long, or cannot be encoded as it is."""


class AccessLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The fields of one request; unknown ones are left out. Names are those of metrics and spans."""

    kind: str
    """``http``; ``stream`` for a streamed response; ``websocket``."""
    method: str
    path: str
    """The path as the client sent it, without the query."""
    status: int
    """Status as counted in metrics; 499 when the client left or the response broke off, with ``error`` set."""
    bytes_in: int
    """Bytes of the request body that were read; for a WebSocket, bytes of messages received."""
    bytes_out: int
    """Bytes of the response body handed to the system; for a WebSocket, bytes of messages sent."""
    duration_ms: float
    """From the head of the request to the end of the response, or of the WebSocket."""
    request_id: str
    endpoint_tag: str = ""
    backend_tag: str = ""
    replica_tag: str = ""
    """The replica of the last attempt."""
    attempts: int = 1
    """Attempts, when there was more than one."""
    messages_in: int | None = None
    """WebSocket only: whole messages received from the client."""
    messages_out: int | None = None
    """WebSocket only: whole messages sent to the client."""
    close_code: int = 0
    """WebSocket only: the close code (RFC 6455, 7.4)."""
    error: str = ""
    """The error ``code`` when there is no complete response, as sent to the client where that was possible."""
    client: str = ""
    """The client's address, as forwarded by trusted proxies in front if there are any."""
    trace_id: str = ""
    """Trace id; empty when the request is not traced."""


def bounded_path(path: str) -> str:
    """``path``, cut to at most `PATH_LENGTH_MAX` characters."""
    return path if len(path) <= PATH_LENGTH_MAX else cut(path, PATH_LENGTH_MAX)


@final
class AccessLines:
    """Encodes access lines as JSON, with the same ids as all other log lines of this process."""

    def __init__(self, ids: dict[str, str]) -> None:
        self._encoder = msgspec.json.Encoder()
        self._ids = ids
        self._second = -1
        self._timestamp_prefix = b""
        """Timestamp prefix of that second: formatted once, because it costs as much as the rest of a line."""
        common = msgspec.json.encode({**ids, "level": "info", "timestamp": ""})
        self._tail = b"," + common[1:-2]

    def encode(self, line: AccessLine, at: float) -> bytes:
        """The line with its newline; ``at`` is when the request ended, in seconds since 1970."""
        try:
            fields = self._encoder.encode(line)
        except UnicodeError:  # a lone surrogate, as Python decodes bytes that are not UTF-8
            return self._encode_truncated(line, at)
        second = int(at)
        if second != self._second:
            self._second, self._timestamp_prefix = second, timestamp(second)[:_SECOND_LENGTH].encode()
        whole = b'{"event":"request",%b%b%b%06dZ"}\n' % (
            fields[1:-1],
            self._tail,
            self._timestamp_prefix,
            (at - second) * 1e6,
        )
        return whole if len(whole) <= LINE_BYTES_MAX else self._encode_truncated(line, at)

    def _encode_truncated(self, line: AccessLine, at: float) -> bytes:
        """Encode with every text cut short and unprintable characters replaced."""
        fields = {
            name: _sanitize(value) if isinstance(value, str) else value
            for name, value in msgspec.structs.asdict(line).items()
            if value not in ("", None)
        }
        return encode_line(
            {"event": "request", **fields, **self._ids, "level": "info", "timestamp": timestamp(at)}
        )


def _sanitize(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in cut(text, _TRUNCATED_LENGTH_MAX))
