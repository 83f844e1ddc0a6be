"""The newest log lines of a host's replicas, also of those that have ended.

Why the host remembers them: a replica whose constructor raised never reached the bus, and a dead one cannot be asked.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final, final

import msgspec

REPLICAS_MAX: Final = 64
LINES_MAX: Final = 50
"""Of one replica."""
BYTES_MAX: Final = 64 * 1024
"""Of one replica."""


@final
class RecentLines:
    """Bounded in replicas, lines and bytes; who has been silent for longest is forgotten first."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, list[bytes]] = OrderedDict()

    def take(self, piece: bytes) -> None:
        """Whole lines of one replica."""
        lines = piece.splitlines(keepends=True)[-LINES_MAX:]
        if not lines:
            return
        tag = _replica_of(lines[-1])
        kept = [*self._lines.pop(tag, ()), *lines][-LINES_MAX:]
        while sum(map(len, kept)) > BYTES_MAX:
            del kept[0]
        self._lines[tag] = kept
        if len(self._lines) > REPLICAS_MAX:
            self._lines.popitem(last=False)

    def all(self) -> list[bytes]:
        """Those of all replicas, each one's in order."""
        return [line for lines in self._lines.values() for line in lines]


def _replica_of(line: bytes) -> str:
    try:
        read: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return str(read.get("replica_tag", "")) if isinstance(read, dict) else ""
