"""What one end of a direct link writes: small frames first, the bodies of requests in turn.

Why not the transport, which serves TLS only: a body in a pipe goes from there into the socket, and any thread may write
when nothing waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, cast, final

from serve_common.direct.pipes import PipedBytes

TOKEN_BYTES: Final = 8
CONTROL_TOKEN: Final = bytes(TOKEN_BYTES)
"""Token of frames about the link itself. A replica's first frame is an empty one: it has accepted the ticket."""
PENDING_BYTES_MAX: Final = 64 * 1024 * 1024
"""Most bytes that wait to be written; a link whose peer reads so slowly is ended."""
SMALL_BYTES_MAX: Final = 4 * 1024
"""Frames up to this size are joined, and go before the bodies of other requests that wait."""
EARLY_FRAMES: Final = 8
"""Small frames that do not wait for others to be written with: the other end works on them meanwhile."""
_SOCKET_BYTES: Final = 1024 * 1024
"""What a Unix socket should hold, so that both ends work at once; the system's limit is mostly lower."""
_BATCH_BYTES: Final = 256 * 1024
"""Bytes that are written at once, and where a transport says "pause"."""
_BATCH_PIECES_MAX: Final = 512
"""Pieces that are written at once; the system takes 1,024."""
_SMALL_BATCH_BYTES_MAX: Final = 16 * 1024
"""What one record of TLS holds."""

Piece = bytes | memoryview | PipedBytes
Item = tuple[bytes, tuple[Piece, ...], int]
"""Token, pieces of which only the last may be in a pipe, and their size."""


@final
class LinkWriter:
    """Writes frames to the socket of one link. They may be added on any thread; the rest is the loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_broken: Callable[[], None]) -> None:
        """``on_broken`` is called by the loop when the link must end, perhaps more than once."""
        self.last_written_at = loop.time()
        """When something was last written, by the loop's clock; initially, when this was made."""
        self.sent_frames = 0
        self._loop = loop
        self._on_broken = on_broken
        self._thread = threading.get_ident()
        # RLock: a transport may pause or end while it is written to, and a body that was sent may go on at once.
        self._lock = threading.RLock()
        """Held while bytes are given to the socket, by whichever thread."""
        self._descriptor = -1
        """The socket's; the transport's own may be closed and given to something else at any moment. -1 for TLS."""
        self._transport: asyncio.Transport | None = None
        self._new: deque[Item] = deque()
        """Not looked at yet by the loop."""
        self._is_scheduled = False
        self._is_paused = False
        self._rest: tuple[Piece, ...] = ()
        """What the socket has yet to take before anything else; meanwhile this is paused."""
        self._urgent: deque[Item] = deque()
        self._waiting: dict[bytes, deque[Item]] = {}
        """Frames by request; requests take turns."""
        # Two counts, because each has one writer: threads that send, and the loop's.
        self._added_bytes = 0
        self._written_bytes = 0

    @property
    def splices(self) -> bool:
        """True when what is in a pipe is sent without a copy."""
        return self._descriptor >= 0

    @property
    def pending_bytes(self) -> int:
        """Bytes of frames that the socket, or the transport, was not given yet; on any thread."""
        return self._added_bytes - self._written_bytes

    @property
    def is_written(self) -> bool:
        """True when nothing waits to be written; on the loop's thread."""
        in_transport = self._transport.get_write_buffer_size() if self._transport is not None else 0
        return not (self.pending_bytes or self._rest or in_transport)

    def start(self, transport: asyncio.Transport, *, is_tls: bool) -> None:
        """Write to ``transport``, or, without TLS, to its socket."""
        self._transport = transport
        transport.set_write_buffer_limits(high=_BATCH_BYTES)
        if not is_tls:
            with contextlib.suppress(OSError):  # no descriptor is free: then the transport writes
                self._descriptor = os.dup(transport.get_extra_info("socket").fileno())
                with socket.socket(fileno=os.dup(self._descriptor)) as connection:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)

    def duplicate(self) -> socket.socket | None:
        """Another socket object of the link, which its owner closes; None for TLS."""
        return socket.socket(fileno=os.dup(self._descriptor)) if self._descriptor >= 0 else None

    def close(self) -> None:
        """Drop what was not written, and end the connection."""
        with self._lock:
            if self._descriptor >= 0:
                if self._rest:
                    self._loop.remove_writer(self._descriptor)
                # Another thread may still have a descriptor of it.
                with socket.socket(fileno=self._descriptor) as own, contextlib.suppress(OSError):
                    own.shutdown(socket.SHUT_RDWR)
            self._descriptor = -1
            self._transport = None
            self._rest = ()
        for items in (self._new, self._urgent, self._waiting):
            items.clear()

    def add(self, item: Item, *, is_alone: bool) -> None:
        """Write a frame; ``is_alone`` as of `DirectLink.send`."""
        with self._lock:
            self.sent_frames += 1
            if (is_alone or threading.get_ident() != self._thread) and self._can_write_now():
                token, pieces, _ = item
                rest = self._write_some(pieces)
                if not rest:
                    return
                item = token, rest, sum(map(len, rest))
            self._queue(item)

    def write_now(self, token: bytes, data: bytes, frames: int) -> bool:
        """Write small ``frames`` on the calling thread, the last one of the request ``token``; False when that is not
        possible now."""
        with self._lock:
            if not self._can_write_now():
                return False
            rest = self._write_some((data,))
            if rest and len(rest[0]) == len(data):
                return False  # it is full, or broken
            self.sent_frames += frames
            if rest:
                self._queue((token, rest, len(rest[0])))  # the first that the loop writes
        return True

    def pause(self) -> None:
        """The transport takes no more."""
        self._is_paused = True

    def resume(self) -> None:
        """The transport takes more."""
        with self._lock:
            self._is_paused = bool(self._rest)
            self._write_waiting()

    def _queue(self, item: Item) -> None:
        self._new.append(item)
        self._added_bytes += item[2]
        self._schedule_writing()
        if (
            len(self._new) == EARLY_FRAMES
            and self._added_bytes - self._written_bytes <= EARLY_FRAMES * SMALL_BYTES_MAX
            and threading.get_ident() == self._thread
        ):
            self._write_early()

    def _write_early(self) -> None:
        """Write what would wait for the end of the loop's iteration, if nothing has to go first."""
        items = tuple(self._new)
        self._new.clear()
        if not self._can_write_now() or any(type(pieces[-1]) is PipedBytes for _, pieces, _ in items):
            self._new.extend(items)
            return
        rest = self._write_some(tuple(piece for _, pieces, _ in items for piece in pieces))
        rest_bytes = sum(map(len, rest))
        self._written_bytes += sum(size for _, _, size in items) - rest_bytes
        if rest:
            self._new.append((items[-1][0], rest, rest_bytes))  # the first that the loop writes

    def _can_write_now(self) -> bool:
        """Whether the calling thread may write to the socket: nothing waits that has to go first."""
        return not (self._descriptor < 0 or self._is_paused or self._new or self._urgent or self._waiting)

    def _write_some(self, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        """Write what the socket takes; returns the rest."""
        self.last_written_at = self._loop.time()
        last = pieces[-1]
        try:
            if type(last) is PipedBytes:
                rest = self._write_some(pieces[:-1]) if len(pieces) > 1 else ()
                return (*rest, last) if rest or not last.send(self._descriptor) else ()
            written = os.writev(self._descriptor, pieces)  # type: ignore[arg-type]  # all but the last are bytes
        except BlockingIOError:
            return pieces
        except OSError:  # it is broken; who sends is not prepared for its end at once
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                self._loop.call_soon_threadsafe(self._on_broken)
            return pieces
        for number, piece in enumerate(pieces):
            if written < len(piece):
                return (memoryview(piece)[written:], *pieces[number + 1 :])  # type: ignore[arg-type]
            written -= len(piece)
        return ()

    def _schedule_writing(self) -> None:
        if self._is_scheduled:
            return
        self._is_scheduled = True
        if threading.get_ident() == self._thread:
            self._loop.call_soon(self._write_new)
        else:
            self._loop.call_soon_threadsafe(self._write_new)

    def _write_new(self) -> None:
        self._is_scheduled = False  # before reading: what is added from now on is scheduled again
        self.last_written_at = self._loop.time()
        if self._added_bytes - self._written_bytes > PENDING_BYTES_MAX:
            self._on_broken()
        with self._lock:
            new = self._new
            while new and not (self._is_paused or self._waiting or self._urgent):
                self._write(new)
            while new:
                self._let_wait(new.popleft())
            self._write_waiting()  # another thread may have added something a moment ago

    def _let_wait(self, item: Item) -> None:
        token, _, size = item
        queue = self._waiting.get(token)
        if queue is not None:
            queue.append(item)  # a request's frames stay in order
        elif size <= SMALL_BYTES_MAX and token != CONTROL_TOKEN:
            self._urgent.append(item)
        else:  # the end of the link is behind the first frames of all requests
            self._waiting[token] = deque((item,))

    def _write_waiting(self) -> None:
        while not self._is_paused:
            if self._urgent:
                self._write(self._urgent)
            elif self._waiting:
                token = next(iter(self._waiting))
                queue = self._waiting.pop(token)
                item = queue.popleft()
                if queue:
                    self._waiting[token] = queue  # behind the others
                self._write(deque((item,)))
            else:
                return

    def _write(self, items: deque[Item]) -> None:
        """Write the first of ``items`` at once, as many as one call takes."""
        batch, batch_bytes = list[Piece](), 0
        while items and batch_bytes < _BATCH_BYTES and len(batch) < _BATCH_PIECES_MAX:
            _, pieces, size = items.popleft()
            batch += pieces
            batch_bytes += size
            if type(pieces[-1]) is PipedBytes:
                break  # it is the last of a call
        self._written_bytes += batch_bytes
        if self._descriptor >= 0:
            self._hold(self._write_some(tuple(batch)), batch[-1])
        elif self._transport is not None:
            data = cast("list[bytes | memoryview]", batch)  # a transport gets no other
            if batch_bytes <= _SMALL_BATCH_BYTES_MAX:
                data = [b"".join(data)]  # TLS makes a record of each
            self._transport.writelines(data)

    def _hold(self, rest: tuple[Piece, ...], last: Piece) -> None:
        """Write ``rest`` when the socket takes it; ``last`` is the last piece that was to be written."""
        if rest and not self._is_paused and self._descriptor >= 0:
            self._loop.add_writer(self._descriptor, self._go_on)
        elif not rest and self._rest:
            self._loop.remove_writer(self._descriptor)
        self._rest, self._is_paused = rest, bool(rest)
        if not rest and type(last) is PipedBytes:
            last.notify()

    def _go_on(self) -> None:
        with self._lock:
            if self._rest and self._descriptor >= 0:
                self._hold(self._write_some(self._rest), self._rest[-1])
                self._write_waiting()
