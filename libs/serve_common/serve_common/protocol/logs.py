"""Log lines on the bus: published lines, and the request for a process' recent ones.

Why plain JSON lines: any NATS client shows them, and a program reads them as a log file. A message holds one or more
lines, each ended by a newline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from serve_common.protocol.decoding import UNREADABLE, Count, Label

KINDS: Final = ("controller", "proxy", "host", "replica")
"""Kinds of processes, as in the subjects."""
LEVELS: Final = ("debug", "info", "warning", "error", "critical")
REPLAY_LINES_MAX: Final = 200


def level_number(name: str) -> int:
    """The severity of a level; an unknown level counts as ``info``."""
    return LEVELS.index(name) if name in LEVELS else LEVELS.index("info")


def read_line(data: bytes) -> dict[str, Any]:
    """Parse a log line; one that is no JSON object becomes a message."""
    try:
        line = msgspec.json.decode(data)
    except UNREADABLE:
        line = None
    if isinstance(line, dict):
        return line
    return {"event": "print", "message": data.decode(errors="replace").rstrip("\n")}


def get_kind(line: Mapping[str, Any], publisher_kind: str) -> str:
    """The kind of process that logged ``line``: hosts also publish the lines of their replicas."""
    return "replica" if line.get("service") == "replica" else publisher_kind


class LogFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects lines; an empty field matches all."""

    kinds: Annotated[tuple[Label, ...], Meta(max_length=16)] = ()
    """A subset of `KINDS`."""
    backend_tag: Label = ""
    host_id: Label = ""
    level: Label = ""
    """Lowest level to include."""
    request_id: Label = ""

    def matches(self, kind: str, line: Mapping[str, Any]) -> bool:
        """Whether ``line``, of a process of ``kind``, is selected."""
        return (
            (not self.kinds or kind in self.kinds)
            and (not self.backend_tag or line.get("backend_tag") == self.backend_tag)
            and (not self.host_id or line.get("host_id") == self.host_id)
            and (not self.request_id or line.get("request_id") == self.request_id)
            and (not self.level or level_number(str(line.get("level"))) >= level_number(self.level))
        )


class ReplayRecentLogs(msgspec.Struct, frozen=True, kw_only=True):
    """Requests the newest lines that each process still has in memory.

    They publish them on the subject of `Subjects.recalled_log`; a process without matching lines sends nothing.
    """

    token: Label
    """Chosen by the requester; one token of a subject."""
    limit: Count = REPLAY_LINES_MAX
    filter: LogFilter = LogFilter()
