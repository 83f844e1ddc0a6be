"""Flow control of one request's body between the bus side and the user's code.

Order, credit and what is sent again are `serve_common.protocol.streams`'; here are the sizes, and what the user reads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, final

from starlette.types import Message

from serve_common.protocol.frames import UNKNOWN_BYTES, WINDOW_FRAMES
from serve_common.protocol.streams import CREDIT_PARTS, IncomingStream

MESSAGE_COST_BYTES: Final = 64
"""Bytes counted for each WebSocket message besides its data: empty ones need memory too."""


@final
class IncomingBody:
    """The part of a request's body that has arrived."""

    __slots__ = ("expected_bytes", "pieces", "received_bytes", "stream")

    def __init__(self, expected_bytes: int) -> None:
        """``expected_bytes`` may be `UNKNOWN_BYTES`."""
        self.stream: Final = IncomingStream(WINDOW_FRAMES)
        self.expected_bytes = expected_bytes
        self.received_bytes = 0
        self.pieces: list[bytes | memoryview] = []
        """Parts received of a body that is collected."""

    def add(self, size_bytes: int, *, last: bool) -> bool | None:
        """Count received bytes: True when the body is complete, None when its size is not the announced one."""
        self.received_bytes += size_bytes
        if self.expected_bytes == UNKNOWN_BYTES:
            return last
        missing_bytes = self.expected_bytes - self.received_bytes
        if missing_bytes == 0:
            return True
        return None if missing_bytes < 0 or last else False


_ACKNOWLEDGE_EVERY: Final = max(WINDOW_FRAMES // CREDIT_PARTS, 1)
"""Parts read before they are acknowledged: credit is granted for that many at once."""


@final
class BodyReader:
    """ASGI's ``receive`` for one request; all methods run on the user loop.

    Why credit is granted when a part is read and not when it arrives: a slow reader then slows down the client, and an
    upload of any size needs no more memory than the window.
    """

    __slots__ = (
        "_changed",
        "_counted",
        "_is_collected",
        "_is_gone",
        "_is_whole",
        "_on_taken",
        "_pieces",
        "_taken",
    )

    def __init__(self, whole: bytes | None, on_taken: Callable[[int], object] | None = None) -> None:
        """``whole`` is None for a body still arriving; ``on_taken`` receives how many parts were read."""
        self._pieces: deque[bytes | memoryview] = deque()
        self._is_whole = whole is not None
        if whole is not None:
            self._pieces.append(whole)
        self._on_taken = on_taken
        self._taken = 0
        """Parts read and not acknowledged."""
        self._counted = 0
        """Parts that are here and count as read."""
        self._is_collected = False
        self._is_gone = False
        self._changed: asyncio.Event | None = None

    def add(self, data: bytes | memoryview, *, last: bool) -> None:
        """Append a part of the body."""
        if data or last:
            self._pieces.append(data)
        self._is_whole = last
        if not self._is_collected:
            self._wake()
            return
        self._count_ahead()
        if last:
            self._wake()

    def leave(self) -> None:
        """The caller is gone, or has its complete response."""
        self._is_gone = True
        self._wake()

    async def __call__(self) -> Message:
        """The next part of the body; after the last one, and when the caller is gone, ``http.disconnect``."""
        while not (self._is_gone or self._pieces):
            await self._wait()
        if self._is_gone:
            return {"type": "http.disconnect"}
        data = self._pieces.popleft()
        if self._counted:
            self._counted -= 1
        else:
            self._count(1)
        more = bool(self._pieces) or not self._is_whole
        return {"type": "http.request", "body": bytes(data), "more_body": more}

    async def rest(self) -> bytes | None:
        """All parts that were not read yet, as one; None when the caller is gone.

        Parts are read as they arrive, without waking up who waits here for the last.
        """
        self._is_collected = True
        try:
            self._count_ahead()
            while not (self._is_gone or self._is_whole):
                await self._wait()
        finally:
            self._is_collected = False
        if self._is_gone:
            return None
        parts, self._pieces, self._counted = self._pieces, deque(), 0
        return b"".join(parts)  # of one that is bytes: no copy

    async def _wait(self) -> None:
        if self._changed is None:
            self._changed = asyncio.Event()
        self._changed.clear()
        await self._changed.wait()

    def _count_ahead(self) -> None:
        """Count as read what has arrived."""
        count, self._counted = len(self._pieces) - self._counted, len(self._pieces)
        self._count(count)

    def _count(self, parts: int) -> None:
        self._taken += parts
        if self._on_taken is not None and self._taken >= _ACKNOWLEDGE_EVERY:
            self._on_taken(self._taken)
            self._taken = 0

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
