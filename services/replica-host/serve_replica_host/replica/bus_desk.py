"""Joins a replica's two threads: its bus side with all that feeds it and hears of it, under one lock.

Why a lock at all: frames are read where they meet an idle thread, so both threads come here. It is never held while
user code runs, nor while anybody waits.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Final, final

import msgspec

from serve_common.bus.connection import BusConnection
from serve_common.bus.subscriptions import Subscription
from serve_common.tasks import TaskOwner
from serve_common.threads.mailbox import Mailbox
from serve_replica_host.ports import RequestMetrics
from serve_replica_host.replica.bus_reader import BusReader
from serve_replica_host.replica.bus_side import BusSide
from serve_replica_host.replica.direct_answers import DirectAnswers
from serve_replica_host.replica.exchange import Left, ToBus, ToUser
from serve_replica_host.replica.frame_batch import FrameBatch
from serve_replica_host.replica.traces import Traces
from serve_replica_host.replica.user_code import UserCode
from serve_replica_host.replica.user_side import UserSide

SWEEP_S: Final = 0.05
"""How late a deadline may be noticed."""
GUARD_S: Final = 0.005
"""While something is in flight: half of how late what comes is read when user code blocks its loop."""


@final
class BusDesk:
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
        self._reader = BusReader(self._to_user, self._frames, self._lock, self._work)
        self._bus_side = BusSide(
            publish=self._frames.publish,
            to_user=self._give_user,
            now=time.monotonic,
            metrics=metrics,
            max_concurrent_queries=max_concurrent_queries,
            streams_bodies=code.streams_bodies,
        )
        to_bus: Mailbox[ToBus] = Mailbox(asyncio.get_running_loop(), self._take_outcome)
        self._direct = DirectAnswers(
            connection, to_bus.put, self._take_left, lambda: self._bus_side.in_flight, time.monotonic
        )
        self.user_side: Final = UserSide(code, to_bus.put, self._direct, traces)
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
        """See `BusSide`."""
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
