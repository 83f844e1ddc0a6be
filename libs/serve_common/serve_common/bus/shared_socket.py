"""A link's socket, written to by more than its loop's thread.

Why: an answer that is made in another thread would otherwise wait until the loop's thread has been woken. Why not the
transport: it belongs to its loop. Who writes here makes the system call itself; only what the socket does not take goes
to the transport, and everything after it, so that bytes stay in order.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
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
        self._lock = threading.Lock()
        self._is_behind = False
        """The transport writes, until it has nothing left."""
        self._rest: list[bytes] = []
        """What the loop's thread has yet to give to the transport."""
        self._rest_bytes = 0

    def close(self) -> None:
        """Write nothing any more; may be called twice."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def write(self, data: bytes) -> bool:
        """Send ``data`` soon, from any thread. False when it will not be: the link has ended, or too much waits."""
        with self._lock:
            if self._descriptor < 0:
                return False
            if self._is_behind:
                if self._rest_bytes + len(data) > self._pending_bytes_max:
                    return False
                self._leave(data)
                return True
            written_bytes = self._try((data,))
            if written_bytes < len(data):
                self._is_behind = True
                self._leave(data[written_bytes:])
            return True

    def write_on_loop(self, pieces: list[bytes]) -> None:
        """Send ``pieces``, and what other threads have left; on the loop's thread only."""
        with self._lock:
            if self._is_behind:
                pieces = [*self._rest, *pieces]
                self._rest, self._rest_bytes = [], 0
                if self._descriptor < 0 or self._transport.get_write_buffer_size():
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

    def _try(self, pieces: list[bytes] | tuple[bytes]) -> int:
        """How many bytes the socket took. None of a broken one: its transport finds that out and says so."""
        try:
            if len(pieces) == 1:
                return os.write(self._descriptor, pieces[0])
            return os.writev(self._descriptor, pieces[:_PIECES_MAX])
        except OSError:
            return 0
