"""Forwards a process' log lines, from any thread, on a thread of its own: to a stream, and over NATS."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol, final

import msgspec
import structlog

from serve_common.errors import BadField
from serve_common.names import check_name
from serve_common.nats.connection import BusConnection
from serve_common.nats.options import NotConnected, OutboundFull, PayloadTooLarge
from serve_common.ports import Clock
from serve_common.protocol.decoding import UNREADABLE
from serve_common.protocol.logs import RECALL_LINES_MAX, RecallLogs, kind_of, read_line
from serve_common.protocol.subjects import Subjects
from serve_common.telemetry.log_lines import TOO_MANY, RateLimitedLogger, dropped_line, dropped_lines

WAITING_BYTES_MAX: Final = 4 * 1024 * 1024
"""Limit of lines that the forwarder's thread has not taken yet."""
UNSENT_LINES_MAX: Final = 1_000
"""Limit of lines that wait for the bus."""
RECENT_BYTES_MAX: Final = 512 * 1024
PIECE_BYTES_MAX: Final = 64 * 1024
"""Largest piece published at once: far below NATS' message limit, and the size of a datagram."""
GATHER_S: Final = 0.02
"""Seconds between rounds, so that a burst leaves in large pieces."""
_RETRY_S: Final = 0.5
"""Seconds between attempts while the outlet takes nothing."""
_FLUSH_WAIT_S: Final = 1.0
"""Seconds that the last flush of a process waits for a round that is blocked."""


class LogSink(Protocol):
    """Where lines leave the machine. Called on the forwarder's thread."""

    def publish(self, piece: bytes, lines: int) -> bool:
        """Take whole lines; False when that is not possible now, and nothing was taken."""
        ...


class TokenBucket:
    """A token bucket for published lines: ``rate_per_s`` lines per second, and bursts of ``burst``."""

    def __init__(self, rate_per_s: float = 500.0, burst: float = 1_000.0) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._tokens = burst
        self._at = 0.0

    def take(self, now: float) -> bool:
        """Take a token; False when there is none."""
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._at) * self._rate_per_s)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


@final
class LogForwarder:
    """Lines in, from any thread; lines out to ``write`` and to an outlet.

    Why a thread: code that logs waits neither for a file, nor for the bus, nor for their readers. It starts with the
    first line, and sleeps while there are none. Why everything is bounded: a loop that prints fills any queue, so what
    is too much is dropped and counted, and the count becomes a line itself.
    """

    def __init__(
        self,
        write: Callable[[bytes], None] | None,
        ids: Mapping[str, str],
        clock: Clock,
    ) -> None:
        """``write`` gets whole lines, in pieces, on the forwarder's thread; must not raise. None where others write.

        ``ids`` are fields of the forwarder's own lines.
        """
        self._write = write
        self._ids = ids
        self._clock = clock
        self._outlet: LogSink | None = None
        self._recent: deque[bytes] = deque(maxlen=RECALL_LINES_MAX)
        self._recent_bytes = 0
        self._rate = TokenBucket()
        self._lock = threading.Lock()
        self._round = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._unsent: deque[bytes] = deque()
        self._dropped = 0
        self._unpublished = 0
        self._is_child = False
        os.register_at_fork(after_in_child=self._reset_in_child)

    def offer(self, line: bytes) -> None:
        """Take one line, which ends with a newline; never waits."""
        with self._lock:
            if self._waiting_bytes + len(line) > WAITING_BYTES_MAX:
                self._dropped += 1
                dropped_lines.count(TOO_MANY, 1)
                return
            self._waiting.append(line)
            self._waiting_bytes += len(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
                self._thread.start()
        if not self._wake.is_set():
            self._wake.set()

    def use(self, outlet: LogSink | None) -> None:
        """Publish to ``outlet`` from now on, starting with the lines that wait."""
        self._outlet = outlet
        self._wake.set()

    def count_lost(self, lines: int) -> None:
        """Count lines that will not be published, such as those that an outlet took and could not send."""
        with self._lock:
            self._unpublished += lines

    def recent(self) -> list[bytes]:
        """The newest lines that are remembered, the oldest first."""
        with self._lock:
            return list(self._recent)

    def write_through(self, lines: bytes) -> None:
        """Write whole lines of others to the same stream, on the calling thread; they are neither kept nor sent."""
        if self._write is not None:
            self._write(lines)

    def flush(self) -> None:
        """Write and publish what waits now, on the calling thread. For the end of a process."""
        if self._round.acquire(timeout=_FLUSH_WAIT_S):
            try:
                self._run_round()
            finally:
                self._round.release()

    @property
    def is_in_forked_child(self) -> bool:
        """Whether this process was forked from the one that made the forwarder: it may end without warning."""
        return self._is_child

    def _reset_in_child(self) -> None:
        """Reset after a fork: it copies neither the thread nor a lock's owner, and bus and lines are the parent's."""
        self._lock, self._round, self._wake = threading.Lock(), threading.Lock(), threading.Event()
        self._thread = self._outlet = None
        self._waiting, self._unsent = deque(), deque()
        self._waiting_bytes = self._dropped = self._unpublished = 0
        self._is_child = True

    def _run(self) -> None:
        while True:
            # Retry without new lines what could not be published yet.
            has_unsent = self._outlet is not None and (self._unsent or self._unpublished)
            self._wake.wait(_RETRY_S if has_unsent else None)
            self._wake.clear()
            with self._round:
                self._run_round()
            time.sleep(GATHER_S)

    def _run_round(self) -> None:
        with self._lock:
            lines, self._waiting, self._waiting_bytes = self._waiting, deque(), 0
            dropped, self._dropped = self._dropped, 0
        queued = sum(self._queue(line) for line in lines)
        self.count_lost(len(lines) - queued + dropped)
        if dropped:
            lines.append(self._dropped_line(dropped, "they came faster than they could be written"))
        if self._write is not None:
            for piece, _ in pieces(lines):
                self._write(piece)
        with self._lock:
            for line in list(lines)[-RECALL_LINES_MAX:]:
                self._remember(line)
        self._publish()

    def _dropped_line(self, count: int, why: str) -> bytes:
        return dropped_line(self._clock.now(), self._ids, count, why)

    def _remember(self, line: bytes) -> None:
        if len(self._recent) == self._recent.maxlen:
            self._recent_bytes -= len(self._recent.popleft())
        self._recent.append(line)
        self._recent_bytes += len(line)
        while self._recent_bytes > RECENT_BYTES_MAX:
            self._recent_bytes -= len(self._recent.popleft())

    def _queue(self, line: bytes) -> bool:
        """False when a line is dropped: this one over the rate, or the oldest that waits for the bus."""
        if not self._rate.take(self._clock.now()):
            return False
        has_room = len(self._unsent) < UNSENT_LINES_MAX
        if not has_room:
            self._unsent.popleft()
        self._unsent.append(line)
        return has_room

    def _publish(self) -> None:
        outlet = self._outlet
        if outlet is None or not (self._unsent or self._unpublished):
            return
        for piece, count in pieces(self._unsent):
            if not outlet.publish(piece, count):
                return
            for _ in range(count):
                self._unsent.popleft()
        if self._unpublished and self._rate.take(self._clock.now()):
            with self._lock:
                left_out, self._unpublished = self._unpublished, 0
            line = self._dropped_line(left_out, "more than the bus is given; they are in the log itself")
            if not outlet.publish(line, 1):
                self.count_lost(left_out)


def pieces(lines: Sequence[bytes]) -> list[tuple[bytes, int]]:
    """Join whole lines into as few pieces of `PIECE_BYTES_MAX` as possible, each with its number of lines."""
    joined: list[tuple[bytes, int]] = []
    piece: list[bytes] = []
    size = 0
    for line in lines:
        if piece and size + len(line) > PIECE_BYTES_MAX:
            joined.append((b"".join(piece), len(piece)))
            piece, size = [], 0
        piece.append(line)
        size += len(line)
    if piece:
        joined.append((b"".join(piece), len(piece)))
    return joined


def recalled(
    payload: bytes, kind: str, recent: Sequence[bytes], subjects: Subjects
) -> Iterator[tuple[str, bytes]]:
    """Subjects and payloads to publish in response to a `RecallLogs`. Raises `BadField` when it is malformed.

    Without it `muster logs` would start with nothing. Why published and not replied: a process that runs user code must
    not be able to write to the inboxes of users' tools.
    """
    try:
        request = msgspec.json.decode(payload, type=RecallLogs)
    except UNREADABLE as error:
        raise BadField("recall", str(error)) from error
    subject = subjects.recalled_log(check_name(request.token, "token"), kind)
    read = [(line, read_line(line)) for line in recent]
    wanted = [
        (line, fields) for line, fields in read if request.filter.matches(kind_of(fields, kind), fields)
    ]
    wanted.sort(key=lambda each: str(each[1].get("timestamp", "")))
    for piece, _ in pieces([line for line, _ in wanted[-request.limit :]] if request.limit > 0 else []):
        yield subject, piece


_log = structlog.get_logger(__name__)
_NOT_SENT = (NotConnected, OutboundFull, PayloadTooLarge)


@final
class NatsLogSink:
    """A `LogSink` that publishes on the loop of a `BusConnection`."""

    def __init__(
        self, forwarder: LogForwarder, bus: BusConnection, subjects: Subjects, kind: str, process_id: str
    ) -> None:
        """Must be called on the connection's loop; publishes from now on."""
        self._forwarder = forwarder
        self._bus = bus
        self._subjects = subjects
        self._kind = kind
        self._subject = subjects.log(kind, process_id)
        self._loop = asyncio.get_running_loop()
        self._refused = RateLimitedLogger(_log.warning)
        bus.subscribe(subjects.log_recall, self._replay_recent)
        forwarder.use(self)

    def publish(self, piece: bytes, lines: int) -> bool:
        if not self._bus.is_connected or self._loop.is_closed():
            return False
        try:
            self._loop.call_soon_threadsafe(self._send, piece, lines)
        except RuntimeError:  # closed in this moment
            return False
        return True

    async def close(self) -> None:
        """Publish the lines that wait, and none after that; the connection may be closed then."""
        self._forwarder.flush()
        self._forwarder.use(None)
        await asyncio.sleep(0)  # send what was just scheduled

    def _send(self, piece: bytes, lines: int) -> None:
        try:
            self._bus.publish(self._subject, piece)
        except _NOT_SENT:
            self._forwarder.count_lost(lines)

    def _replay_recent(self, _subject: bytes, _reply: bytes, payload: bytes, _headers: bytes | None) -> None:
        try:
            for subject, piece in recalled(payload, self._kind, self._forwarder.recent(), self._subjects):
                self._bus.publish(subject, piece)
        except (BadField, *_NOT_SENT) as error:
            self._refused.log(time.monotonic(), "logs_not_recalled", reason=str(error))
