"""The thread that calls Ray, and the pool of spare actors."""

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
from serve_common.protocol.reports import ReplicaGoal
from serve_common.runtime.settings import BusSettings
from serve_replica_host.adapters.remote_replicas import RemoteReplica


class RayActorHandle(msgspec.Struct, eq=False):
    """An actor, and references to the futures of its calls, which keep them alive."""

    actor: Any
    goal: ReplicaGoal | None = None
    """Its replica; None while it is a spare."""
    reservation: Any = None
    """The placement group with its replica's resources; None when Ray assigned them to the actor itself."""
    bus: BusSettings | None = None
    """The replica's own settings."""
    is_placed: bool = False
    """True once its replica's resources are reserved."""
    pid: int = 0
    """Process id; 0 until its `hello` call has returned."""
    was_spare: bool = False
    """True when its process was ready before a replica took it."""
    address: str = ""
    """Address of its machine; empty for the host's."""
    remote: RemoteReplica | None = None
    """Set if it is on another machine than the host: its metrics and log lines are then fetched."""
    futures: list[Future[Any]] = []

    @property
    def replica_tag(self) -> ReplicaTag | None:
        """Tag of its replica; None while it is a spare."""
        return None if self.goal is None else self.goal.replica_tag

    def watch(self, reference: Any, on_done: Callable[[Future[Any]], None]) -> None:
        """Call ``on_done`` with the completed future, on one of Ray's threads."""
        future: Future[Any] = reference.future()
        self.futures = [known for known in self.futures if not known.done()]
        self.futures.append(future)
        future.add_done_callback(on_done)


@final
class SparePool:
    """Keeps as many spare actors as are in use by replicas, from half of ``spares_max`` up to all of it.

    All methods run on one thread.

    Why: a process that can serve takes most of a second to start, nearly all of it Python's imports. A spare becomes a
    replica within some hundredths of a second, so that scaling up and rolling updates do not wait for imports. Each
    spare costs memory meanwhile, so there are few: a rolling update needs as many new replicas as run, within limits.
    Missing spares are started after the replicas' own starts, so that they do not compete for the machine.
    """

    def __init__(self, create: Callable[[], RayActorHandle], *, spares_max: int, starts_max: int) -> None:
        """``create`` starts an actor; ``starts_max`` is how many processes may start at once to refill the pool."""
        self._create = create
        self._spares_max = spares_max
        self._starts_max = starts_max
        self._spares: list[RayActorHandle] = []
        self._starting: list[RayActorHandle] = []
        self._taken: list[RayActorHandle] = []

    @property
    def waiting(self) -> int:
        """Number of spare actors, including those that are starting."""
        return len(self._spares)

    def take(self) -> RayActorHandle:
        """Take the spare that will be ready first, or a new actor; its calls run once it is ready."""
        if self._spares:
            taken = next((spare for spare in self._spares if spare.pid), self._spares[0])
            self._spares.remove(taken)
            taken.was_spare = taken.pid > 0
        else:
            taken = self._start()
        self._taken.append(taken)
        return taken

    def on_ready(self, spare: RayActorHandle) -> None:
        """Note that the process of ``spare`` is ready."""
        if spare in self._starting:
            self._starting.remove(spare)
        self.refill()

    def on_ended(self, spare: RayActorHandle) -> None:
        """Remove ``spare``, which has ended. The pool is not refilled: a failing start would be repeated at once."""
        for known in (self._starting, self._spares, self._taken):
            if spare in known:
                known.remove(spare)

    def refill(self) -> None:
        """Start missing spares, unless too many are starting."""
        wanted = min(self._spares_max, max((self._spares_max + 1) // 2, len(self._taken)))
        while len(self._spares) < wanted and len(self._starting) < self._starts_max:
            self._spares.append(self._start())

    def _start(self) -> RayActorHandle:
        spare = self._create()
        self._starting.append(spare)
        return spare


_log = structlog.get_logger(__name__)

T = TypeVar("T")


class Urgency(IntEnum):
    """Priority of queued calls, lowest first; equal ones run in order.

    Why: on a busy machine a start or a kill takes Ray a tenth of a second and more. Behind a hundred of them a health
    check would wait until its replica counts as unhealthy.
    """

    CHECK = 0
    """Checks and notifications, which take no time themselves."""
    ORDINARY = 1
    START = 2


@final
class RayThread:
    """Runs calls sequentially; a daemon, so that a hanging Ray cannot keep the process alive.

    Why one thread, for the lifetime of the process: Ray's own processes ask the kernel to be killed when the *thread*
    that started them ends, so a runtime that was started by a pool's thread dies with it. And Ray's calls block for a
    few milliseconds each, which no event loop should wait for.
    """

    def __init__(self) -> None:
        self._calls: queue.PriorityQueue[tuple[Urgency, int, Callable[[], None]]] = queue.PriorityQueue()
        self._sequence = itertools.count()
        threading.Thread(target=self._run, name="ray", daemon=True).start()

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run ``call``; its result or exception is in the future."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call(*arguments))
            except Exception as error:  # noqa: BLE001 - it is passed to the caller
                future.set_exception(error)

        self._enqueue(run, Urgency.ORDINARY)
        return future

    def post(self, call: Callable[..., None], *arguments: Any, urgency: Urgency = Urgency.ORDINARY) -> None:
        """Run ``call`` without waiting for it; exceptions are logged."""

        def run() -> None:
            try:
                call(*arguments)
            except Exception as error:  # noqa: BLE001 - the thread must go on
                _log.error("ray_call_failed", call=call.__name__, exc_info=error)

        self._enqueue(run, urgency)

    def _enqueue(self, run: Callable[[], None], urgency: Urgency) -> None:
        self._calls.put((urgency, next(self._sequence), run))

    def _run(self) -> None:
        while True:
            _, _, run = self._calls.get()
            run()
