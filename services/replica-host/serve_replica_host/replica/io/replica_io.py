"""Connects a replica's two threads: reads its NATS connection in the one that is free, orders the frames of both."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from binascii import hexlify
from pathlib import Path
from typing import Final, final

import msgspec
import structlog

from serve_common.direct.link import DirectLink
from serve_common.direct.listening import LinkListener
from serve_common.direct.tcp import TcpEndpoint, is_wildcard
from serve_common.nats.connection import BusConnection
from serve_common.nats.options import NotConnected, OutboundFull, PayloadTooLarge
from serve_common.nats.protocol import CRLF, Subscription, encode_pub, encode_pub_line
from serve_common.protocol.frames import SplitFrame
from serve_common.runtime.settings import BusSettings
from serve_common.runtime.tasks import TaskOwner
from serve_common.runtime.threads import Mailbox
from serve_common.telemetry.log_lines import RateLimitedLogger
from serve_replica_host.ports import RequestMetrics
from serve_replica_host.replica.io.protocol import ReplicaProtocol
from serve_replica_host.replica.io.readers import SharedReader
from serve_replica_host.replica.io.request import Flow, IoEvent, Left, Opened, Taken, UserEvent
from serve_replica_host.replica.io.response_frames import DirectResponses
from serve_replica_host.replica.telemetry.traces import Traces
from serve_replica_host.replica.user.code import UserCode
from serve_replica_host.replica.user.executor import UserExecutor

_log = structlog.get_logger(__name__)

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
        is_on_bus_loop = threading.get_ident() == self._bus_thread
        if not connection.can_write_shared:
            if is_on_bus_loop:
                connection.publish(subject, frame)
            else:  # the request's direct link is gone, and the bus connection is its loop's own, or away
                with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                    self._bus_loop.call_soon_threadsafe(self._publish_later, subject, frame)
            return
        size_bytes = len(frame)
        if size_bytes > connection.max_payload:
            raise PayloadTooLarge(
                f"message of {size_bytes} bytes: the server takes at most {connection.max_payload}"
            )
        if not self._pieces and is_on_bus_loop:
            self._bus_loop.call_soon(self.flush)
        if size_bytes <= _SMALL_BYTES_MAX:
            self._pieces.append(encode_pub(subject, b"", frame))
        else:
            self._pieces += (encode_pub_line(subject, b"", size_bytes), frame, CRLF)
        self._bytes += size_bytes
        if self._bytes >= _BATCH_BYTES_MAX:
            self.flush()

    def _publish_later(self, subject: bytes, frame: bytes) -> None:
        try:
            self._connection.publish(subject, frame)
        except (NotConnected, OutboundFull, PayloadTooLarge) as error:
            self._lost_frames.log(time.monotonic(), "frames_lost", error=str(error))

    def flush(self) -> None:
        """Send the published frames."""
        if not self._pieces:  # what another thread adds, that one sends
            return
        with self._lock:
            pieces = self._pieces
            if not pieces:
                return
            self._pieces, self._bytes = [], 0
            if not self._connection.write_shared(pieces):
                # Routers re-request lost frames when the bus is back, as after every lost connection.
                self._lost_frames.log(time.monotonic(), "frames_lost", pieces=len(pieces))


SWEEP_S: Final = 0.05
"""Seconds between checks of deadlines."""
GUARD_S: Final = 0.005
"""Seconds between polls while requests are in flight: half the delay of reads when user code blocks its loop."""
GATHER_S: Final = 0.001
"""Seconds after a part of a stream in which the next ones are gathered."""


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
        self._io_queue: Mailbox[IoEvent] = Mailbox(asyncio.get_running_loop(), self._take_outcome)
        self._direct = DirectResponses(
            connection,
            self._put_for_io,
            self._on_response_sent,
            self._protocol.active,
            time.monotonic,
            get_link=self._protocol.get_link,
            lock=self._lock,
        )
        self.user_executor: Final = UserExecutor(code, self._put_for_io, self._direct, traces)
        self._user_queue: Mailbox[UserEvent] = Mailbox(user_loop, self.user_executor.take)
        self._reader = SharedReader(
            self._user_queue, self._frames.flush, self._lock, self._process_user_items
        )
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
            on_batch_end=self._end_link_batch,
            on_open=self._reader.attach_direct,
        )
        await listener.start(tasks)
        self._listener = listener
        with self._lock:
            self._protocol.use_links(listener.offer, listener.link_to)

    async def drain_links(self, timeout_s: float) -> None:
        """Accept no more links, and end those that are open, once their routers send nothing more there.

        A router that does not leave within ``timeout_s`` is cut off, and probes over the bus.
        """
        if self._listener is not None:
            await self._listener.drain(timeout_s)

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
        with self._lock:
            if not self._reader.is_on_user_loop:
                self._user_queue.gather()  # `after_messages` ends that
            self._protocol.handle_bus_frame(subject, reply, payload, headers)

    def _take_link_frame(
        self, link: DirectLink, token: bytes, frame: bytes | memoryview | SplitFrame
    ) -> None:
        inbox = link.inbox
        if not inbox:
            return  # it has ended meanwhile
        reply = inbox + hexlify(token)
        with self._lock:
            if not self._reader.is_on_user_loop:
                self._user_queue.gather()  # the end of the read ends that
            self._protocol.handle_link_frame(link, reply, frame)

    def _end_link_batch(self) -> None:
        with self._lock:
            is_on_user_loop = self._reader.is_on_user_loop
        if not is_on_user_loop:
            self._user_queue.wake()

    def _link_ended(self, link: DirectLink) -> None:
        self._reader.detach_direct(link)
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

    def _put_for_io(self, outcome: IoEvent) -> None:
        """Process an outcome: here and now what can overtake no other one of its request, else on the bus loop.

        Here, a response that takes a link of this machine needs no other thread to wake up. One with TLS is written by
        its loop only, which would wait for the interpreter's lock as long as the user's code goes on. Parts that come
        so fast that they are worth gathering leave from the bus loop, all that there are by then.
        """
        exchange, kind = outcome.exchange, type(outcome)
        if kind is not Taken:
            link = self._protocol.get_link(exchange.reply)
            if not exchange.is_direct or exchange.is_queued or link is None or link.is_tcp:
                exchange.is_queued = True
                self._io_queue.put(outcome)
                return
            if kind is Flow:
                now = time.monotonic()
                if now - exchange.flowed_at < GATHER_S:
                    self._io_queue.put(outcome)  # it may be late: what it says is in `pieces` still
                    return
                exchange.flowed_at = now
            elif kind is Opened:
                exchange.flowed_at = time.monotonic()
        self._take_outcome(outcome)
        self._frames.flush()

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
