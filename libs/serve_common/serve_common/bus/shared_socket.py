"""A link's socket, used by more than its loop's thread.

Why: what another thread sends or waits for would otherwise wait until the loop's thread has been woken. Why not the
transport: it belongs to its loop. Who writes here makes the system call itself; only what the socket does not take goes
to the transport, and everything after it, so that bytes stay in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Final, final

_PIECES_MAX: Final = 1024
"""Of one system call, IOV_MAX."""


@final
class SharedSocket:
    """Writes for any thread. Each piece of data is whole messages: those of two threads may come in any order."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        pending_bytes_max: int,
        on_behind: Callable[[], None],
    ) -> None:
        """``on_behind`` is called on the loop when another thread has left something for `write_on_loop`.

        ``transport`` is plain TCP and has written everything that it was given.
        """
        self._loop = loop
        self._transport = transport
        self._pending_bytes_max = pending_bytes_max
        self._on_behind = on_behind
        # A descriptor of its own: the transport's may be closed and given to something else at any moment.
        self._descriptor = os.dup(transport.get_extra_info("socket").fileno())
        self._is_closed = False
        self._lock = threading.Lock()
        self._is_behind = False
        """The transport writes, until it has nothing left."""
        self._is_held_back = False
        self._rest: list[bytes] = []
        """What the loop's thread has yet to give to the transport."""
        self._rest_bytes = 0

    def reader(self) -> socket.socket:
        """The same connection for another thread to read from, which closes what it gets."""
        return socket.socket(fileno=os.dup(self._descriptor))

    def close(self) -> None:
        """Write nothing any more."""
        with self._lock:
            self._is_closed = True

    def shut_down(self) -> None:
        """End the connection, whoever has descriptors of it. For when the transport is closed; may be called twice."""
        with self._lock:
            self._is_closed = True
            if self._descriptor >= 0:
                with socket.socket(fileno=self._descriptor) as own, contextlib.suppress(OSError):
                    own.shutdown(socket.SHUT_RDWR)  # raises where the other end was faster
                self._descriptor = -1

    def is_readable(self) -> bool:
        """Whether something has come that nobody has read yet; also when the connection has ended."""
        with self._lock:
            if self._descriptor < 0:
                return False
            look = select.poll()
            look.register(self._descriptor, select.POLLIN)
            return bool(look.poll(0))

    def write(self, pieces: Sequence[bytes]) -> bool:
        """Send ``pieces`` soon, from any thread. False when they will not be: it is closed, or too much waits."""
        with self._lock:
            if self._is_closed:
                return False
            size_bytes = sum(map(len, pieces))
            if self._is_behind:
                if self._rest_bytes + size_bytes > self._pending_bytes_max:
                    return False
                self._leave(b"".join(pieces))
                return True
            written_bytes = self._try(pieces)
            if written_bytes < size_bytes:
                self._is_behind = True
                self._leave(b"".join(pieces)[written_bytes:])
            return True

    def hold_back(self) -> None:
        """Keep what other threads write, until `let_go`."""
        with self._lock:
            self._is_held_back = self._is_behind = True

    def let_go(self) -> None:
        """Write what was kept; on the loop's thread only."""
        with self._lock:
            self._is_held_back = False
        self.write_on_loop([])

    def write_on_loop(self, pieces: list[bytes]) -> None:
        """Send ``pieces``, and what other threads have left; on the loop's thread only."""
        with self._lock:
            if self._is_held_back:
                self._rest += pieces
                self._rest_bytes += sum(map(len, pieces))
                return
            if self._is_behind:
                pieces = [*self._rest, *pieces]
                self._rest, self._rest_bytes = [], 0
                if self._is_closed or self._transport.get_write_buffer_size():
                    self._transport.writelines(pieces)
                    return
            written_bytes = self._try(pieces) if pieces else 0
            left = b"" if written_bytes == sum(map(len, pieces)) else b"".join(pieces)[written_bytes:]
            self._is_behind = bool(left)
            if left:
                self._transport.write(left)

    def _leave(self, data: bytes) -> None:
        if not self._rest:
            self._loop.call_soon_threadsafe(self._on_behind)
        self._rest.append(data)
        self._rest_bytes += len(data)

    def _try(self, pieces: Sequence[bytes]) -> int:
        """How many bytes the socket took. None of a broken one: its transport finds that out and says so."""
        try:
            if len(pieces) == 1:
                return os.write(self._descriptor, pieces[0])
            return os.writev(self._descriptor, pieces[:_PIECES_MAX])
        except OSError:
            return 0
