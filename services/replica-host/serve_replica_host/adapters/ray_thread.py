"""The one thread that calls Ray, and the actors that it has started ahead."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from enum import IntEnum
from typing import Any, TypeVar, final

import msgspec
import structlog

from serve_common.names import ReplicaTag
from serve_common.runtime.settings import BusSettings
from serve_replica_host.adapters.remote_replicas import RemoteReplica


class SpareActor(msgspec.Struct, eq=False):
    """An actor, and the answers that are awaited: a future lives as long as somebody holds it."""

    actor: Any
    replica_tag: ReplicaTag | None = None
    """None while it waits for a replica."""
    reservation: Any = None
    """The placement group that holds its replica's resources; None when Ray gave them to the actor itself."""
    bus: BusSettings | None = None
    """Its replica's own."""
    is_placed: bool = False
    """Its replica has its resources."""
    pid: int = 0
    """0 until its process has said hello."""
    was_spare: bool = False
    """Its process had said hello when a replica took it."""
    address: str = ""
    """Of its machine; empty for the host's."""
    far: RemoteReplica | None = None
    """On another machine than the host; then it is asked for what it counts and says."""
    futures: list[Future[Any]] = []

    def watch(self, reference: Any, on_done: Callable[[Future[Any]], None]) -> None:
        """Call ``on_done`` with the answer, on a thread of Ray's."""
        future: Future[Any] = reference.future()
        self.futures = [known for known in self.futures if not known.done()]
        self.futures.append(future)
        future.add_done_callback(on_done)


@final
class SparePool:
    """Keeps as many actors waiting as replicas have one, at least half of ``spares_max`` and at most all of it.

    All methods on one thread.
    """

    def __init__(self, create: Callable[[], SpareActor], *, spares_max: int, starts_max: int) -> None:
        """``create`` starts one; ``starts_max`` is how many processes may start at once to fill up the pool."""
        self._create = create
        self._spares_max = spares_max
        self._starts_max = starts_max
        self._waiting: list[SpareActor] = []
        self._starting: list[SpareActor] = []
        self._taken: list[SpareActor] = []

    @property
    def waiting(self) -> int:
        """Actors that no replica has, those that still start included."""
        return len(self._waiting)

    def take(self) -> SpareActor:
        """The one that will be ready first; a new one when there is none. What it is told it does when it is ready."""
        if self._waiting:
            taken = next((held for held in self._waiting if held.pid), self._waiting[0])
            self._waiting.remove(taken)
            taken.was_spare = taken.pid > 0
        else:
            taken = self._start()
        self._taken.append(taken)
        return taken

    def hear_ready(self, held: SpareActor) -> None:
        """``held`` has said hello."""
        if held in self._starting:
            self._starting.remove(held)
        self.refill()

    def hear_end(self, held: SpareActor) -> None:
        """``held`` is gone. The pool is not filled up here: what ends at its start would end again at once."""
        for known in (self._starting, self._waiting, self._taken):
            if held in known:
                known.remove(held)

    def refill(self) -> None:
        """Start what is missing, as far as not too many start already."""
        wanted = min(self._spares_max, max((self._spares_max + 1) // 2, len(self._taken)))
        while len(self._waiting) < wanted and len(self._starting) < self._starts_max:
            self._waiting.append(self._start())

    def _start(self) -> SpareActor:
        held = self._create()
        self._starting.append(held)
        return held


_log = structlog.get_logger(__name__)

T = TypeVar("T")


class Urgency(IntEnum):
    """Of calls that wait, those with the lowest come first; among equals, the first come."""

    CHECK = 0
    """Questions and notes, which take no time themselves."""
    ORDINARY = 1
    START = 2


@final
class RayThread:
    """Runs calls one after the other; a daemon, so that a Ray that hangs cannot keep the process alive."""

    def __init__(self) -> None:
        self._calls: queue.PriorityQueue[tuple[Urgency, int, Callable[[], None]]] = queue.PriorityQueue()
        self._number = itertools.count()
        threading.Thread(target=self._run, name="ray", daemon=True).start()

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run ``call``; its result or exception is in the future."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call(*arguments))
            except Exception as error:  # noqa: BLE001 - it is handed to the caller
                future.set_exception(error)

        self._put(run, Urgency.ORDINARY)
        return future

    def post(self, call: Callable[..., None], *arguments: Any, urgency: Urgency = Urgency.ORDINARY) -> None:
        """Run ``call``, with nobody to wait for it; what it raises is logged."""

        def run() -> None:
            try:
                call(*arguments)
            except Exception as error:  # noqa: BLE001 - the thread must go on
                _log.error("ray_call_failed", call=call.__name__, exc_info=error)

        self._put(run, urgency)

    def _put(self, run: Callable[[], None], urgency: Urgency) -> None:
        self._calls.put((urgency, next(self._number), run))

    def _run(self) -> None:
        while True:
            _, _, run = self._calls.get()
            run()
