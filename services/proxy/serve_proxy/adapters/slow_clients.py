"""Clients that send or take so slowly that they do so to hold what they were given: a connection, a slot, memory.

Why a look every ten seconds and no limit for each read: a single pause is normal on a bad network; an average that
stays low is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Final, final

PERIOD_S: Final = 10.0


@final
class Pace:
    """Watches one body on its way, for as long as it is entered."""

    __slots__ = ("_last", "_least_bytes", "_loop", "_on_slow", "_progress", "_timer")

    def __init__(
        self, rate_min: int, progress: Callable[[], int | None], on_slow: Callable[[], None]
    ) -> None:
        """``rate_min`` is in bytes a second, 0 allows any. ``progress`` tells how many bytes the client has sent or
        taken in all; None while it is not the client that is waited for. ``on_slow`` is called once."""
        self._loop = asyncio.get_running_loop()
        self._least_bytes = rate_min * PERIOD_S
        self._progress = progress
        self._on_slow = on_slow
        self._last: int | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        if self._least_bytes > 0:
            self._last = self._progress()
            self._timer = self._loop.call_later(PERIOD_S, self._look)

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        now = self._progress()
        if now is not None and self._last is not None and now - self._last < self._least_bytes:
            self._timer = None
            self._on_slow()
            return
        self._last = now
        self._timer = self._loop.call_later(PERIOD_S, self._look)
