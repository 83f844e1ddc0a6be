"""The slots of a replica: what is in flight, waits, ended lately, or may be closed by a drain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Final, final

from serve_replica_host.ports import RequestMetrics
from serve_replica_host.replica.io.flow import OutgoingMessages
from serve_replica_host.replica.io.request import Phase, ReplicaRequest

QUIET_S: Final = 1.0
"""Without a message in either direction."""
SERVICE_RESTART: Final = 1012
"""As registered for RFC 6455: connect again."""
WHY_CLOSED: Final = "the replica is being replaced"


@final
class QuietSockets:
    """Watches the sockets of one replica from the beginning of its drain."""

    def __init__(self) -> None:
        self._seen: dict[bytes, tuple[int, float]] = {}
        """Frames so far, and since when there have been no more, by reply subject."""

    def find(self, exchanges: Iterable[ReplicaRequest], now: float) -> list[ReplicaRequest]:
        """Those that have been quiet for `QUIET_S`, as far as these looks can tell; ``now`` is `time.monotonic`.

        What is not among ``exchanges`` is forgotten.
        """
        quiet: list[ReplicaRequest] = []
        seen: dict[bytes, tuple[int, float]] = {}
        for exchange in exchanges:
            outgoing = exchange.outgoing
            if (
                not isinstance(outgoing, OutgoingMessages)
                or exchange.is_dropped
                or exchange.phase is not Phase.WORKING
            ):
                continue
            frames = outgoing.sent_frames
            if exchange.incoming is not None:
                frames += exchange.incoming.taken_frames
            known = self._seen.get(exchange.reply)
            owes_answer = exchange.sent_before == outgoing.sent_frames
            if known is None or known[0] != frames or owes_answer or outgoing.has_unsent:
                known = frames, now
            elif now - known[1] >= QUIET_S:
                quiet.append(exchange)
            seen[exchange.reply] = known
        self._seen = seen
        return quiet


KEPT_S: Final = 5.0
"""At least, unless there is too much; longer than a reconnect and the probe after it take."""
GENERATION_MAX: Final = 5_000
"""Requests."""
GENERATION_BYTES_MAX: Final = 4 * 1024 * 1024
ANSWER_BYTES_MAX: Final = 64 * 1024
"""A longer answer is not kept, only that it ended."""


@final
class RecentReplies:
    """By reply subject; all methods run on one loop. Times are `time.monotonic`."""

    __slots__ = ("_bytes", "_elder", "_forgotten_at", "_since", "_younger", "last_at")

    def __init__(self) -> None:
        self.last_at = float("-inf")
        """When a request ended last."""
        self._younger: dict[bytes, bytes] = {}
        self._elder: dict[bytes, bytes] = {}
        self._bytes = 0
        self._since = float("-inf")
        """When the younger generation began."""
        self._forgotten_at = float("-inf")
        """Everything that ended after this is held: a replica's process is the only one of its tag, so nothing ended
        before it began."""

    def __contains__(self, reply: object) -> bool:
        return reply in self._younger or reply in self._elder

    def add(self, reply: bytes, answer: bytes, now: float) -> None:
        """The request of ``reply`` has ended, or never will begin; ``answer`` is the one frame that says so, if any."""
        younger = self._younger
        if now - self._since > KEPT_S or len(younger) >= GENERATION_MAX or self._bytes > GENERATION_BYTES_MAX:
            younger = self._begin_generation(now)
        size_bytes = len(answer)
        if size_bytes > ANSWER_BYTES_MAX:
            answer, size_bytes = b"", 0
        younger[reply] = answer
        self._bytes += size_bytes
        self.last_at = now

    def answer(self, reply: bytes) -> bytes:
        """The answer of a request that ended; empty when it is not kept."""
        return self._younger.get(reply) or self._elder.get(reply, b"")

    def covers(self, since: float) -> bool:
        """Whether all that ended after ``since`` is held."""
        return since > self._forgotten_at

    def _begin_generation(self, now: float) -> dict[bytes, bytes]:
        if self._elder:
            self._forgotten_at = self._since
        self._elder, self._younger = self._younger, {}
        self._bytes = 0
        self._since = now
        return self._younger


WAITING_MAX: Final = 1_000


@final
class WaitingRoom:
    """By reply subject, in the order of arrival; all methods are called under the lock of its `ReplicaProtocol`."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: dict[bytes, ReplicaRequest] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, reply: object) -> bool:
        return reply in self._held

    @property
    def is_full(self) -> bool:
        """True when no more are kept."""
        return len(self._held) >= WAITING_MAX

    def add(self, exchange: ReplicaRequest) -> None:
        """Keep it, behind all others."""
        self._held[exchange.reply] = exchange

    def __iter__(self) -> Iterator[ReplicaRequest]:
        return iter(self._held.values())

    def discard(self, reply: bytes) -> ReplicaRequest | None:
        """Nobody wants it any more; None when it does not wait."""
        return self._held.pop(reply, None)

    def take_first(self) -> ReplicaRequest:
        """The one that has waited longest; there must be one."""
        return self._held.pop(next(iter(self._held)))

    def take_late(self, now: float) -> list[ReplicaRequest]:
        """Those whose deadline is over."""
        late = [exchange for exchange in self._held.values() if now >= exchange.deadline]
        for exchange in late:
            del self._held[exchange.reply]
        return late

    def take_all(self) -> list[ReplicaRequest]:
        """All, in order."""
        held = list(self._held.values())
        self._held.clear()
        return held


_LOOK_S: Final = 0.005


@final
class Slots:
    """Holds the exchanges of one replica, under the lock of its `ReplicaProtocol`."""

    def __init__(
        self, now: Callable[[], float], metrics: RequestMetrics, on_free: Callable[[], None]
    ) -> None:
        """``now`` is `time.monotonic` or a stand-in; ``on_free`` is called when one of ``waiting`` may get a slot."""
        self.waiting: Final = WaitingRoom()
        self._on_free = on_free
        self.held: dict[bytes, ReplicaRequest] = {}
        """By reply subject."""
        self.recent: Final = RecentReplies()
        """Those that have given their slots back."""
        self._now = now
        self._metrics = metrics
        self._ended_s = 0.0
        """How long the requests that are gone were here, all together."""

    def take(self, exchange: ReplicaRequest) -> None:
        """``exchange`` is in flight from now on."""
        self.held[exchange.reply] = exchange

    def release(self, exchange: ReplicaRequest, status: int, ended_at: float | None = None) -> None:
        """Give the slot back, counted under ``status``; does nothing when it was given back.

        ``ended_at`` is when its answer left, None for now.
        """
        if self.held.pop(exchange.reply, None) is None:
            return
        exchange.outgoing = None
        exchange.incoming = None
        now = self._now() if ended_at is None else ended_at
        self.recent.add(exchange.reply, exchange.last_frame, now)
        seconds = now - exchange.began_at
        self._ended_s += seconds
        self._metrics.count_answered(status, seconds)
        if exchange.trace is not None:
            exchange.trace.end(status, now)
        if self.waiting:
            self._on_free()

    def leave_waiting(self, exchange: ReplicaRequest) -> None:
        """``exchange`` has waited and never got a slot."""
        self._ended_s += self._now() - exchange.began_at

    def ongoing_seconds(self, now: float) -> float:
        """How long requests have been here so far, all together, those that wait or are in flight included."""
        here: float = sum(now - exchange.began_at for exchange in (*self.held.values(), *self.waiting))
        return self._ended_s + here

    async def wait_idle(self) -> None:
        """Wait until nothing is in flight."""
        # Whoever ends the last request may be another thread, which cannot set an event of this loop.
        while self.held:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
