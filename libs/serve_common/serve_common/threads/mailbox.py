"""Hands values to another thread's event loop, many for the price of one wake-up.

Why not call_soon_threadsafe for each: it costs a system call. Under load requests come in bursts, and one wake-up
moves the whole burst.

Why an eventfd: what `call_soon_threadsafe` hands over runs one turn of the loop later, and between two turns the
interpreter's lock may go to another thread. A descriptor's reader runs at once; measured, a hop takes half the time.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar, final

T = TypeVar("T")

_HAS_EVENTFD: Final = hasattr(os, "eventfd")  # on Linux


@final
class Mailbox(Generic[T]):
    """Values put in by any thread come out, in order, in ``take`` on the loop's thread.

    Its length is bounded by its users: each holds at most a few values for each request in flight.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[T], None]) -> None:
        """``take`` must not raise."""
        self.loop: Final = loop
        self._take = take
        self._values: deque[T] = deque()
        self._is_waking = False
        self._gathers = False
        self._descriptor = -1
        self._wake = self._wake_by_loop
        if _HAS_EVENTFD and not loop.is_closed():
            descriptor = self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            weakref.finalize(self, os.close, descriptor)
            self._wake = lambda: os.eventfd_write(descriptor, 1)
            # Only its own thread may add to a loop. What is put meanwhile waits in the descriptor.
            loop.call_soon_threadsafe(loop.add_reader, descriptor, self._hear)

    def put(self, value: T) -> bool:
        """Hand ``value`` over; False when the loop is closed, and nobody will ever take it."""
        self._values.append(value)
        # Appended before the flag is read, and the loop clears the flag before it looks: nothing is left behind.
        # Two threads that both see it cleared only wake the loop twice.
        if not self._is_waking and not self._gathers:
            if self.loop.is_closed():
                self._values.clear()
                return False
            self._is_waking = True
            self._wake()
        return True

    def put_quietly(self, value: T) -> None:
        """Hand ``value`` over without waking the loop: it comes with the next value, by `wake`, or by `empty`."""
        self._values.append(value)

    def gather(self) -> None:
        """Let everything that is put from now on wait for `wake`; where only one thread puts."""
        self._gathers = True

    def wake(self) -> None:
        """Wake the loop for what was gathered or put quietly."""
        self._gathers = False
        if self._values and not self._is_waking and not self.loop.is_closed():
            self._is_waking = True
            self._wake()

    def empty(self) -> None:
        """Take what is there; on the loop's thread."""
        if self._values:
            self._empty()

    def __len__(self) -> int:
        return len(self._values)

    def close(self) -> None:
        """Take nothing any more; on the loop's thread, once nothing is put any more."""
        if self._descriptor >= 0:
            self.loop.remove_reader(self._descriptor)

    def _wake_by_loop(self) -> None:
        try:
            self.loop.call_soon_threadsafe(self._empty)
        except RuntimeError:  # the loop is closed: the process ends
            self._values.clear()

    def _hear(self) -> None:
        os.eventfd_read(self._descriptor)
        self._empty()

    def _empty(self) -> None:
        self._is_waking = False
        values = self._values
        # Only what is there now: values that come without end must not keep the loop from everything else.
        for _ in range(len(values)):
            self._take(values.popleft())
        if values and not self._is_waking:
            self._is_waking = True
            self._wake()
