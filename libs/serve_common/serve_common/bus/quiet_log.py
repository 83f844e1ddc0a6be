"""Log lines that cannot flood: one per interval, with the number of those left out before it.

Why: a refused permission or a failing callback can repeat tens of thousands of times a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final


@final
class QuietLog:
    """Calls `write` at most once per `interval_s` (by the `now_s` that it is given) for one kind of event."""

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
