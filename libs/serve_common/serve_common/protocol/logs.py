"""Log lines on the bus: what a process publishes, and how it is asked for what it logged before.

Why lines of JSON as they are: any NATS client shows them, and a program reads them as it reads a log file. A message
holds one or more lines, each ended by a newline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from serve_common.protocol.decoding import UNREADABLE, Count, Label

KINDS: Final = ("controller", "proxy", "host", "replica")
"""Of processes, as they stand in the subjects."""
LEVELS: Final = ("debug", "info", "warning", "error", "critical")
RECALL_LINES_MAX: Final = 200


def level_number(name: str) -> int:
    """How grave a level is; what is no level of ours counts as ``info``."""
    return LEVELS.index(name) if name in LEVELS else LEVELS.index("info")


def read_line(data: bytes) -> dict[str, Any]:
    """A line of a log; one that is no JSON object is a message."""
    try:
        line = msgspec.json.decode(data)
    except UNREADABLE:
        line = None
    if isinstance(line, dict):
        return line
    return {"event": "print", "message": data.decode(errors="replace").rstrip("\n")}


def kind_of(line: Mapping[str, Any], told_by: str) -> str:
    """Of which kind of process ``line`` is: hosts also tell what their replicas said."""
    return "replica" if line.get("service") == "replica" else told_by


class LogFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which lines are wanted; what is empty restricts nothing."""

    kinds: Annotated[tuple[Label, ...], Meta(max_length=16)] = ()
    """Of `KINDS`."""
    backend_tag: Label = ""
    host_id: Label = ""
    level: Label = ""
    """This one and graver ones."""
    request_id: Label = ""

    def matches(self, kind: str, line: Mapping[str, Any]) -> bool:
        """Whether ``line``, of a process of ``kind``, is wanted."""
        return (
            (not self.kinds or kind in self.kinds)
            and (not self.backend_tag or line.get("backend_tag") == self.backend_tag)
            and (not self.host_id or line.get("host_id") == self.host_id)
            and (not self.request_id or line.get("request_id") == self.request_id)
            and (not self.level or level_number(str(line.get("level"))) >= level_number(self.level))
        )


class RecallLogs(msgspec.Struct, frozen=True, kw_only=True):
    """Asks all processes for the newest lines that each still remembers.

    They answer by publishing on the subject of `Subjects.recalled_log`; who has none says nothing.
    """

    token: Label
    """Chosen by the asker; one token of a subject."""
    limit: Count = RECALL_LINES_MAX
    filter: LogFilter = LogFilter()
