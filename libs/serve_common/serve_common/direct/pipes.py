"""Bytes of a request's body that stay in the kernel on their way from one socket to another.

Why: a router has no use for the bytes themselves, and to move their pages (`splice(2)`) costs it a quarter of what
copying them does. What may have to be sent again stays in a second pipe, which shares the pages of the first
(`tee(2)`). Linux only; where a pipe cannot be had, bodies are copied.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable
from typing import Final, final

PIPE_BYTES: Final = 1024 * 1024
"""Size of a pipe as the system counts, which is a page for each packet; also the most that it lets anyone have."""
PIPES_MAX: Final = 16
"""Most bodies of a process that are in pipes at a time: the system limits what all pipes of a user hold."""
_FREE_MAX: Final = 4
"""Most pipes that wait to be used again."""

_HAS_SPLICE: Final = hasattr(os, "splice")
_FLAGS: Final = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK if _HAS_SPLICE else 0
_libc: Final = ctypes.CDLL(None, use_errno=True)


def _tee(source: int, target: int, most_bytes: int) -> int:
    """Let the pipe ``target`` share up to ``most_bytes`` of ``source``; 0 when it has no space."""
    size: int = _libc.tee(source, target, ctypes.c_size_t(most_bytes), ctypes.c_uint(_FLAGS))
    if size >= 0:
        return size
    code = ctypes.get_errno()
    if code == errno.EAGAIN:
        return 0
    raise OSError(code, os.strerror(code))


@final
class PipedBytes:
    """One piece of a body, in a pipe: it is sent from there, or read. What uses it does either, and once."""

    __slots__ = ("_left_bytes", "_memory", "_pipe", "_size_bytes")

    def __init__(self, pipe: BodyPipe, size_bytes: int) -> None:
        self._pipe = pipe
        self._size_bytes = self._left_bytes = size_bytes
        self._memory: memoryview | None = None
        """What was not sent yet, once it has left the pipe."""

    def __len__(self) -> int:
        return self._size_bytes

    def send(self, descriptor: int) -> bool:
        """Give the socket ``descriptor`` what it takes; True when that was all. Raises OSError."""
        while self._left_bytes:
            try:
                if self._memory is not None:
                    sent = os.write(descriptor, self._memory)
                    self._memory = self._memory[sent:]
                else:
                    sent = os.splice(self._pipe.unsent, descriptor, self._left_bytes, flags=_FLAGS)
            except BlockingIOError:
                return False
            self._left_bytes -= sent
        if self._memory is None:
            self._pipe.end_piece(self)
        return True

    def read(self) -> memoryview:
        """What was not sent yet; it leaves the pipe."""
        if self._memory is None:
            self._memory = memoryview(_read(self._pipe.unsent, self._left_bytes))
            self._pipe.end_piece(self)
        return self._memory

    def notify(self) -> None:
        """Tell the body that this was sent, when that was not as soon as it was cut."""
        if self._memory is None:
            self._pipe.on_free()


@final
class BodyPipe:
    """What has arrived of one body and was not sent, and behind it what was sent and may have to be sent again."""

    __slots__ = ("_null", "_piece", "_retained", "_retained_bytes", "_unsent", "on_free", "uncut_bytes")

    def __init__(self) -> None:
        """Raises OSError where the system allows no more pipes, or none of this size."""
        self.on_free: Callable[[], None] = _do_nothing
        """Called when the next piece can be cut."""
        self.uncut_bytes = 0
        """Bytes that are no piece yet."""
        self._piece: PipedBytes | None = None
        """The piece that was not sent yet: it is first in its pipe."""
        self._retained_bytes = 0
        self._unsent = self._retained = (-1, -1)
        self._null = -1
        try:
            self._unsent, self._retained = _new_pipe(), _new_pipe()
            self._null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            for pipe in (self._unsent, self._retained):
                fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:
            self.close()
            raise

    @property
    def unsent(self) -> int:
        """The descriptor from which pieces are sent."""
        return self._unsent[0]

    def fill(self, descriptor: int, most_bytes: int) -> int:
        """Move up to ``most_bytes`` from the socket ``descriptor`` into the pipe; 0 at the socket's end.

        Raises BlockingIOError when there is nothing, or no space, and other kinds of OSError.
        """
        size = os.splice(descriptor, self._unsent[1], most_bytes, flags=_FLAGS)
        self.uncut_bytes += size
        return size

    def cut(self, most_bytes: int) -> PipedBytes | bytes | None:
        """The next piece, of up to ``most_bytes``; None while the last one is not sent, or nothing has come.

        One that cannot be retained beside those that are comes as bytes.
        """
        if self._piece is not None or not self.uncut_bytes:
            return None
        most_bytes = min(most_bytes, self.uncut_bytes)
        size = _tee(self._unsent[0], self._retained[1], most_bytes)
        self.uncut_bytes -= size or most_bytes
        if not size:
            return _read(self._unsent[0], most_bytes)
        self._retained_bytes += size
        self._piece = PipedBytes(self, size)
        return self._piece

    def take_uncut(self) -> bytes:
        """All bytes that are no piece yet; they leave the pipe, and the piece before them does."""
        self._detach_piece()
        size, self.uncut_bytes = self.uncut_bytes, 0
        return _read(self._unsent[0], size)

    def read_retained(self, size_bytes: int) -> bytes:
        """The first ``size_bytes`` of what is retained; it is not any more."""
        self._detach_piece()  # it will be sent again, but what was begun on a link must end
        self._retained_bytes -= size_bytes
        return _read(self._retained[0], size_bytes)

    def release(self, size_bytes: int) -> None:
        """Retain the first ``size_bytes`` no longer."""
        self._retained_bytes -= size_bytes
        self._drop(self._retained[0], size_bytes)

    def end_piece(self, piece: PipedBytes) -> None:
        """``piece`` has left the pipe."""
        if self._piece is piece:
            self._piece = None

    def clear(self) -> None:
        """Make it ready for another body. What was begun on a link is there until it was sent."""
        self._detach_piece()
        self.on_free = _do_nothing
        self._drop(self._unsent[0], self.uncut_bytes)
        self._drop(self._retained[0], self._retained_bytes)
        self.uncut_bytes = self._retained_bytes = 0

    def close(self) -> None:
        """Release the descriptors. May be called twice."""
        for descriptor in (*self._unsent, *self._retained, self._null):
            if descriptor >= 0:
                os.close(descriptor)
        self._unsent = self._retained = (-1, -1)
        self._null = -1

    def _detach_piece(self) -> None:
        if self._piece is not None:
            self._piece.read()

    def _drop(self, pipe: int, size_bytes: int) -> None:
        while size_bytes:
            size_bytes -= os.splice(pipe, self._null, size_bytes, flags=_FLAGS)


@final
class PipePool:
    """The pipes of a process. They are used again: to make one costs more than to send a piece."""

    __slots__ = ("_free", "_pipes_max", "_taken")

    def __init__(self, pipes_max: int = PIPES_MAX) -> None:
        self._free: list[BodyPipe] = []
        self._pipes_max = pipes_max
        self._taken = 0

    def take(self) -> BodyPipe | None:
        """An empty pipe, until `give_back`; None when all are taken, or the system has none."""
        if not _HAS_SPLICE or self._taken >= self._pipes_max:
            return None
        try:
            pipe = self._free.pop() if self._free else BodyPipe()
        except OSError:
            return None
        self._taken += 1
        return pipe

    def give_back(self, pipe: BodyPipe) -> None:
        """Release a pipe; what is left in it is lost."""
        self._taken -= 1
        try:
            pipe.clear()
        except OSError:
            pipe.close()
            raise
        if len(self._free) < _FREE_MAX:
            self._free.append(pipe)
        else:
            pipe.close()

    def close(self) -> None:
        """Close the pipes that are free."""
        while self._free:
            self._free.pop().close()


def _new_pipe() -> tuple[int, int]:
    return os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)


def _read(pipe: int, size_bytes: int) -> bytes:
    """Read ``size_bytes`` that are in ``pipe``."""
    parts: list[bytes] = []
    while size_bytes:
        part = os.read(pipe, size_bytes)
        parts.append(part)
        size_bytes -= len(part)
    return b"".join(parts)  # of a single one: no copy


def _do_nothing() -> None:
    """Until a body uses the pipe."""
