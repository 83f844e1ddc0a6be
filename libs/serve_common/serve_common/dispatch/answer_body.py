"""The body of an answer that comes in pieces, between the bus' read path and whoever reads it.

Why credit is given as pieces are read, not as they come: a reader that is slow then holds up the replica, and nothing
piles up here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, final

from serve_common.wires.frames import CREDIT_FRAMES, WINDOW_FRAMES

HELD_FRAMES_MAX: Final = WINDOW_FRAMES + 1
"""A replica that does not count its head's frame is one ahead; one that sends still more ignores the window."""


@final
class AnswerBody:
    """The body of an answer that comes in pieces; it has one reader."""

    __slots__ = (
        "_failure",
        "_is_taken",
        "_is_whole",
        "_on_taken",
        "_pieces",
        "_reader",
        "_taken",
        "next_sequence",
    )

    def __init__(self, first: memoryview, on_taken: Callable[[int], None]) -> None:
        """``on_taken`` is told, now and then and while more is to come, how many pieces the reader is done with."""
        self._pieces: deque[memoryview] = deque((first,))
        self._on_taken: Callable[[int], None] | None = on_taken
        self._taken = 0
        """Pieces that `on_taken` was not told of yet."""
        self._is_taken = False
        self._is_whole = False
        self._failure: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self.next_sequence = 1
        """Of the piece that must come next."""

    @property
    def held_frames(self) -> int:
        """Pieces that wait to be read."""
        return len(self._pieces)

    async def read(self) -> memoryview | None:
        """The next piece, possibly empty; None at the end. The previous piece then counts as done with.

        Raises what `fail` was given, after the pieces that came before it.
        """
        if self._is_taken and self._on_taken is not None:
            self._taken += 1
            if self._taken >= CREDIT_FRAMES:
                taken, self._taken = self._taken, 0
                self._on_taken(taken)
        self._is_taken = False
        while not self._pieces:
            if self._failure is not None:
                raise self._failure
            if self._is_whole:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        self._is_taken = True
        return self._pieces.popleft()

    def add(self, piece: memoryview, *, last: bool) -> None:
        """Append what came; nothing may be added after ``last``."""
        self.next_sequence += 1
        self._pieces.append(piece)
        if last:
            self._is_whole = True
            self._on_taken = (
                None  # it leads back to the call: the pieces would wait for the garbage collector
            )
        self._wake()

    def fail(self, failure: Exception) -> None:
        """There will be no more."""
        if not self._is_whole and self._failure is None:
            self._failure = failure
            self._on_taken = None
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
