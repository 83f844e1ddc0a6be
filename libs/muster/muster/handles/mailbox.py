"""Hands values to another thread's event loop, many for the price of one wake-up.

Why not call_soon_threadsafe for each: it costs a system call. Under load calls and answers come in bursts, and one
wake-up moves the whole burst.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar, final

T = TypeVar("T")


@final
class Mailbox(Generic[T]):
    """Values put in by any thread come out, in order, in ``take`` on the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[T], None]) -> None:
        """``take`` must not raise."""
        self.loop = loop
        self._take = take
        self._values: deque[T] = deque()
        self._is_waking = False

    def put(self, value: T) -> bool:
        """Hand ``value`` over; False when the loop is closed, and nobody will ever take it."""
        self._values.append(value)
        # Appended before the flag is read, and the loop clears the flag before it looks: nothing is left behind.
        # Two threads that both see it cleared only wake the loop twice.
        if not self._is_waking:
            self._is_waking = True
            try:
                self.loop.call_soon_threadsafe(self._empty)
            except RuntimeError:  # it is closed
                self._values.clear()
                return False
        return True

    def _empty(self) -> None:
        self._is_waking = False
        values = self._values
        while values:
            self._take(values.popleft())
