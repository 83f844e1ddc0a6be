"""Log lines: JSON objects of bounded length, written whole to standard error; those that recur are rate-limited."""

from __future__ import annotations

import errno
import json
import os
import select
import threading
from collections import Counter
from collections.abc import Callable, Container, Mapping
from datetime import UTC, datetime
from typing import Any, Final, final

import msgspec
import structlog

from serve_common.clock import Clock

TEXT_LENGTH_MAX: Final = 16 * 1024
"""Longest message or traceback, in characters."""
_FIELD_LENGTH_MAX: Final = 2 * 1024
_FIELDS_MAX: Final = 64
_LINE_BYTES_MAX: Final = 60 * 1024


def timestamp(at: float) -> str:
    """``at``, in seconds since 1970, as all log lines have it."""
    return f"{datetime.fromtimestamp(at, tz=UTC).replace(tzinfo=None).isoformat(timespec='microseconds')}Z"


def cut(text: str, length_max: int = TEXT_LENGTH_MAX) -> str:
    """Cut ``text`` to ``length_max`` characters, and append how many are missing."""
    if len(text) <= length_max:
        return text
    return f"{text[:length_max]}… ({len(text) - length_max} more characters)"


def encode_line(fields: Mapping[str, Any]) -> bytes:
    """``fields`` as a line; values that JSON cannot represent are encoded as their ``str``.

    Why it never fails: a log call must not raise in the code that logs, least of all in a user's.
    """
    try:
        line = msgspec.json.encode(fields, enc_hook=_to_text)
    except Exception:  # noqa: BLE001 - a value's own methods ran, or text was no text
        line = _encode_hard(fields)
    if len(line) > _LINE_BYTES_MAX:
        line = _encode_hard(fields)
    return line + b"\n"


def encode_text_line(text: str) -> bytes:
    """A finished line as bytes; one that is too long for a message is replaced by its first characters."""
    line = text.encode(errors="backslashreplace")
    if len(line) <= _LINE_BYTES_MAX:
        return line
    return encode_line({"event": "long_log_line", "begins": cut(text, _FIELD_LENGTH_MAX)})


def user_fields(extra: Mapping[str, Any], taken: Container[str]) -> dict[str, Any]:
    """A log call's own fields, renamed where their names are ``taken`` already."""
    fields: dict[str, Any] = {}
    for name, value in extra.items():
        if len(fields) >= _FIELDS_MAX:
            fields["extra_left_out"] = len(extra) - _FIELDS_MAX
            break
        fields[f"extra_{name}" if name in taken else name] = value
    return fields


def dropped_line(at: float, ids: Mapping[str, str], count: int, why: str) -> bytes:
    """The line that reports ``count`` dropped lines until ``at``, in seconds since 1970."""
    return encode_line(
        {
            "event": "log_lines_dropped",
            "count": count,
            "reason": why,
            **ids,
            "level": "warning",
            "timestamp": timestamp(at),
        }
    )


def _to_text(value: Any) -> str:
    return cut(str(value), _FIELD_LENGTH_MAX)


def _encode_hard(fields: Mapping[str, Any]) -> bytes:
    """Encode every value as short text, which cannot fail; the whole never exceeds a line's length by much."""
    texts: dict[str, str] = {}
    left = _LINE_BYTES_MAX // 6  # what a character can become when it is escaped
    for name, value in fields.items():
        try:
            text = value if isinstance(value, str) else repr(value)
        except Exception as error:  # noqa: BLE001 - the user's __repr__
            text = f"<{type(value).__name__} that cannot be told: {type(error).__name__}>"
        texts[str(name)] = text = cut(text, min(_FIELD_LENGTH_MAX, max(left, 0)))
        left -= len(text)
    return json.dumps(texts).encode()


DISK_FULL: Final = "disk_full"
NOT_WRITTEN: Final = "not_written"
TOO_MANY: Final = "too_many"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_WAIT_MS: Final = 1000
"""Milliseconds to wait for a non-blocking stream that takes nothing."""


@final
class DroppedLines:
    """Counts lines of this process that reached no log, by reason. Any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter({DISK_FULL: 0, NOT_WRITTEN: 0, TOO_MANY: 0})

    def count(self, reason: str, lines: int) -> None:
        """Count ``lines`` more."""
        with self._lock:
            self._counts[reason] += lines

    def by_reason(self) -> dict[str, int]:
        """Counts so far; every reason is present."""
        with self._lock:
            return dict(self._counts)


dropped_lines: Final = DroppedLines()
"""The counts of this process."""


@final
class StandardError:
    """Writes whole lines from any thread; blocks the calling thread while the stream is not read.

    Why not Python's own stream: it raises in the code that logs, and it keeps what a full disk did not take and starts
    the next line with that. Here a line that was cut off is ended first, and dropped lines are counted and reported by
    a line as soon as there is space. A failing log never ends a process.
    """

    def __init__(self, ids: Mapping[str, str], clock: Clock, descriptor: int = 2) -> None:
        """``ids`` are fields of the lines that report dropped ones."""
        self._ids = ids
        self._clock = clock
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._is_torn = False
        """The last line was written in part only."""
        self._unreported = 0
        self._reason = ""

    def write(self, lines: bytes) -> None:
        """Write ``lines``; those that cannot be written are counted, and reported by a line as soon as possible."""
        with self._lock:
            reported = self._unreported
            head = dropped_line(self._clock.now(), self._ids, reported, self._reason) if reported else b""
            written, failure = self._put(head + lines)
            if written >= len(head):
                self._unreported -= reported
            if failure is not None:
                missing = lines[max(0, written - len(head)) :].count(b"\n")
                self._unreported += missing
                self._reason = failure.strerror or str(failure)
                dropped_lines.count(DISK_FULL if failure.errno in _FULL else NOT_WRITTEN, missing)

    def put(self, lines: bytes) -> None:
        """Write ``lines``, without counting. Raises OSError; a part of the last line may have been written."""
        with self._lock:
            _, failure = self._put(lines)
        if failure is not None:
            raise failure

    def _put(self, lines: bytes) -> tuple[int, OSError | None]:
        """How many bytes of ``lines`` were written, and the error that prevented the rest."""
        left = memoryview(lines)
        try:
            if self._is_torn:
                os.write(self._descriptor, b"\n")
                self._is_torn = False
            while left:
                left = left[self._write_some(left) :]
        except OSError as error:
            written = len(lines) - len(left)
            self._is_torn = self._is_torn or (written > 0 and lines[written - 1] != ord("\n"))
            return written, error
        return len(lines), None

    def _write_some(self, left: memoryview) -> int:
        while True:
            try:
                return os.write(self._descriptor, left)
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                if not poll.poll(_WAIT_MS):
                    raise


@final
class RateLimitedLogger:
    """Calls `write` at most once per `interval_s` (by the `now_s` that it is given) for one kind of event.

    Why: a refused permission or a failing callback can recur tens of thousands of times a second.
    """

    __slots__ = ("_interval_s", "_last_s", "_left_out", "_write")

    def __init__(self, write: Callable[..., Any], interval_s: float = 1.0) -> None:
        self._write = write
        self._interval_s = interval_s
        self._last_s: float | None = None
        self._left_out = 0

    def log(self, now_s: float, event: str, **fields: object) -> None:
        """Write the line with `left_out` added, or count it."""
        if self._last_s is not None and now_s - self._last_s < self._interval_s:
            self._left_out += 1
            return
        self._write(event, left_out=self._left_out, **fields)
        self._last_s = now_s
        self._left_out = 0


_log = structlog.get_logger(__name__)

KINDS: Final = (
    "host_report", "proxy_report", "leader_notice", "wake", "host_goal", "snapshot", "identity", "evaluation"
)  # fmt: skip
"""Kinds of messages, as the metric names them; ``identity`` is a report in the name of another live process."""
_ERROR_LENGTH_MAX: Final = 500


@final
class RefusedMessages:
    """Counts refused messages by kind, and logs one per second of each; refusing one affects no other.

    Why counted too: a sender of unreadable messages repeats them every second, and the log must not fill with them.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        """``now`` gives monotonic seconds."""
        self.counts: Final = dict.fromkeys(KINDS, 0)
        self._now = now
        self._logs = {kind: RateLimitedLogger(_log.error) for kind in KINDS}

    def refuse(self, kind: str, sender: str, error: Exception) -> None:
        """Count a message of one of `KINDS`; ``sender`` is the subject or name that it came by."""
        self.counts[kind] += 1
        text = f"{type(error).__name__}: {error}"[:_ERROR_LENGTH_MAX]
        self._logs[kind].log(
            self._now(), "message_refused", message=kind, sender=repr(sender[:200]), error=text
        )
