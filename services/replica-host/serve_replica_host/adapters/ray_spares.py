"""Actors that have started ahead, and wait for a replica that needs one.

Why: a process that can serve takes most of a second to start, nearly all of it Python's imports. One that waits is a
replica within some hundredths of a second, so that scaling up and rolling updates do not wait for it. Each costs memory
meanwhile, so there are few: as many as replicas run, for a rolling update needs as many anew, within limits. The
missing ones are started when no replica waits for the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, final

import msgspec

from serve_common.names import ReplicaTag
from serve_common.settings import BusSettings
from serve_replica_host.adapters.far_replicas import FarReplica


class HeldActor(msgspec.Struct, eq=False):
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
    far: FarReplica | None = None
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

    def __init__(self, create: Callable[[], HeldActor], *, spares_max: int, starts_max: int) -> None:
        """``create`` starts one; ``starts_max`` is how many processes may start at once to fill up the pool."""
        self._create = create
        self._spares_max = spares_max
        self._starts_max = starts_max
        self._waiting: list[HeldActor] = []
        self._starting: list[HeldActor] = []
        self._taken: list[HeldActor] = []

    @property
    def waiting(self) -> int:
        """Actors that no replica has, those that still start included."""
        return len(self._waiting)

    def take(self) -> HeldActor:
        """The one that will be ready first; a new one when there is none. What it is told it does when it is ready."""
        if self._waiting:
            taken = next((held for held in self._waiting if held.pid), self._waiting[0])
            self._waiting.remove(taken)
            taken.was_spare = taken.pid > 0
        else:
            taken = self._start()
        self._taken.append(taken)
        return taken

    def hear_ready(self, held: HeldActor) -> None:
        """``held`` has said hello."""
        if held in self._starting:
            self._starting.remove(held)
        self.refill()

    def hear_end(self, held: HeldActor) -> None:
        """``held`` is gone. The pool is not filled up here: what ends at its start would end again at once."""
        for known in (self._starting, self._waiting, self._taken):
            if held in known:
                known.remove(held)

    def refill(self) -> None:
        """Start what is missing, as far as not too many start already."""
        wanted = min(self._spares_max, max((self._spares_max + 1) // 2, len(self._taken)))
        while len(self._waiting) < wanted and len(self._starting) < self._starts_max:
            self._waiting.append(self._start())

    def _start(self) -> HeldActor:
        held = self._create()
        self._starting.append(held)
        return held
