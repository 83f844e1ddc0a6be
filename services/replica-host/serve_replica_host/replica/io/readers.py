"""Reads a replica's sockets in the thread that is free: its NATS connection, and direct links of its own machine."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from typing import Final, final

import structlog

from serve_common.direct.link import DirectLink
from serve_common.nats.link import Link
from serve_common.runtime.threads import Mailbox
from serve_replica_host.replica.io.request import UserEvent

_log = structlog.get_logger(__name__)

READ_BYTES: Final = 256 * 1024
"""Maximum bytes of one read of the NATS connection, so that nothing else waits for long."""


@final
class _Source:
    """A socket that is read here."""

    __slots__ = ("own", "read")

    def __init__(self, own: socket.socket, read: Callable[[socket.socket], int]) -> None:
        """``read`` reads once: the number of bytes, 0 at the end. It raises BlockingIOError when there is nothing."""
        self.own = own
        self.read = read


@final
class SharedReader:
    """A `LinkReader` that reads on the user loop, under the protocol's lock. Links with TLS stay on the bus loop.

    Why: a request that arrives while the user loop is idle, as most do, then needs no other thread to wake up before
    the user's code runs. Measured with one client at a time, that wake-up was a third of what a replica costs; of an
    upload over a direct link it was a quarter.
    """

    def __init__(
        self,
        user_queue: Mailbox[UserEvent],
        flush: Callable[[], None],
        lock: threading.RLock,
        work: Callable[[], None],
    ) -> None:
        """``user_queue`` receives items for the user side; reads happen on its loop.

        ``flush`` sends what was published. ``lock`` is the one under which `ReplicaProtocol` is called; ``work`` is
        called on the user loop after reading.
        """
        self.is_on_user_loop = False
        """True while the user loop reads; accessed under the lock."""
        self._user_queue = user_queue
        self._user_loop = user_queue.loop
        self._flush = flush
        self._process_user_items = work
        self._lock = lock
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._bus: Link | None = None
        self._sources: dict[Link | DirectLink, _Source] = {}
        """What is read; accessed under the lock, as the following."""
        self._poller = select.poll()
        self._reads = 0
        self._reads_seen = 0
        self._were_readable: set[int] = set()

    # -- on the bus loop --

    def attach(self, link: Link) -> None:
        """Start reading the NATS connection on the user loop."""
        shared = link.detach_reader()
        if shared is not None:
            self._bus = link
            self._add(link, _Source(shared.reader(), lambda own: self._read_bus(link, own)))

    def detach(self) -> None:
        """Stop reading it there."""
        link, self._bus = self._bus, None
        if link is not None:
            self._remove(link)

    def attach_direct(self, link: DirectLink) -> None:
        """Start reading a direct link on the user loop, where that is possible."""
        own = link.detach_reader()
        if own is not None:
            self._add(link, _Source(own, link.read))

    def detach_direct(self, link: DirectLink) -> None:
        """Stop reading a direct link."""
        self._remove(link)

    def read_unread(self) -> None:
        """Read what a blocked user loop leaves unread; called several times a second.

        Why: refusals, cancels, probes and drains must not wait for user code. What is unread at two consecutive
        calls is read by this thread, in the same order.
        """
        with self._lock:
            if self._reads != self._reads_seen:
                self._reads_seen = self._reads
                self._were_readable.clear()
                return
            readable = {descriptor for descriptor, _ in self._poller.poll(0)}
            late, self._were_readable = readable & self._were_readable, readable
            if not late:
                return
            self._user_queue.gather()
            for link, source in list(self._sources.items()):
                if source.own.fileno() in late:
                    while self._read(link, source):
                        pass
            self._flush()
        self._user_queue.wake()

    def _add(self, link: Link | DirectLink, source: _Source) -> None:
        with self._lock:
            self._sources[link] = source
            self._poller.register(source.own, select.POLLIN)
        self._user_loop.call_soon_threadsafe(self._start_reading, link, source)

    # -- on the user loop --

    def _start_reading(self, link: Link | DirectLink, source: _Source) -> None:
        if self._sources.get(link) is source:
            self._user_loop.add_reader(source.own.fileno(), self._on_readable, link, source)

    def _stop_reading(self, own: socket.socket) -> None:
        self._user_loop.remove_reader(own.fileno())
        own.close()

    def _on_readable(self, link: Link | DirectLink, source: _Source) -> None:
        """Read, as the socket is readable."""
        with self._lock:
            if self._sources.get(link) is not source:
                return  # about to be closed
            self._reads += 1
            self.is_on_user_loop = True
            try:
                self._read(link, source)
            finally:
                self.is_on_user_loop = False
            self._flush()
        self._process_user_items()

    # -- under the lock --

    def _read(self, link: Link | DirectLink, source: _Source) -> bool:
        """Read once; True when there may be more."""
        try:
            size_bytes = source.read(source.own)
        except BlockingIOError:
            return False  # the other thread was faster
        if not size_bytes:
            self._remove(link)  # it has ended; its owner reports that
        return bool(size_bytes)

    def _read_bus(self, link: Link, own: socket.socket) -> int:
        try:
            size_bytes = own.recv_into(self._buffer)
        except BlockingIOError:
            raise
        except OSError as error:
            _log.debug("bus_read_failed", error=repr(error))
            size_bytes = 0
        link.take_data(bytes(self._buffer[:size_bytes]))
        return size_bytes

    def _remove(self, link: Link | DirectLink) -> None:
        """Stop reading; on any thread."""
        with self._lock:
            source = self._sources.pop(link, None)
            if source is None:
                return
            self._poller.unregister(source.own)
        try:
            self._user_loop.call_soon_threadsafe(self._stop_reading, source.own)
        except RuntimeError:  # the loop is closed: the process exits
            source.own.close()
