"""Connects a replica's two threads: reads its NATS connection in the one that is free, orders the frames of both."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

import msgspec
import structlog

from serve_common.direct.link import DirectLink
from serve_common.direct.listening import LinkListener
from serve_common.direct.tcp import TcpEndpoint, is_wildcard
from serve_common.nats.connection import BusConnection
from serve_common.nats.link import Link
from serve_common.nats.options import PayloadTooLarge
from serve_common.nats.outbox import SharedSocket
from serve_common.nats.protocol import CRLF, Subscription, encode_pub, encode_pub_line
from serve_common.runtime.settings import BusSettings
from serve_common.runtime.tasks import TaskOwner
from serve_common.runtime.threads import Mailbox
from serve_common.telemetry.log_lines import RateLimitedLogger
from serve_replica_host.ports import RequestMetrics
from serve_replica_host.replica.io.protocol import ReplicaProtocol
from serve_replica_host.replica.io.request import IoEvent, Left, UserEvent
from serve_replica_host.replica.io.response_frames import DirectResponses
from serve_replica_host.replica.telemetry.traces import Traces
from serve_replica_host.replica.user.code import UserCode
from serve_replica_host.replica.user.executor import UserExecutor

_log = structlog.get_logger(__name__)

READ_BYTES: Final = 256 * 1024
"""Maximum bytes of one read, so that nothing else waits for long."""


_BATCH_BYTES_MAX: Final = 256 * 1024
_SMALL_BYTES_MAX: Final = 4 * 1024
"""Frames up to this size are joined with their protocol line."""


@final
class FrameBatch:
    """Frames to send, for both threads; all methods but `flush` are called under the lock.

    Why a batch besides the connection's own: the frames of a stream are numbered, and the two threads take turns.
    """

    def __init__(self, connection: BusConnection, lock: threading.RLock) -> None:
        """Create it on the loop of ``connection``."""
        self._connection = connection
        self._lock = lock
        self._bus_loop = asyncio.get_running_loop()
        self._bus_thread = threading.get_ident()
        self._pieces: list[bytes] = []
        self._bytes = 0
        self._lost_frames = RateLimitedLogger(_log.warning)

    @property
    def pending_bytes(self) -> int:
        """Bytes that wait for the server to take them."""
        return self._bytes + self._connection.pending_bytes

    def publish(self, subject: bytes, frame: bytes) -> None:
        """Send ``frame`` with the next `flush`; scheduled on the bus loop, on other threads the caller flushes.

        Raises as `BusConnection.publish`.
        """
        connection = self._connection
        if not connection.can_write_shared:
            connection.publish(subject, frame)
            return
        size_bytes = len(frame)
        if size_bytes > connection.max_payload:
            raise PayloadTooLarge(
                f"message of {size_bytes} bytes: the server takes at most {connection.max_payload}"
            )
        if not self._pieces and threading.get_ident() == self._bus_thread:
            self._bus_loop.call_soon(self.flush)
        if size_bytes <= _SMALL_BYTES_MAX:
            self._pieces.append(encode_pub(subject, b"", frame))
        else:
            self._pieces += (encode_pub_line(subject, b"", size_bytes), frame, CRLF)
        self._bytes += size_bytes
        if self._bytes >= _BATCH_BYTES_MAX:
            self.flush()

    def flush(self) -> None:
        """Send the published frames."""
        with self._lock:
            pieces = self._pieces
            if not pieces:
                return
            self._pieces, self._bytes = [], 0
            if not self._connection.write_shared(pieces):
                # Routers re-request lost frames when the bus is back, as after every lost connection.
                self._lost_frames.log(time.monotonic(), "frames_lost", pieces=len(pieces))


@final
class NatsReader:
    """A `LinkReader` that reads on the user loop. Data is passed to `Link.take_data` under the protocol's lock.

    Why: a request that arrives while the user loop is idle, as most do, then needs no other thread to wake up before
    the user's code runs. Measured with one client at a time, that wake-up was a third of what a replica costs.
    """

    def __init__(
        self,
        user_queue: Mailbox[UserEvent],
        frames: FrameBatch,
        lock: threading.RLock,
        work: Callable[[], None],
    ) -> None:
        """``user_queue`` receives items for the user side; reads happen on its loop.

        ``lock`` is the one under which `ReplicaProtocol` is called; ``work`` is called on the user loop after reading.
        """
        self.is_on_user_loop = False
        """True while the user loop reads; accessed under the lock."""
        self._user_queue = user_queue
        self._user_loop = user_queue.loop
        self._frames = frames
        self._process_user_items = work
        self._lock = lock
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._link: Link | None = None
        self._shared: SharedSocket | None = None
        self._socket: socket.socket | None = None
        self._reads = 0
        self._reads_seen = 0
        self._was_readable = False

    def attach(self, link: Link) -> None:
        """Start reading ``link`` on the user loop; called on the bus loop."""
        shared = link.detach_reader()
        if shared is None:
            return
        with self._lock:
            self._link, self._shared = link, shared
            self._socket = shared.reader()
            self._was_readable = False
        self._user_loop.call_soon_threadsafe(self._start_reading, self._socket)

    def detach(self) -> None:
        """Stop reading on the user loop; called on the bus loop."""
        with self._lock:
            former, self._socket, self._link, self._shared = self._socket, None, None, None
        if former is None:
            return
        try:
            self._user_loop.call_soon_threadsafe(self._stop_reading, former)
        except RuntimeError:  # the loop is closed: the process exits
            former.close()

    def read_unread(self) -> None:
        """Read what a blocked user loop leaves unread; called on the bus loop, several times a second.

        Why: refusals, cancels, probes and drains must not wait for user code. Data that is unread at two consecutive
        calls is read by this thread, in the same order.
        """
        shared = self._shared
        if self._reads != self._reads_seen or shared is None:
            self._reads_seen = self._reads
            self._was_readable = False
            return
        was_readable, self._was_readable = self._was_readable, shared.is_readable()
        if not (was_readable and self._was_readable):
            return
        with self._lock:
            self._user_queue.gather()
            while self._read():
                pass
            self._frames.flush()
        self._user_queue.wake()

    # -- on the user loop --

    def _start_reading(self, own: socket.socket) -> None:
        if own is self._socket:
            self._user_loop.add_reader(own.fileno(), self._on_readable, own)
        else:
            own.close()  # it was detached before it was started

    def _stop_reading(self, former: socket.socket) -> None:
        if former.fileno() >= 0:
            self._user_loop.remove_reader(former.fileno())
            former.close()

    def _on_readable(self, own: socket.socket) -> None:
        """Read, as the socket is readable."""
        with self._lock:
            if own is not self._socket:
                return  # about to be closed
            self._reads += 1
            self.is_on_user_loop = True
            try:
                self._read()
            finally:
                self.is_on_user_loop = False
            self._frames.flush()
        if self._link is None:
            self._stop_reading(own)
        self._process_user_items()

    # -- under the lock --

    def _read(self) -> bool:
        """Read once; True when there may be more."""
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
            self._link = None  # it has ended; its owner reports that
            return False
        return True


SWEEP_S: Final = 0.05
"""Seconds between checks of deadlines."""
GUARD_S: Final = 0.005
"""Seconds between polls while requests are in flight: half the delay of reads when user code blocks its loop."""


@final
class ReplicaIO:
    """The I/O of a replica. Created on the bus loop; methods run there unless noted otherwise.

    Why a lock: frames are read by the thread that is idle, so both threads call the protocol. The lock is never held
    while user code runs, nor while a thread waits for anything else.
    """

    def __init__(
        self,
        connection: BusConnection,
        code: UserCode,
        user_loop: asyncio.AbstractEventLoop,
        metrics: RequestMetrics,
        max_concurrent_queries: int,
        *,
        traces: Traces | None = None,
    ) -> None:
        """``connection`` is not connected yet; ``traces`` is None if tracing is off."""
        self._connection = connection
        self._metrics = metrics
        self._lock = threading.RLock()
        self._frames = FrameBatch(connection, self._lock)
        self._user_queue: Mailbox[UserEvent] = Mailbox(user_loop, lambda item: self.user_executor.take(item))  # noqa: PLW0108 - created below
        self._reader = NatsReader(self._user_queue, self._frames, self._lock, self._process_user_items)
        self._protocol = ReplicaProtocol(
            publish=self._frames.publish,
            pending_bytes=lambda: self._frames.pending_bytes,
            user_queue=self._put_for_user,
            now=time.monotonic,
            metrics=metrics,
            max_concurrent_queries=max_concurrent_queries,
            streams_bodies=code.streams_bodies,
        )
        self._listener: LinkListener | None = None
        self._local_host = ""
        """This process' address in its newest connection to NATS."""
        io_queue: Mailbox[IoEvent] = Mailbox(asyncio.get_running_loop(), self._take_outcome)
        self._direct = DirectResponses(
            connection,
            io_queue.put,
            self._on_response_sent,
            lambda: self._protocol.in_flight,
            time.monotonic,
            get_link=self._protocol.get_link,
        )
        self.user_executor: Final = UserExecutor(code, io_queue.put, self._direct, traces)
        connection.reader = self._reader
        connection.after_messages = self._user_queue.wake
        connection.on_connected.append(self._on_connected)
        connection.on_disconnected.append(self._on_disconnected)

    @property
    def in_flight(self) -> int:
        """Requests that hold a slot; for any thread."""
        return self._protocol.in_flight

    def write_metrics(self) -> None:
        """Write the metrics counted so far, and the current occupancy."""
        with self._lock:
            occupancy = self._protocol.occupancy()
            self._metrics.turn()
        connection = self._connection
        self._metrics.write(
            msgspec.structs.replace(
                occupancy, is_connected=connection.is_connected, reconnects=connection.reconnects
            )
        )

    @property
    def max_concurrent_queries(self) -> int:
        """Maximum requests that hold a slot at once; may be set by any thread."""
        return self._protocol.max_concurrent_queries

    @max_concurrent_queries.setter
    def max_concurrent_queries(self, count: int) -> None:
        self._protocol.max_concurrent_queries = count

    async def accept_links(self, bus: BusSettings, tasks: TaskOwner) -> None:
        """Accept direct links of routers from now on, as ``bus`` says; what cannot be made is logged."""
        host, advertised = bus.direct_host, bus.direct_advertise
        if not advertised and host and not is_wildcard(host):
            advertised = host
        listener = LinkListener(
            Path(bus.direct_dir) if bus.direct_dir else None,
            {os.getuid(), *bus.direct_uids},
            tcp=TcpEndpoint(host, bus.direct_ports, lambda: advertised or self._local_host) if host else None,
            on_frame=self._take_link_frame,
            on_end=self._link_ended,
            on_batch_end=self._user_queue.wake,
        )
        await listener.start(tasks)
        self._listener = listener
        with self._lock:
            self._protocol.use_links(listener.offer, listener.link_to)

    async def close_links(self) -> None:
        """Accept no more links, and end those that are open."""
        if self._listener is not None:
            await self._listener.close()

    def subscribe(self, subject: str) -> Subscription:
        """Subscribe to the replica's subject."""
        return self._connection.subscribe(subject, self._take_frame)

    def start(self, tasks: TaskOwner) -> None:
        """Start checking deadlines, and polling for data that the user's thread leaves unread."""
        tasks.start(self._sweep(), "sweep")
        tasks.start(self._poll_reader(), "guard")

    async def drain(self) -> None:
        """Refuse new requests from now on, and wait until nothing is in flight."""
        with self._lock:
            self._protocol.start_drain()
        await self._protocol.wait_idle()

    def seconds_until_probed(self) -> float:
        """Seconds in which routers may still re-request lost responses."""
        with self._lock:
            return self._protocol.seconds_until_probed()

    # -- what comes in --------------------------------------------------------------------------------------------

    def _take_frame(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        if self._reader.is_on_user_loop:  # then the lock is held
            self._protocol.handle_bus_frame(subject, reply, payload, headers)
            return
        with self._lock:
            self._user_queue.gather()  # `after_messages` ends that
            self._protocol.handle_bus_frame(subject, reply, payload, headers)

    def _take_link_frame(self, link: DirectLink, token: bytes, frame: bytes | memoryview) -> None:
        listener = self._listener
        if listener is None:
            return
        reply = listener.inbox(link) + token.hex().encode()
        with self._lock:
            self._user_queue.gather()  # the end of the read ends that
            self._protocol.handle_link_frame(link, reply, frame)

    def _link_ended(self, link: DirectLink) -> None:
        with self._lock:
            self._protocol.link_lost(link)

    def _put_for_user(self, item: UserEvent) -> None:
        if self._reader.is_on_user_loop:
            self._user_queue.put_quietly(item)  # it is emptied after the read
        else:
            self._user_queue.put(item)

    def _process_user_items(self) -> None:
        """Process what was read on the user loop."""
        self._direct.hold()
        self._user_queue.empty()
        self._direct.flush()

    def _take_outcome(self, outcome: IoEvent) -> None:
        with self._lock:
            self._protocol.handle_outcome(outcome)

    def _on_response_sent(self, left: Left) -> None:
        """Release the slot of a response that was sent; on the user loop."""
        with self._lock:
            self._protocol.handle_outcome(left)
            self._frames.flush()

    def _on_connected(self) -> None:
        self._local_host = self._connection.local_host
        with self._lock:
            self._protocol.bus_joined()

    def _on_disconnected(self) -> None:
        with self._lock:
            self._protocol.bus_lost()

    # -- time -----------------------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            with self._lock:
                self._protocol.sweep()

    async def _poll_reader(self) -> None:
        while True:
            await asyncio.sleep(GUARD_S if self._protocol.in_flight else SWEEP_S)
            self._reader.read_unread()
            with self._lock:
                self._protocol.send_waiting()
