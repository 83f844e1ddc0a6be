"""Forwards a process' log lines, from any thread, on a thread of its own: to a stream, and over NATS."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol, final

import msgspec
import structlog

from serve_common.clock import Clock, TokenBucket
from serve_common.errors import BadField, ServeError
from serve_common.names import check_name
from serve_common.nats.connection import BusConnection
from serve_common.protocol.reports import REPLAY_LINES_MAX, ReplayRecentLogs, get_kind, read_line
from serve_common.protocol.subjects import UNREADABLE, Subjects
from serve_common.runtime.tasks import TaskOwner
from serve_common.telemetry.log_lines import TOO_MANY, RateLimitedLogger, dropped_line, dropped_lines

WAITING_BYTES_MAX: Final = 4 * 1024 * 1024
"""Limit of lines that the forwarder's thread has not taken yet."""
UNSENT_LINES_MAX: Final = 1_000
"""Limit of lines that wait for the bus."""
PUBLISHED_LINES_PER_S: Final = 500.0
PUBLISHED_LINES_BURST: Final = 1_000.0
RECENT_BYTES_MAX: Final = 512 * 1024
PIECE_BYTES_MAX: Final = 64 * 1024
"""Largest piece published at once: far below NATS' message limit, and the size of a datagram."""
GATHER_S: Final = 0.02
"""Seconds between rounds, so that a burst leaves in large pieces."""
_RETRY_S: Final = 0.5
"""Seconds between attempts while the sink takes nothing."""
_FLUSH_WAIT_S: Final = 1.0
"""Seconds that the last flush of a process waits for a round that is blocked."""


class LogSink(Protocol):
    """Where lines leave the machine. Called on the forwarder's thread."""

    def publish(self, piece: bytes, lines: int) -> bool:
        """Take whole lines; False when that is not possible now, and nothing was taken."""
        ...


@final
class LogForwarder:
    """Lines in, from any thread; lines out to ``write`` and to a sink.

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
        self._sink: LogSink | None = None
        self._recent: deque[bytes] = deque(maxlen=REPLAY_LINES_MAX)
        self._recent_bytes = 0
        self._rate = TokenBucket(PUBLISHED_LINES_PER_S, PUBLISHED_LINES_BURST)
        self._lock = threading.Lock()
        self._round = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._unsent: deque[bytes] = deque()
        self._dropped = 0
        self._unpublished = 0
        self.is_in_forked_child = False
        """Whether this process was forked from the one that made the forwarder: it may end without warning."""
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

    def use(self, sink: LogSink | None) -> None:
        """Publish to ``sink`` from now on, starting with the lines that wait."""
        self._sink = sink
        self._wake.set()

    def count_lost(self, lines: int) -> None:
        """Count lines that will not be published, such as those that a sink took and could not send."""
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

    def _reset_in_child(self) -> None:
        """Reset after a fork: it copies neither the thread nor a lock's owner, and bus and lines are the parent's."""
        self._lock, self._round, self._wake = threading.Lock(), threading.Lock(), threading.Event()
        self._thread = self._sink = None
        self._waiting, self._unsent = deque(), deque()
        self._waiting_bytes = self._dropped = self._unpublished = 0
        self.is_in_forked_child = True

    def _run(self) -> None:
        while True:
            # Retry without new lines what could not be published yet.
            has_unsent = self._sink is not None and (self._unsent or self._unpublished)
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
            for line in list(lines)[-REPLAY_LINES_MAX:]:
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
        has_space = len(self._unsent) < UNSENT_LINES_MAX
        if not has_space:
            self._unsent.popleft()
        self._unsent.append(line)
        return has_space

    def _publish(self) -> None:
        sink = self._sink
        if sink is None or not (self._unsent or self._unpublished):
            return
        for piece, count in pieces(self._unsent):
            if not sink.publish(piece, count):
                return
            for _ in range(count):
                self._unsent.popleft()
        if self._unpublished and self._rate.take(self._clock.now()):
            with self._lock:
                left_out, self._unpublished = self._unpublished, 0
            line = self._dropped_line(left_out, "more than the bus is given; they are in the log itself")
            if not sink.publish(line, 1):
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
    """Subjects and payloads to publish in response to a `ReplayRecentLogs`. Raises `BadField` when it is malformed.

    Without it `muster logs` would start with nothing. Why published and not replied: a process that runs user code must
    not be able to write to the inboxes of users' tools.
    """
    try:
        request = msgspec.json.decode(payload, type=ReplayRecentLogs)
    except UNREADABLE as error:
        raise BadField("recall", str(error)) from error
    subject = subjects.recalled_log(check_name(request.token, "token"), kind)
    read = [(line, read_line(line)) for line in recent]
    wanted = [
        (line, fields) for line, fields in read if request.filter.matches(get_kind(fields, kind), fields)
    ]
    wanted.sort(key=lambda each: str(each[1].get("timestamp", "")))
    for piece, _ in pieces([line for line, _ in wanted[-request.limit :]] if request.limit > 0 else []):
        yield subject, piece


_log = structlog.get_logger(__name__)
_PUBLISHES_MAX: Final = 16
"""Concurrent publishes of log lines."""
_CLOSE_TIMEOUT_S: Final = 1.0

Send = Callable[[str, bytes], Awaitable[None]]
"""Publish a payload on a subject. Raises a `ServeError` when that is not possible."""


@final
class NatsLogSink:
    """A `LogSink` that publishes on the event loop on which it was made, and replays recent lines on request."""

    def __init__(
        self,
        forwarder: LogForwarder,
        subjects: Subjects,
        kind: str,
        process_id: str,
        of_others: Callable[[], list[bytes]] = list,
    ) -> None:
        """Publishes nothing before `join` or `open`.

        ``of_others`` returns recent lines of other processes, retained by this one.
        """
        self.replay_subject: Final = subjects.log_replay
        """Subject of requests for `replay_recent`."""
        self._forwarder = forwarder
        self._subjects = subjects
        self._kind = kind
        self._subject = subjects.log(kind, process_id)
        self._of_others = of_others
        self._loop = asyncio.get_running_loop()
        self._tasks = TaskOwner("logs")
        self._is_connected: Callable[[], bool] = lambda: False
        self._send: Send | None = None
        self._refused = RateLimitedLogger(_log.warning)

    def join(self, bus: BusConnection) -> None:
        """Publish over ``bus``, which must be on the same loop, from now on."""

        async def send(subject: str, piece: bytes) -> None:
            bus.publish(subject, piece)

        def on_replay(_subject: bytes, _reply: bytes, payload: bytes, _headers: bytes | None) -> None:
            if self._send is not None and len(self._tasks) < _PUBLISHES_MAX:
                self._tasks.start(self.replay_recent(payload), "replay")

        bus.subscribe(self.replay_subject, on_replay)
        self.open(lambda: bus.is_connected, send)

    def open(self, is_connected: Callable[[], bool], send: Send) -> None:
        """Publish by ``send`` from now on, while ``is_connected``, which is called on any thread."""
        self._is_connected, self._send = is_connected, send
        self._forwarder.use(self)

    def publish(self, piece: bytes, lines: int) -> bool:
        if not self._is_connected() or len(self._tasks) >= _PUBLISHES_MAX:
            return False
        try:
            self._loop.call_soon_threadsafe(self._start, piece, lines)
        except RuntimeError:  # the loop is closed: the process ends
            return False
        return True

    async def replay_recent(self, payload: bytes) -> None:
        """Respond to a `ReplayRecentLogs`."""
        if self._send is None:
            return
        try:
            recent = [*self._of_others(), *self._forwarder.recent()]
            for subject, piece in recalled(payload, self._kind, recent, self._subjects):
                await self._send(subject, piece)
        except ServeError as error:
            self._refused.log(time.monotonic(), "logs_not_recalled", reason=str(error))

    async def close(self) -> None:
        """Publish the lines that wait, and none after that; the connection may be closed then."""
        self._forwarder.flush()
        self._forwarder.use(None)
        # What was just scheduled becomes tasks, and those send.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self._send = None
        await self._tasks.close(_CLOSE_TIMEOUT_S)

    def _start(self, piece: bytes, lines: int) -> None:
        if self._send is None:
            self._forwarder.count_lost(lines)
        else:
            self._tasks.start(self._publish(self._send, piece, lines), "publish")

    async def _publish(self, send: Send, piece: bytes, lines: int) -> None:
        try:
            await send(self._subject, piece)
        except ServeError:
            self._forwarder.count_lost(lines)
