"""A streamed answer between the router's thread, which brings its pieces, and the one that reads its items.

Why two counters: each thread writes only its own, so neither needs a lock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, final

from muster.handles.items import ItemReader
from muster.handles.pickles import unpickle
from muster.handles.wakeups import Wakers
from serve_common.dispatch.errors import AnswerUnusable

HELD_BYTES_MAX: Final = 1024 * 1024
"""What may wait to be read before the replica is made to wait."""


@final
class NothingYet:
    """There is no item yet."""


@final
class NoMore:
    """All items were read."""


NOTHING_YET: Final = NothingYet()
NO_MORE: Final = NoMore()


@final
class ItemStream:
    """Items of one answer. `put`, `end` and `wait_room` belong to the router's thread, the rest to the reader's."""

    def __init__(self, ask_for_room: Callable[[], None]) -> None:
        """``ask_for_room`` is called by the reader when the router waits and there is room again."""
        self.wakers: Final = Wakers()
        self.is_ended = False
        self._failure: Exception | None = None
        self._pieces: deque[memoryview] = deque()
        self._put_bytes = 0
        self._taken_bytes = 0
        self._room: asyncio.Event | None = None
        self._ask_for_room = ask_for_room
        self._reader = ItemReader()

    # -- the router's thread --

    def put(self, piece: memoryview) -> None:
        """Append what came."""
        if piece:
            self._put_bytes += len(piece)
            self._pieces.append(piece)
            self.wakers.wake()

    def end(self, failure: Exception | None) -> None:
        """There will be no more; ``failure`` comes after the items before it."""
        if not self.is_ended:
            self._failure = failure
            self.is_ended = True
            self.wakers.wake()

    async def wait_room(self) -> None:
        """Wait while too much is waiting to be read."""
        while self._put_bytes - self._taken_bytes > HELD_BYTES_MAX:
            room = self._room = asyncio.Event()
            if self._put_bytes - self._taken_bytes > HELD_BYTES_MAX:  # the reader looks after it has taken
                await room.wait()
        self._room = None

    def make_room(self) -> None:
        """Look again whether there is room."""
        if self._room is not None:
            self._room.set()

    # -- the reader's thread --

    @property
    def has_news(self) -> bool:
        """True when `next_item` has something to say."""
        return bool(self._pieces) or self.is_ended

    def next_item(self) -> Any:
        """The next item, `NOTHING_YET` or `NO_MORE`; raises what `end` was given, and `AnswerUnusable`."""
        while True:
            item = self._reader.next_item()
            if item is not None:
                return unpickle(item)
            is_ended = self.is_ended  # before looking for pieces: none comes after it
            if self._pieces:
                piece = self._pieces.popleft()
                self._taken_bytes += len(piece)
                self._reader.feed(piece)
                if self._room is not None:
                    self._ask_for_room()
            elif not is_ended:
                return NOTHING_YET
            elif self._failure is not None:
                raise self._failure.with_traceback(None)
            elif not self._reader.is_between_items:
                raise AnswerUnusable("the stream ended within an item")
            else:
                return NO_MORE
