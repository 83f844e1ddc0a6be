"""Joins a replica's two threads, and reads its NATS connection in whichever of them is free."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from typing import Final, final

import msgspec
import structlog

from serve_common.nats.connection import BusConnection
from serve_common.nats.link import Link
from serve_common.nats.outbox import SharedSocket
from serve_common.nats.subscriptions import Subscription
from serve_common.runtime.tasks import TaskOwner
from serve_common.runtime.threads import Mailbox
from serve_replica_host.ports import RequestMetrics
from serve_replica_host.replica.io.frame_batch import FrameBatch
from serve_replica_host.replica.io.protocol import ReplicaProtocol
from serve_replica_host.replica.io.request import Left, ToBus, ToUser
from serve_replica_host.replica.io.response_frames import DirectResponses
from serve_replica_host.replica.telemetry.traces import Traces
from serve_replica_host.replica.user.code import UserCode
from serve_replica_host.replica.user.executor import UserExecutor

_log = structlog.get_logger(__name__)

READ_BYTES: Final = 256 * 1024
"""At once, so that nothing else waits for long."""


@final
class NatsReader:
    """A `LinkReader`. What it reads goes through `Link.take_data` under the bus side's lock."""

    def __init__(
        self, to_user: Mailbox[ToUser], frames: FrameBatch, lock: threading.RLock, work: Callable[[], None]
    ) -> None:
        """``to_user`` takes what frames bring to the user's side, and its loop is the one to read in.

        ``lock`` is the one under which `ReplicaProtocol` is called; ``work`` is called on the user loop after reading.
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


SWEEP_S: Final = 0.05
"""How late a deadline may be noticed."""
GUARD_S: Final = 0.005
"""While something is in flight: half of how late what comes is read when user code blocks its loop."""


@final
class ReplicaIO:
    """Made on the bus loop; methods run there unless they say otherwise."""

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
        """``connection`` is not connected yet; ``traces`` is None where nothing is traced."""
        self._connection = connection
        self._metrics = metrics
        self._lock = threading.RLock()
        self._frames = FrameBatch(connection, self._lock)
        self._to_user: Mailbox[ToUser] = Mailbox(user_loop, lambda item: self.user_side.take(item))  # noqa: PLW0108 - it is made below
        self._reader = NatsReader(self._to_user, self._frames, self._lock, self._work)
        self._bus_side = ReplicaProtocol(
            publish=self._frames.publish,
            to_user=self._give_user,
            now=time.monotonic,
            metrics=metrics,
            max_concurrent_queries=max_concurrent_queries,
            streams_bodies=code.streams_bodies,
        )
        to_bus: Mailbox[ToBus] = Mailbox(asyncio.get_running_loop(), self._take_outcome)
        self._direct = DirectResponses(
            connection, to_bus.put, self._take_left, lambda: self._bus_side.in_flight, time.monotonic
        )
        self.user_side: Final = UserExecutor(code, to_bus.put, self._direct, traces)
        connection.reader = self._reader
        connection.after_messages = self._to_user.wake
        connection.on_connected.append(self._joined)
        connection.on_disconnected.append(self._lost)

    @property
    def in_flight(self) -> int:
        """Requests that hold a slot; for any thread."""
        return self._bus_side.in_flight

    def write_metrics(self) -> None:
        """Make visible what was counted, and what is in the replica now."""
        with self._lock:
            occupancy = self._bus_side.occupancy()
            self._metrics.turn()
        connection = self._connection
        self._metrics.write(
            msgspec.structs.replace(
                occupancy, is_connected=connection.is_connected, reconnects=connection.reconnects
            )
        )

    @property
    def max_concurrent_queries(self) -> int:
        """How many requests may hold a slot at once; may be changed by any thread."""
        return self._bus_side.max_concurrent_queries

    @max_concurrent_queries.setter
    def max_concurrent_queries(self, count: int) -> None:
        self._bus_side.max_concurrent_queries = count

    def subscribe(self, subject: str) -> Subscription:
        """Hear what comes on the replica's subject."""
        return self._connection.subscribe(subject, self._take_frame)

    def start(self, tasks: TaskOwner) -> None:
        """Begin to look after deadlines, and after what the user's thread leaves unread."""
        tasks.start(self._sweep(), "sweep")
        tasks.start(self._guard(), "guard")

    async def drain(self) -> None:
        """Refuse what is new from now on, and wait until nothing is in flight."""
        with self._lock:
            self._bus_side.begin_drain()
        await self._bus_side.wait_idle()

    def seconds_until_asked(self) -> float:
        """See `ReplicaProtocol`."""
        with self._lock:
            return self._bus_side.seconds_until_asked()

    # -- what comes in --------------------------------------------------------------------------------------------

    def _take_frame(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        if self._reader.is_on_user_loop:  # then the lock is held
            self._bus_side.take_frame(subject, reply, payload, headers)
            return
        with self._lock:
            self._to_user.gather()  # `after_messages` ends that
            self._bus_side.take_frame(subject, reply, payload, headers)

    def _give_user(self, item: ToUser) -> None:
        if self._reader.is_on_user_loop:
            self._to_user.put_quietly(item)  # it is emptied in a moment
        else:
            self._to_user.put(item)

    def _work(self) -> None:
        """On the user loop, after something was read there."""
        self._direct.hold()
        self._to_user.empty()
        self._direct.flush()

    def _take_outcome(self, outcome: ToBus) -> None:
        with self._lock:
            self._bus_side.take_outcome(outcome)

    def _take_left(self, left: Left) -> None:
        """On the user loop."""
        with self._lock:
            self._bus_side.take_outcome(left)
            self._frames.flush()

    def _joined(self) -> None:
        with self._lock:
            self._bus_side.bus_joined()

    def _lost(self) -> None:
        with self._lock:
            self._bus_side.bus_lost()

    # -- time -----------------------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            with self._lock:
                self._bus_side.sweep()

    async def _guard(self) -> None:
        while True:
            await asyncio.sleep(GUARD_S if self._bus_side.in_flight else SWEEP_S)
            self._reader.look()
