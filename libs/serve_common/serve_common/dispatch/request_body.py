"""The body of a request that is forwarded while it is still arriving.

Why pieces and not a stream: what was sent must be available again when a replica refuses the request, and no more than
that may be retained, however large the body is and however many arrive at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, cast, final

from serve_common.direct.pipes import BodyPipe, PipedBytes, PipePool
from serve_common.errors import ServeError
from serve_common.protocol.frames import (
    CREDIT_FRAMES,
    FRAME_BODY_BYTES_MAX,
    LARGE_WINDOW_FRAMES,
    UNKNOWN_BYTES,
    BodyHead,
)

RETAINED_BYTES_MAX: Final = LARGE_WINDOW_FRAMES * FRAME_BODY_BYTES_MAX
"""Bytes retained from the start of one body, so that it can be sent again; a replica must give credit for more."""
BUFFERED_BYTES_MAX: Final = 2 * RETAINED_BYTES_MAX
"""Limit of one body's bytes in memory, however much credit its replica gives."""
BODIES_BYTES_MAX: Final = 48 * 1024 * 1024
"""Default limit of what all admitted bodies may need together. Bodies beyond it are refused before they are read:
failing fast serves a client better than sharing too little memory with too many."""
UPLOADS_BYTES_MAX: Final = BODIES_BYTES_MAX // 2
"""Limit of what uploads hold together at full speed. Beyond it they get slower, and do not fail."""
UPLOAD_BYTES: Final = 1024 * 1024
"""What one upload needs at least to make progress: read-ahead, and the frames until its replica's credit."""
CROWDED_PIECE_BYTES_MAX: Final = UPLOAD_BYTES // (CREDIT_FRAMES + 2)
"""Largest piece of a body while much memory is held."""
FAIR_BYTES: Final = 64 * 1024
"""What each body may always hold: one that has a replica must make progress."""


@final
class UploadMemory:
    """The memory budget that the bodies of all requests of a process share."""

    __slots__ = (
        "_admitted_bytes_max",
        "_bytes_max",
        "_waiting",
        "admitted_bytes",
        "buffered_bytes",
        "pipes",
        "refused",
    )

    def __init__(
        self, bytes_max: int = UPLOADS_BYTES_MAX, admitted_bytes_max: int = BODIES_BYTES_MAX
    ) -> None:
        """``bytes_max`` limits what uploads hold, ``admitted_bytes_max`` what admitted bodies may need."""
        self.pipes: Final = PipePool()
        self.buffered_bytes = 0
        self.admitted_bytes = 0
        """What the admitted bodies may need, in bytes."""
        self.refused = 0
        """Bodies that were not admitted."""
        self._bytes_max = bytes_max
        self._admitted_bytes_max = admitted_bytes_max
        self._waiting: dict[RequestBody, None] = {}

    def admits(self, need_bytes: int) -> bool:
        """True when a body that may need ``need_bytes`` would be admitted now.

        A single body is admitted whatever it needs, so that no request is refused for ever.
        """
        return not self.admitted_bytes or self.admitted_bytes + need_bytes <= self._admitted_bytes_max

    def admit(self, need_bytes: int) -> bool:
        """Admit a body that may need ``need_bytes``, until `leave`; False when there is no capacity. Never waits."""
        if not self.admits(need_bytes):
            self.refused += 1
            return False
        self.admitted_bytes += need_bytes
        return True

    def leave(self, need_bytes: int) -> None:
        """Release an admitted body."""
        self.admitted_bytes -= need_bytes

    @property
    def is_full(self) -> bool:
        """True when bodies that have their fair share must wait."""
        return self.buffered_bytes >= self._bytes_max

    @property
    def is_crowded(self) -> bool:
        """True when bodies should grow in small steps: many large steps at once would exceed the limit."""
        return 2 * self.buffered_bytes >= self._bytes_max

    def change(self, change_bytes: int) -> None:
        """Add ``change_bytes``, which may be negative, to what is held."""
        self.buffered_bytes += change_bytes
        if change_bytes < 0 and self._waiting and not self.is_full:
            # All of them, although together they may exceed the limit again: one whose client sends nothing would
            # otherwise block one that could go on.
            for body in list(self._waiting):
                body.wake()

    def wait(self, body: RequestBody, *, waits: bool) -> None:
        """Register that ``body`` waits for capacity, or no longer does."""
        if waits:
            self._waiting[body] = None
        else:
            self._waiting.pop(body, None)


@final
class RequestBody:
    """The part of a body that has arrived and was not yet taken by a replica. It has one producer."""

    __slots__ = (
        "_buffered_bytes",
        "_first",
        "_is_closed",
        "_is_ended",
        "_last_at",
        "_memory",
        "_pieces",
        "_pipe",
        "_producer",
        "_received_bytes",
        "_taken",
        "_unsplit",
        "_unsplit_bytes",
        "body_bytes",
        "on_failed",
        "on_more",
        "takes_pipe",
    )

    def __init__(self, first: bytes, memory: UploadMemory, body_bytes: int = UNKNOWN_BYTES) -> None:
        """``first`` is the beginning of the body, not empty; ``body_bytes`` its announced size."""
        self.body_bytes = body_bytes
        self.on_more: Callable[[], None] | None = None
        """Called when there is more to send; set by the sender."""
        self.on_failed: Callable[[ServeError], None] | None = None
        """Called when the body fails before it is complete."""
        self.takes_pipe = False
        """True while what comes through a pipe would be sent without a copy; set by the sender."""
        self._memory = memory
        self._pipe: BodyPipe | None = None
        """Holds what came after `_unsplit`, and pieces."""
        self._pieces: deque[bytes | memoryview | PipedBytes] = deque()
        """Pieces as they were sent, so that a retry has the same ones; the first is number ``_first``."""
        self._first = 0
        self._taken = 0
        """How many pieces the current replica has given credit for."""
        self._unsplit: deque[memoryview] = deque()
        self._unsplit_bytes = 0
        """Bytes that are no piece yet, in memory and in the pipe."""
        self._buffered_bytes = 0
        self._received_bytes = 0
        self._is_ended = False
        self._is_closed = False
        self._last_at: int | None = None
        self._producer: asyncio.Future[None] | None = None
        self.add(first)

    # -- for the producer --

    @property
    def is_closed(self) -> bool:
        """True when the rest is not wanted."""
        return self._is_closed

    @property
    def has_arrived(self) -> bool:
        """True when the client has sent all of it."""
        return self._last_at is not None

    @property
    def received_bytes(self) -> int:
        """Bytes that have arrived, whether or not they are still held."""
        return self._received_bytes

    def add(self, data: bytes | memoryview) -> None:
        """Append data, which must not change; a body of announced size is complete with its last announced byte."""
        if self._is_closed or self._is_ended or not data:
            return
        self._unsplit.append(memoryview(data))
        self._count(len(data))

    def open_pipe(self) -> bool:
        """Let the rest come through a pipe; False when there is none."""
        if self._pipe is None and not self._is_closed:
            self._pipe = self._memory.pipes.take()
            if self._pipe is not None:
                self._pipe.on_free = self._go_on
        return self._pipe is not None

    def fill_pipe(self, descriptor: int, most_bytes: int) -> int:
        """As `add`, for what the socket ``descriptor`` has; returns its size, 0 at the socket's end.

        Nothing may be added in memory before `leave_pipe`. Raises as `BodyPipe.fill`.
        """
        assert self._pipe is not None, "it is open"
        size = self._pipe.fill(descriptor, most_bytes)
        if size:
            self._count(size)
        return size

    def leave_pipe(self) -> None:
        """Take what waits in the pipe into memory, and let nothing more come through it."""
        self.takes_pipe = False
        if self._pipe is not None and self._pipe.uncut_bytes:
            self._unsplit.append(memoryview(self._pipe.take_uncut()))
            self._go_on()

    def _count(self, size: int) -> None:
        self._received_bytes += size
        self._buffered_bytes += size
        self._unsplit_bytes += size
        self._memory.change(size)
        if self._received_bytes == self.body_bytes:
            self._is_ended = True
        if self.on_more is not None:
            self.on_more()

    def end(self) -> None:
        """Mark the body as complete."""
        if not self._is_ended:
            self._is_ended = True
            if self.on_more is not None:
                self.on_more()

    def fail(self, error: ServeError) -> None:
        """Fail the request: the rest will not come."""
        if self.on_failed is not None:
            self.on_failed(error)

    async def wait_for_capacity(self) -> None:
        """Wait until more may be added, or the body is closed."""
        while not self.has_space:
            if self._memory.is_full and self._first < self._taken:
                # Retained for a retry while there was capacity. Bodies that all wait while they retain such pieces
                # would deadlock: one that has sent less than `CREDIT_FRAMES` since gets no credit.
                self._release_taken()
                continue
            self._memory.wait(self, waits=True)
            self._producer = asyncio.get_running_loop().create_future()
            try:
                await self._producer
            finally:
                self._producer = None
                self._memory.wait(self, waits=False)

    @property
    def has_space(self) -> bool:
        """True when more may be added now, or the body is closed."""
        if self._is_closed:
            return True
        if self._unsplit_bytes >= self.piece_bytes_max or self._buffered_bytes >= BUFFERED_BYTES_MAX:
            return False
        if self._buffered_bytes < FAIR_BYTES or not self._memory.is_full:
            return True
        # Everything was sent, but too few frames for the replica to give credit: waiting for it would deadlock.
        return not self._unsplit_bytes and 0 < len(self._pieces) < CREDIT_FRAMES

    @property
    def piece_bytes_max(self) -> int:
        """Largest piece that is cut now: a replica gives credit for some together, which all bodies need memory for."""
        return CROWDED_PIECE_BYTES_MAX if self._memory.is_crowded else FRAME_BODY_BYTES_MAX

    def wake(self) -> None:
        """Resume the producer if there is capacity."""
        if self._producer is not None and not self._producer.done() and self.has_space:
            self._producer.set_result(None)

    # -- for the sender --

    @property
    def is_from_start(self) -> bool:
        """True while all that has arrived is held, so that it can be sent again."""
        return self._first == 0

    @property
    def announced_bytes(self) -> int:
        """The body's size for a request head that is sent now."""
        return self._received_bytes if self._is_ended else self.body_bytes

    @property
    def first(self) -> int:
        """Number of the first piece that is held."""
        return self._first

    def frame(self, at: int, *, may_cut: bool) -> tuple[BodyHead, bytes | memoryview | PipedBytes] | None:
        """As of `serve_common.protocol.streams.FrameSource`."""
        piece = self.piece(at) if may_cut else None
        return None if piece is None else (BodyHead(at, self.is_last(at)), piece)

    def piece(self, at: int) -> bytes | memoryview | PipedBytes | None:
        """Piece number ``at``, which is held or the next one; None when it has not arrived yet.

        One that is in a pipe is so once only: when it is sent again, it comes as bytes.
        """
        if at - self._first < len(self._pieces):
            return self._piece_again(at - self._first)
        if self._last_at is not None or not (self._unsplit_bytes or self._is_ended):
            return None
        piece = self._cut_piece()
        if piece is None:
            return None  # it is in the pipe, behind one that was not sent yet
        self._unsplit_bytes -= len(piece)
        self._pieces.append(piece)
        if self._is_ended and not self._unsplit_bytes:
            self._last_at = at
        self.wake()
        return piece

    def _cut_piece(self) -> bytes | memoryview | PipedBytes | None:
        if self._pipe is not None and not self._unsplit and self._unsplit_bytes:
            return self._pipe.cut(self.piece_bytes_max)
        taken: list[memoryview] = []
        space = self.piece_bytes_max
        while self._unsplit and space > 0:
            view = self._unsplit.popleft()
            if len(view) > space:
                self._unsplit.appendleft(view[space:])
                view = view[:space]
            taken.append(view)
            space -= len(view)
        # A piece of a single read is sent without a copy; the rest of that read lives as long, and is counted once.
        return taken[0] if len(taken) == 1 else b"".join(taken)

    def _piece_again(self, number: int) -> bytes | memoryview:
        piece = self._pieces[number]
        if type(piece) is not PipedBytes:
            return piece
        self.takes_pipe = False
        assert self._pipe is not None, "the piece came from it"
        for at, each in enumerate(self._pieces):
            if type(each) is PipedBytes:
                self._pieces[at] = self._pipe.read_retained(len(each))
        return cast("bytes", self._pieces[number])

    def is_last(self, at: int) -> bool:
        """True when piece number ``at`` ends the body."""
        return self._last_at is not None and at >= self._last_at

    def release(self, up_to: int) -> None:
        """A replica has taken all pieces before number ``up_to``; they are retained only while that is cheap."""
        self._taken = up_to
        if self._first == 0 and self._received_bytes <= RETAINED_BYTES_MAX and not self._memory.is_full:
            return
        self._release_taken()

    def restart(self) -> None:
        """The current replica will not answer: the next attempt may have to begin with the first piece."""
        self._taken = 0

    def _release_taken(self) -> None:
        freed = in_pipe = 0
        while self._first < self._taken and self._pieces:
            piece = self._pieces.popleft()
            freed += len(piece)
            if type(piece) is PipedBytes:
                in_pipe += len(piece)
            self._first += 1
        if in_pipe and self._pipe is not None:
            self._pipe.release(in_pipe)
        self._free(freed)

    def close(self) -> None:
        """Release everything: the request has ended."""
        self._is_closed = True
        self.on_more = self.on_failed = None
        self._pieces.clear()
        self._unsplit.clear()
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            self._memory.pipes.give_back(pipe)
        self._free(self._buffered_bytes)

    def _go_on(self) -> None:
        """The next piece can be cut from the pipe."""
        if self.on_more is not None:
            self.on_more()
        self.wake()

    def _free(self, freed_bytes: int) -> None:
        self._buffered_bytes -= freed_bytes
        self.wake()
        if freed_bytes:
            self._memory.change(-freed_bytes)
