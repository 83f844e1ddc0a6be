"""The slots of a replica: requests in flight, queued, recently ended, and sockets that a drain may close."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Final, final

from serve_common.protocol.frames import FRAME_BODY_BYTES_MAX
from serve_common.protocol.streams import BodyPieces, MessageQueue
from serve_replica_host.ports import RequestMetrics
from serve_replica_host.replica.io.request import Phase, ReplicaRequest

IDLE_S: Final = 1.0
"""Seconds without a message in either direction after which a socket is quiet."""
_RESENT_WITHIN_S: Final = 0.2
"""Seconds after a router's probe within which it sends again what the replica lacks; routers probe every second."""
SERVICE_RESTART: Final = 1012
"""WebSocket close code (registered for RFC 6455): reconnect."""
CLOSE_REASON: Final = "the replica is being replaced"


@final
class IdleSockets:
    """Finds quiet sockets of one replica during its drain.

    Why a drain closes quiet sockets: one may stay open for days, and its client can connect to another replica at any
    time. A socket in use stays, because what is being sent would be lost: one on which messages pass, and one whose
    client sent last, as the application may be working on its reply.

    Why frames are compared and no times recorded: while nothing drains, a message costs nothing here.
    """

    def __init__(self) -> None:
        self._seen: dict[bytes, tuple[int, float]] = {}
        """Number of frames, and since when it is unchanged, by reply subject."""

    def restart(self) -> None:
        """Take all sockets as used now: messages were lost on their way, and come again."""
        self._seen.clear()

    def find(self, exchanges: Iterable[ReplicaRequest], now: float) -> list[ReplicaRequest]:
        """The exchanges whose sockets were quiet for `IDLE_S` across calls; ``now`` is `time.monotonic`.

        Sockets that are not among ``exchanges`` are forgotten.
        """
        quiet: list[ReplicaRequest] = []
        seen: dict[bytes, tuple[int, float]] = {}
        for exchange in exchanges:
            outgoing = exchange.outgoing
            if (
                outgoing is None
                or not isinstance(outgoing.source, MessageQueue)
                or exchange.is_dropped
                or exchange.phase is not Phase.WORKING
            ):
                continue
            frames = outgoing.sent
            if exchange.messages_in is not None:
                frames += exchange.messages_in.next_sequence
            known = self._seen.get(exchange.reply)
            is_reply_due = exchange.sent_before == outgoing.sent
            has_unsent = outgoing.source.has_from(outgoing.sent)
            if known is None or known[0] != frames or is_reply_due or has_unsent:
                known = frames, now
            elif (
                now - known[1] >= IDLE_S and known[1] < exchange.last_seen_at <= now - _RESENT_WITHIN_S
            ):  # its router was heard since, and would have sent again what was lost
                quiet.append(exchange)
            seen[exchange.reply] = known
        self._seen = seen
        return quiet


RETENTION_MIN_S: Final = 8.0
"""Minimum seconds for which replies are kept, within the limits: longer than a reconnect and the probe after it, and
than a link needs to notice that its other end is silent (5 s)."""
GENERATION_MAX: Final = 10_000
"""Maximum requests of a generation."""
SMALL_BYTES_MAX: Final = 512
"""Maximum size of a response that a generation holds."""
LARGER_BYTES_MAX: Final = 8 * 1024 * 1024
"""Maximum bytes of the larger ones together; the oldest are dropped, and only their ends stay recorded."""
RESPONSE_BYTES_MAX: Final = FRAME_BODY_BYTES_MAX + 8 * 1024
"""Maximum size of a kept response; of larger ones only the end is recorded."""
UNACKNOWLEDGED_MAX: Final = 1_000
"""Maximum ended responses of several frames that are kept until their routers have them."""


@final
class RecentReplies:
    """Recently ended requests by reply subject; all methods run on one loop. Times are `time.monotonic`.

    Why: a response that is sent while its router reconnects is lost, and so may a request be. A replica that remembers
    them can send the response again, or answer with certainty that the request never started; both spare the client an
    error.

    Why two generations and no time for each entry: this is part of every request's cost. The elder generation is
    dropped as a whole when the younger is old enough, or full; how far back the record is complete stays known. Larger
    responses are held apart, as their bytes would fill a generation within a moment.
    """

    __slots__ = ("_elder", "_forgotten_at", "_larger", "_larger_bytes", "_since", "_younger", "last_at")

    def __init__(self) -> None:
        self.last_at = float("-inf")
        """When the last request ended."""
        self._younger: dict[bytes, bytes] = {}
        self._elder: dict[bytes, bytes] = {}
        self._larger: dict[bytes, bytes] = {}
        self._larger_bytes = 0
        self._since = float("-inf")
        """When the younger generation was started."""
        self._forgotten_at = float("-inf")
        """All requests that ended after this are recorded. Initially all: a replica has one process, so none ended
        before it started."""

    def __contains__(self, reply: object) -> bool:
        return reply in self._younger or reply in self._elder

    def add(self, reply: bytes, response: bytes, now: float) -> None:
        """Record that the request of ``reply`` has ended or never starts; ``response`` is its single frame, if any."""
        younger = self._younger
        if now - self._since > RETENTION_MIN_S or len(younger) >= GENERATION_MAX:
            younger = self._start_generation(now)
        if len(response) > SMALL_BYTES_MAX:
            self._hold_larger(reply, response)
            response = b""
        younger[reply] = response
        self.last_at = now

    def response(self, reply: bytes) -> bytes:
        """The response frame of an ended request; empty when it is not kept."""
        return self._younger.get(reply) or self._elder.get(reply) or self._larger.get(reply, b"")

    def covers(self, since: float) -> bool:
        """True when all requests that ended after ``since`` are recorded."""
        return since > self._forgotten_at

    def _start_generation(self, now: float) -> dict[bytes, bytes]:
        if self._elder:
            self._forgotten_at = self._since
        self._elder, self._younger = self._younger, {}
        self._since = now
        return self._younger

    def _hold_larger(self, reply: bytes, response: bytes) -> None:
        if len(response) > RESPONSE_BYTES_MAX:
            return
        self._larger_bytes += len(response) - len(self._larger.pop(reply, b""))
        self._larger[reply] = response
        while self._larger_bytes > LARGER_BYTES_MAX:
            self._larger_bytes -= len(self._larger.pop(next(iter(self._larger))))


WAITING_MAX: Final = 1_000


@final
class SlotQueue:
    """Queued requests by reply subject, in order of arrival; used under the lock of the `ReplicaProtocol`.

    Why in the replica and not in the routers that share it: none of them knows of the others' requests, so the one that
    retries soonest would be served most; here it is first come, first served. The queue is bounded, and has only
    requests that are complete and whose router has no other replica to try.
    """

    __slots__ = ("by_reply",)

    def __init__(self) -> None:
        self.by_reply: Final[dict[bytes, ReplicaRequest]] = {}

    def __len__(self) -> int:
        return len(self.by_reply)

    def __contains__(self, reply: object) -> bool:
        return reply in self.by_reply

    @property
    def is_full(self) -> bool:
        """True when no more requests may be queued."""
        return len(self.by_reply) >= WAITING_MAX

    def add(self, exchange: ReplicaRequest) -> None:
        """Append a request."""
        self.by_reply[exchange.reply] = exchange

    def __iter__(self) -> Iterator[ReplicaRequest]:
        return iter(self.by_reply.values())

    def discard(self, reply: bytes) -> ReplicaRequest | None:
        """Remove a request that was cancelled; None when it is not queued."""
        return self.by_reply.pop(reply, None)

    def take_first(self) -> ReplicaRequest:
        """Remove and return the oldest request; there must be one."""
        return self.by_reply.pop(next(iter(self.by_reply)))

    def take_late(self, now: float) -> list[ReplicaRequest]:
        """Remove and return the requests past their deadlines."""
        late = [exchange for exchange in self.by_reply.values() if now >= exchange.deadline]
        for exchange in late:
            del self.by_reply[exchange.reply]
        return late

    def take_all(self) -> list[ReplicaRequest]:
        """Remove and return all requests, in order."""
        active = list(self.by_reply.values())
        self.by_reply.clear()
        return active


_POLL_S: Final = 0.005


@final
class Slots:
    """The slots of one replica; used under the lock of its `ReplicaProtocol`.

    Whatever ends a request, its slot must be released exactly once; so only `release` does it.
    """

    def __init__(
        self, now: Callable[[], float], metrics: RequestMetrics, on_free: Callable[[], None]
    ) -> None:
        """``now`` is `time.monotonic` or a fake; ``on_free`` is called when one of ``waiting`` may get a slot."""
        self.waiting: Final = SlotQueue()
        self._on_free = on_free
        self.on_left: Callable[[bytes], None] = lambda _reply: None
        """Called with the reply subject of a request that nothing more is sent for; set by `ReplicaProtocol`."""
        self.active: dict[bytes, ReplicaRequest] = {}
        """Requests in flight by reply subject."""
        self.recent: Final = RecentReplies()
        """Requests that have released their slots."""
        self.unacknowledged: Final[dict[bytes, ReplicaRequest]] = {}
        """Those of them whose response has several frames, which may have to be sent again; in order of their ends."""
        self._now = now
        self._metrics = metrics
        self._ended_s = 0.0
        """Total seconds that ended requests have spent here."""

    def take(self, exchange: ReplicaRequest) -> None:
        """Give ``exchange`` a slot."""
        self.active[exchange.reply] = exchange

    def release(self, exchange: ReplicaRequest, status: int, ended_at: float | None = None) -> None:
        """Release the slot, counted under ``status``; idempotent.

        ``ended_at`` is when its response was sent; None means now.
        """
        if self.active.pop(exchange.reply, None) is None:
            return
        exchange.body_in = exchange.messages_in = None
        now = self._now() if ended_at is None else ended_at
        if exchange.outgoing is not None:
            self._keep_or_forget(exchange, now)
        else:
            self.on_left(exchange.reply)
        self.recent.add(exchange.reply, exchange.last_frame, now)
        seconds = now - exchange.started_at
        self._ended_s += seconds
        self._metrics.count_response(status, seconds)
        if exchange.trace is not None:
            exchange.trace.end(status, now)
        if self.waiting.by_reply:
            self._on_free()

    def _keep_or_forget(self, exchange: ReplicaRequest, now: float) -> None:
        """Keep a response of several frames until its router has it, if its end was sent."""
        outgoing = exchange.outgoing
        if outgoing is not None and outgoing.is_sent and not outgoing.is_acknowledged:
            exchange.last_seen_at = now
            self.unacknowledged[exchange.reply] = exchange
            if len(self.unacknowledged) > UNACKNOWLEDGED_MAX:
                self.forget(next(iter(self.unacknowledged)))
        else:
            _discard(exchange)
            self.on_left(exchange.reply)

    def forget(self, reply: bytes) -> None:
        """Forget one of `unacknowledged`."""
        _discard(self.unacknowledged.pop(reply))
        self.on_left(reply)

    def forget_old(self, now: float) -> None:
        """Forget those of `unacknowledged` whose routers have been silent for `RETENTION_MIN_S`."""
        for reply, exchange in list(self.unacknowledged.items()):
            if now - exchange.last_seen_at >= RETENTION_MIN_S:
                self.forget(reply)

    def leave_waiting(self, exchange: ReplicaRequest) -> None:
        """Count the time of a queued ``exchange`` that never got a slot."""
        self._ended_s += self._now() - exchange.started_at
        self.on_left(exchange.reply)

    def ongoing_seconds(self, now: float) -> float:
        """Total seconds that requests have spent here so far, including queued ones and those in flight."""
        here: float = sum(now - exchange.started_at for exchange in (*self.active.values(), *self.waiting))
        return self._ended_s + here

    async def wait_idle(self) -> None:
        """Wait until nothing is in flight."""
        # Another thread may end the last request, which cannot set an event of this loop.
        while self.active:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)


def _discard(exchange: ReplicaRequest) -> None:
    outgoing, exchange.outgoing = exchange.outgoing, None
    if outgoing is not None and isinstance(outgoing.source, BodyPieces | MessageQueue):
        outgoing.source.close()
