"""A request's body as the user's code reads it: at once where it is whole, piece by piece where it still comes.

Why credit is given when a piece is taken and not when it comes: then a slow reader holds back the client, and an
upload of any size needs no more memory than the window.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, final

from starlette.types import Message

from serve_common.wires.frames import WINDOW_FRAMES
from serve_replica_host.replica.incoming import CREDIT_PARTS

_TOLD_EVERY: Final = max(WINDOW_FRAMES // CREDIT_PARTS, 1)
"""Pieces: credit is given for so many at once."""


@final
class BodyReader:
    """ASGI's ``receive`` of one request; all methods run on the user loop."""

    __slots__ = ("_changed", "_is_gone", "_is_whole", "_on_taken", "_pieces", "_taken")

    def __init__(self, whole: bytes | None, on_taken: Callable[[int], object] | None = None) -> None:
        """``whole`` is None for a body that still comes; ``on_taken`` is told how many pieces were read."""
        self._pieces: deque[bytes] = deque()
        self._is_whole = whole is not None
        if whole is not None:
            self._pieces.append(whole)
        self._on_taken = on_taken
        self._taken = 0
        self._is_gone = False
        self._changed: asyncio.Event | None = None

    def add(self, data: bytes, *, last: bool) -> None:
        """More has come."""
        if data or last:
            self._pieces.append(data)
        self._is_whole = last
        self._wake()

    def leave(self) -> None:
        """The caller is gone, or has its whole answer."""
        self._is_gone = True
        self._wake()

    async def __call__(self) -> Message:
        """The next piece of the body; after the last one, and when the caller goes away, ``http.disconnect``."""
        while not self._is_gone:
            if self._pieces:
                data = self._pieces.popleft()
                more = bool(self._pieces) or not self._is_whole
                self._taken += 1
                if self._on_taken is not None and self._taken >= _TOLD_EVERY:
                    self._on_taken(self._taken)
                    self._taken = 0
                return {"type": "http.request", "body": data, "more_body": more}
            if self._changed is None:
                self._changed = asyncio.Event()
            self._changed.clear()
            await self._changed.wait()
        return {"type": "http.disconnect"}

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
