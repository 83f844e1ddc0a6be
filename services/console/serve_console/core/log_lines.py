"""Log lines as pages show them, and how many of them a tab gets."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, final

import msgspec

from serve_common.names import short_name
from serve_common.protocol.reports import LEVELS
from serve_console.core.plain_text import clean_text

LINES_PER_S: Final = 200.0
"""Most lines that a tab gets in a second, on average."""
_TEXT_MAX: Final = 4000
_ID_MAX: Final = 128
_SHOWN: Final = frozenset(
    (
        *("timestamp", "level", "event", "logger", "message", "exception", "stack", "traceback", "source"),
        *("service", "replica_tag", "backend_tag", "host_id", "request_id", "encoding", "epoch", "version"),
    )
)
_OF_USERS: Final = ("log", "print")


class LogEntry(msgspec.Struct, frozen=True):
    """One line."""

    at: float
    """In seconds since 1970."""
    level: str
    source: str
    """The replica."""
    text: str
    """Without control characters; further lines hold a traceback."""
    request_id: str
    """Empty: it belongs to no request."""


def parse_entry(line: Mapping[str, Any], now: float) -> LogEntry:
    """A line as it is shown. ``now`` is its time if it has none."""
    level = str(line.get("level", "info")).lower()
    event = line.get("event")
    message = _text(line.get("message", "") if event in _OF_USERS else line.get("event", ""))
    if event == "log" and line.get("logger"):
        message = f"{_text(line['logger'])}: {message}"
    fields = [
        f"{name}={_text(value)}"
        for name, value in line.items()
        if name not in _SHOWN or (event not in _OF_USERS and name in ("message", "logger"))
    ]
    parts = [" ".join([message.rstrip("\n"), *fields])]
    parts += [_text(line[name]).rstrip() for name in ("exception", "stack", "traceback") if line.get(name)]
    return LogEntry(
        at=_parse_time(line.get("timestamp"), now),
        level=level if level in LEVELS else "info",
        source=clean_text(short_name(str(line.get("replica_tag") or line.get("service") or "?")), 140),
        text=clean_text("\n".join(parts), _TEXT_MAX),
        request_id=clean_text(str(line.get("request_id") or ""), _ID_MAX),
    )


def _parse_time(text: Any, now: float) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return now


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


@final
class LogBuffer:
    """Lines for one tab: the newest, as many as the tab may get; counts those that are left out."""

    def __init__(self, now: float, per_s: float = LINES_PER_S) -> None:
        """The tab may get ``per_s`` lines in each second, and as many at once after a silence."""
        self._per_s = per_s
        self._allowed = per_s
        self._at = now
        self._left_out = 0
        self._entries: deque[LogEntry] = deque()

    def add(self, entry: LogEntry) -> None:
        """Add a line; the oldest one that waits goes if there are too many."""
        if len(self._entries) >= self._per_s:
            self._entries.popleft()
            self._left_out += 1
        self._entries.append(entry)

    def take(self, now: float) -> tuple[int, list[LogEntry]]:
        """How many lines were left out, and the lines after these."""
        self._allowed = min(self._per_s, self._allowed + max(0.0, now - self._at) * self._per_s)
        self._at = now
        count = min(len(self._entries), int(self._allowed))
        if self._entries and not count:
            return 0, []
        while len(self._entries) > count:
            self._entries.popleft()
            self._left_out += 1
        left_out, entries = self._left_out, list(self._entries)
        self._allowed -= len(entries)
        self._left_out = 0
        self._entries.clear()
        return left_out, entries
