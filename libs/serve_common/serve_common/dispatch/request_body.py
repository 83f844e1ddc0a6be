"""The body of a request that is still arriving while it is sent on.

Why pieces and not a stream: what was sent must be there once more when a replica refuses the request, and no more than
that may be kept, however large the body is and however many of them arrive at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, final

from serve_common.errors import ServeError
from serve_common.protocol.frames import CREDIT_FRAMES, FRAME_BODY_BYTES_MAX, UNKNOWN_BYTES, WINDOW_FRAMES

KEPT_BYTES_MAX: Final = WINDOW_FRAMES * FRAME_BODY_BYTES_MAX
"""Of one body, from its beginning, so that it can be sent again; who is sent more has answered with credit."""
HELD_BYTES_MAX: Final = 2 * KEPT_BYTES_MAX
"""Of one body, however much credit its replica gives."""
BODIES_BYTES_MAX: Final = 48 * 1024 * 1024
"""What all bodies that are let in may need together, unless the process is told otherwise. What is beyond it is refused
before it is read: a client that is told so at once is better off than one that shares too little with too many."""
UPLOADS_BYTES_MAX: Final = BODIES_BYTES_MAX // 2
"""What uploads hold together when they are at their fastest. What is beyond it comes slower, and does not fail."""
UPLOAD_BYTES: Final = 1024 * 1024
"""What one upload needs at least to get on: what was read of it ahead, and the frames until its replica's credit."""
FAIR_BYTES: Final = 64 * 1024
"""What each body may hold however many others there are: the one that has a replica must get on."""


@final
class UploadRoom:
    """The memory that the bodies of all requests of a process share."""

    __slots__ = ("_admitted_bytes_max", "_bytes_max", "_waiting", "admitted_bytes", "held_bytes", "refused")

    def __init__(
        self, bytes_max: int = UPLOADS_BYTES_MAX, admitted_bytes_max: int = BODIES_BYTES_MAX
    ) -> None:
        """``bytes_max`` is what uploads may hold, ``admitted_bytes_max`` what bodies that were let in may need."""
        self.held_bytes = 0
        self.admitted_bytes = 0
        """What the bodies that were let in may need."""
        self.refused = 0
        """Bodies that were not let in."""
        self._bytes_max = bytes_max
        self._admitted_bytes_max = admitted_bytes_max
        self._waiting: dict[RequestBody, None] = {}

    def admits(self, need_bytes: int) -> bool:
        """True when a body that may need so much would be let in now.

        One body is let in whatever it needs, so that no request is refused for ever.
        """
        return not self.admitted_bytes or self.admitted_bytes + need_bytes <= self._admitted_bytes_max

    def admit(self, need_bytes: int) -> bool:
        """Let a body in that may need so much, until `leave`; False when there is no room for it. Nobody waits."""
        if not self.admits(need_bytes):
            self.refused += 1
            return False
        self.admitted_bytes += need_bytes
        return True

    def leave(self, need_bytes: int) -> None:
        """A body that was let in is no longer held."""
        self.admitted_bytes -= need_bytes

    @property
    def is_full(self) -> bool:
        """True when bodies must wait that have their fair share."""
        return self.held_bytes >= self._bytes_max

    @property
    def is_crowded(self) -> bool:
        """True when bodies should grow by small steps: many that take much at once would hold more than they may."""
        return 2 * self.held_bytes >= self._bytes_max

    def change(self, change_bytes: int) -> None:
        """So much more is held, or less."""
        self.held_bytes += change_bytes
        if change_bytes < 0 and self._waiting and not self.is_full:
            # All of them, although together they may add too much once more: one whose client says nothing would
            # otherwise keep the place of one that could go on.
            for body in list(self._waiting):
                body.wake()

    def wait(self, body: RequestBody, *, waits: bool) -> None:
        """``body`` waits for room, or does so no more."""
        if waits:
            self._waiting[body] = None
        else:
            self._waiting.pop(body, None)


@final
class RequestBody:
    """What has come of a body and was not yet taken by a replica. It has one producer."""

    __slots__ = (
        "_first",
        "_held_bytes",
        "_is_closed",
        "_is_ended",
        "_last_at",
        "_loose",
        "_loose_bytes",
        "_pieces",
        "_producer",
        "_received_bytes",
        "_room",
        "_taken",
        "body_bytes",
        "on_failed",
        "on_more",
    )

    def __init__(self, first: bytes, room: UploadRoom, body_bytes: int = UNKNOWN_BYTES) -> None:
        """``first`` is the beginning of the body, not empty; ``body_bytes`` what was announced for all of it."""
        self.body_bytes = body_bytes
        self.on_more: Callable[[], None] | None = None
        """Called when there is more to send; set by whoever sends."""
        self.on_failed: Callable[[ServeError], None] | None = None
        """Called when there will be no more although the body is not whole."""
        self._room = room
        self._pieces: deque[bytes | memoryview] = deque()
        """As they were sent, so that a second sending is cut in the same way; the first is number ``_first``."""
        self._first = 0
        self._taken = 0
        """How many pieces the replica that they are sent to has given credit for."""
        self._loose: deque[memoryview] = deque()
        self._loose_bytes = 0
        self._held_bytes = 0
        self._received_bytes = 0
        self._is_ended = False
        self._is_closed = False
        self._last_at: int | None = None
        self._producer: asyncio.Future[None] | None = None
        self.add(first)

    # -- for the producer --

    @property
    def is_closed(self) -> bool:
        """Nobody wants the rest."""
        return self._is_closed

    @property
    def received_bytes(self) -> int:
        """What has come, whether or not it is still held."""
        return self._received_bytes

    def add(self, data: bytes) -> None:
        """More has come; what is announced ends with the byte that was announced last."""
        if self._is_closed or self._is_ended or not data:
            return
        size = len(data)
        self._received_bytes += size
        self._held_bytes += size
        self._loose.append(memoryview(data))
        self._loose_bytes += size
        self._room.change(size)
        if self._received_bytes == self.body_bytes:
            self._is_ended = True
        if self.on_more is not None:
            self.on_more()

    def end(self) -> None:
        """The body is whole."""
        if not self._is_ended:
            self._is_ended = True
            if self.on_more is not None:
                self.on_more()

    def fail(self, error: ServeError) -> None:
        """The rest will not come; the request fails."""
        if self.on_failed is not None:
            self.on_failed(error)

    async def wait_for_room(self) -> None:
        """Wait until more may be added, or nobody wants it any more."""
        while not self.has_room:
            if self._room.is_full and self._first < self._taken:
                # Kept for a second sending while there was room. Bodies that all wait while they keep such pieces
                # would fill the room for ever: who has sent less than `CREDIT_FRAMES` since gets no credit.
                self._let_go_taken()
                continue
            self._room.wait(self, waits=True)
            self._producer = asyncio.get_running_loop().create_future()
            try:
                await self._producer
            finally:
                self._producer = None
                self._room.wait(self, waits=False)

    @property
    def has_room(self) -> bool:
        """More may be added now, or nobody wants it any more."""
        if self._is_closed:
            return True
        if self._loose_bytes >= FRAME_BODY_BYTES_MAX or self._held_bytes >= HELD_BYTES_MAX:
            return False
        if self._held_bytes < FAIR_BYTES or not self._room.is_full:
            return True
        # All that came was sent, but too few frames for the replica to give credit: it would be waited for in vain.
        return not self._loose and 0 < len(self._pieces) < CREDIT_FRAMES

    def wake(self) -> None:
        """Let the producer go on if there is room."""
        if self._producer is not None and not self._producer.done() and self.has_room:
            self._producer.set_result(None)

    # -- for whoever sends --

    @property
    def is_from_start(self) -> bool:
        """True while all that has come is held: it can be sent anew."""
        return self._first == 0

    @property
    def announced_bytes(self) -> int:
        """For the head of a request that is sent now."""
        return self._received_bytes if self._is_ended else self.body_bytes

    def piece(self, at: int) -> bytes | memoryview | None:
        """Piece number ``at``, which is the next one to send; None when it has not come yet."""
        if at - self._first < len(self._pieces):
            return self._pieces[at - self._first]
        if self._last_at is not None or not (self._loose or self._is_ended):
            return None
        taken: list[memoryview] = []
        space = FRAME_BODY_BYTES_MAX
        while self._loose and space > 0:
            view = self._loose.popleft()
            if len(view) > space:
                self._loose.appendleft(view[space:])
                view = view[:space]
            taken.append(view)
            space -= len(view)
        # One piece of one read is sent as it is; what was read with it lives as long, and is counted once.
        piece = taken[0] if len(taken) == 1 else b"".join(taken)
        self._loose_bytes -= len(piece)
        self._pieces.append(piece)
        if self._is_ended and not self._loose:
            self._last_at = at
        self.wake()
        return piece

    def is_last(self, at: int) -> bool:
        """True when piece number ``at`` ends the body."""
        return self._last_at is not None and at >= self._last_at

    def release(self, up_to: int) -> None:
        """A replica has taken all pieces before number ``up_to``; they are kept only as far as that costs little."""
        self._taken = up_to
        if self._first == 0 and self._received_bytes <= KEPT_BYTES_MAX and not self._room.is_full:
            return
        self._let_go_taken()

    def restart(self) -> None:
        """Whoever was sent pieces will not answer: what is sent next may have to begin with the first of them."""
        self._taken = 0

    def _let_go_taken(self) -> None:
        freed = 0
        while self._first < self._taken and self._pieces:
            freed += len(self._pieces.popleft())
            self._first += 1
        self._let_go(freed)

    def close(self) -> None:
        """Nobody wants the body any more: the request has ended."""
        self._is_closed = True
        self.on_more = self.on_failed = None
        self._pieces.clear()
        self._loose.clear()
        self._let_go(self._held_bytes)

    def _let_go(self, freed_bytes: int) -> None:
        self._held_bytes -= freed_bytes
        self.wake()
        if freed_bytes:
            self._room.change(-freed_bytes)
