"""Reads a replica's bus connection in the user's thread, and in the bus thread only while user code blocks the other.

Why: a request that comes while the user's loop is idle, as most do, then needs no other thread to wake up before the
user's code runs. Measured with one client at a time, that wake-up was a third of what a replica costs.

Why a guard: refusals, cancellations, probes and drains must not wait for user code. What has not been read for two of
its looks is read by the bus thread, in the same order.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Final, final

import structlog

from serve_common.bus.link import Link
from serve_common.bus.shared_socket import SharedSocket
from serve_common.threads.mailbox import Mailbox
from serve_replica_host.replica.exchange import ToUser
from serve_replica_host.replica.frame_batch import FrameBatch

_log = structlog.get_logger(__name__)

READ_BYTES: Final = 256 * 1024
"""At once, so that nothing else waits for long."""


@final
class BusReader:
    """A `LinkReader`. What it reads goes through `Link.take_data` under the bus side's lock."""

    def __init__(
        self, to_user: Mailbox[ToUser], frames: FrameBatch, lock: threading.RLock, work: Callable[[], None]
    ) -> None:
        """``to_user`` takes what frames bring to the user's side, and its loop is the one to read in.

        ``lock`` is the one under which `BusSide` is called; ``work`` is called on the user loop after reading.
        """
        self.is_on_user_loop = False
        """Whether the user's loop reads at this moment; seen under the lock."""
        self._to_user = to_user
        self._user_loop = to_user.loop
        self._frames = frames
        self._work = work
        self._lock = lock
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._link: Link | None = None
        self._shared: SharedSocket | None = None
        self._socket: socket.socket | None = None
        self._reads = 0
        self._reads_seen = 0
        self._was_readable = False

    def attach(self, link: Link) -> None:
        """See `LinkReader`; on the bus loop."""
        shared = link.lend()
        if shared is None:
            return
        with self._lock:
            self._link, self._shared = link, shared
            self._socket = shared.reader()
            self._was_readable = False
        self._user_loop.call_soon_threadsafe(self._begin, self._socket)

    def detach(self) -> None:
        """See `LinkReader`; on the bus loop."""
        with self._lock:
            former, self._socket, self._link, self._shared = self._socket, None, None, None
        if former is None:
            return
        try:
            self._user_loop.call_soon_threadsafe(self._end, former)
        except RuntimeError:  # the loop is closed: the process ends
            former.close()

    def look(self) -> None:
        """Read what the user's loop leaves unread; on the bus loop, several times a second."""
        shared = self._shared
        if self._reads != self._reads_seen or shared is None:
            self._reads_seen = self._reads
            self._was_readable = False
            return
        was_readable, self._was_readable = self._was_readable, shared.is_readable()
        if not (was_readable and self._was_readable):
            return
        with self._lock:
            self._to_user.gather()
            while self._read():
                pass
            self._frames.flush()
        self._to_user.wake()

    # -- on the user loop --

    def _begin(self, own: socket.socket) -> None:
        if own is self._socket:
            self._user_loop.add_reader(own.fileno(), self._take, own)
        else:
            own.close()  # it was detached before it was begun

    def _end(self, former: socket.socket) -> None:
        if former.fileno() >= 0:
            self._user_loop.remove_reader(former.fileno())
            former.close()

    def _take(self, own: socket.socket) -> None:
        """There is something to read."""
        with self._lock:
            if own is not self._socket:
                return  # about to end
            self._reads += 1
            self.is_on_user_loop = True
            try:
                self._read()
            finally:
                self.is_on_user_loop = False
            self._frames.flush()
        if self._link is None:
            self._end(own)
        self._work()

    # -- under the lock --

    def _read(self) -> bool:
        """Whether there may be more."""
        own, link = self._socket, self._link
        if own is None or link is None:
            return False
        try:
            size_bytes = own.recv_into(self._buffer)
        except BlockingIOError:
            return False  # the other thread was faster
        except OSError as error:
            _log.debug("bus_read_failed", error=repr(error))
            size_bytes = 0
        link.take_data(bytes(self._buffer[:size_bytes]))
        if not size_bytes:
            self._link = None  # it has ended; its owner will say so
            return False
        return True
