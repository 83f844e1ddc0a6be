"""One line of the access log: what it says of a request, and how long it may get.

Why so little: headers, bodies and queries may hold secrets and are never in it. Why bounded: what a client chooses must
not fill a log, and a line of at most `LINE_BYTES_MAX` is written in one piece, whoever else writes there.
"""

from __future__ import annotations

from typing import Final, final

import msgspec

from serve_common.telemetry.log_lines import cut, encode_line, timestamp

LINE_BYTES_MAX: Final = 4096
"""What Linux writes into a pipe without mixing it with what others write (PIPE_BUF)."""
PATH_LENGTH_MAX: Final = 384
METHOD_LENGTH_MAX: Final = 20
_SECOND_LENGTH: Final = len("1970-01-01T00:00:00.")
_HARD_LENGTH_MAX: Final = 64
"""Of each text of a line that would be too long, or cannot be written as it is."""


class AccessLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What is said of one request; what is not known is left out. Names are those of metrics and spans."""

    kind: str
    """``http``; ``stream`` when the answer came in pieces; ``websocket``."""
    method: str
    path: str
    """As the client sent it, without its query."""
    status: int
    """As it is counted in the metrics: 499 when the client left or the answer broke off, which ``error`` then says."""
    bytes_in: int
    """Of the body, as far as it was read; of a WebSocket's messages."""
    bytes_out: int
    """Of the body, as far as it was handed to the system; of a WebSocket's messages."""
    duration_ms: float
    """From the head of the request to the end of the answer, or of the WebSocket."""
    request_id: str
    endpoint_tag: str = ""
    backend_tag: str = ""
    replica_tag: str = ""
    """The last one that it was sent to."""
    attempts: int = 1
    """Sendings, when there was more than one."""
    messages_in: int | None = None
    """Of a WebSocket: whole messages of the client."""
    messages_out: int | None = None
    close_code: int = 0
    """Of a WebSocket (RFC 6455, 7.4)."""
    error: str = ""
    """Why there is no (whole) answer: the ``code`` that the client was told, or would have been."""
    client: str = ""
    """Its address, or the one that a proxy before this one told of it."""
    trace_id: str = ""
    """Of a request that is traced."""


def bounded_path(path: str) -> str:
    """``path``, as it may stand in a line."""
    return path if len(path) <= PATH_LENGTH_MAX else cut(path, PATH_LENGTH_MAX)


@final
class AccessLines:
    """Turns them into JSON that bears the same ids as all other lines of this process."""

    def __init__(self, ids: dict[str, str]) -> None:
        self._encoder = msgspec.json.Encoder()
        self._ids = ids
        self._second = -1
        self._begins = b""
        """How the timestamps of that second begin: written out once, for it costs as much as the rest of a line."""
        told = msgspec.json.encode({**ids, "level": "info", "timestamp": ""})
        self._tail = b"," + told[1:-2]

    def encode(self, line: AccessLine, at: float) -> bytes:
        """The whole line, with its end; ``at`` is when the request ended, in seconds since 1970."""
        try:
            fields = self._encoder.encode(line)
        except UnicodeError:  # half a character, as Python has those that are no UTF-8
            return self._encode_hard(line, at)
        second = int(at)
        if second != self._second:
            self._second, self._begins = second, timestamp(second)[:_SECOND_LENGTH].encode()
        whole = b'{"event":"request",%b%b%b%06dZ"}\n' % (
            fields[1:-1],
            self._tail,
            self._begins,
            (at - second) * 1e6,
        )
        return whole if len(whole) <= LINE_BYTES_MAX else self._encode_hard(line, at)

    def _encode_hard(self, line: AccessLine, at: float) -> bytes:
        """Every text cut short and without what cannot be written."""
        fields = {
            name: _plain(value) if isinstance(value, str) else value
            for name, value in msgspec.structs.asdict(line).items()
            if value not in ("", None)
        }
        return encode_line(
            {"event": "request", **fields, **self._ids, "level": "info", "timestamp": timestamp(at)}
        )


def _plain(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in cut(text, _HARD_LENGTH_MAX))
