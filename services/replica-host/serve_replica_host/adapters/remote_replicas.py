"""Brings metrics and log lines of replicas on other machines than this host to where those of its own machine are.

Why asked for one at a time: a replica that hangs then holds one call, however long it hangs, and an answer is never
older than the one before. What is not answered in time is not waited for longer, it is taken for unknown: the gauges
leave the page, and with them the replica leaves those whose load counts as measured. Its counters stay where they were.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, final

import msgspec
import structlog
from ray.exceptions import ActorDiedError, RayActorError

from serve_common.telemetry.log_lines import RateLimitedLogger
from serve_replica_host.adapters.metrics_files import RemoteFiles
from serve_replica_host.replica.telemetry.remote import Hello, RemoteTelemetry, decode_fetched

_log = structlog.get_logger(__name__)

FETCH_EVERY_S: Final = 1.0
"""After an answer. A replica writes its counts twice a second, so what is on the page is at most 2 s old."""
ANSWER_WITHIN_S: Final = 3.0
_SAID_EVERY_S: Final = 60.0
_CLOSE_TIMEOUT_S: Final = 1.0


@final
class RemoteLines:
    """Writes log lines on a thread of its own: whoever reads them may be slow, and Ray's thread must not wait."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        """Starts the thread with the first lines."""
        self._write = write
        self._waiting: queue.SimpleQueue[tuple[bytes, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def write(self, lines: bytes, on_written: Callable[[], None]) -> None:
        """Take whole lines; who offers more only after ``on_written`` bounds what waits here."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="far-lines", daemon=True)
            self._thread.start()
        self._waiting.put((lines, on_written))

    def close(self) -> None:
        """Wait a moment until everything is written. May block."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (taken := self._waiting.get()) is not None:
            lines, on_written = taken
            try:
                self._write(lines)
            except Exception as error:  # noqa: BLE001 - the thread must go on
                _log.error("far_lines_not_written", exc_info=error)
            on_written()


@final
class RemoteReplica:
    """One replica. All methods on the Ray thread, but for what runs when an answer is there."""

    def __init__(
        self,
        actor: Any,
        hello: Hello,
        files: RemoteFiles,
        lines: RemoteLines,
        *,
        post: Callable[..., None],
        call_later: Callable[..., None],
    ) -> None:
        """``post`` and ``call_later`` (after seconds) run a method on the Ray thread."""
        self.process: Final = f"{hello.node_id}-{hello.pid}"
        """Its name among `RemoteFiles`."""
        self._actor = actor
        self._whose = {"process": self.process, "address": hello.address}
        self._files = files
        self._lines = lines
        self._post = post
        self._call_later = call_later
        self._asked = 0
        """Fetches so far."""
        self._answered = 0
        self._future: Future[Any] | None = None
        """Lives as long as somebody holds it."""
        self._known: dict[str, bytes] = {}
        """What is in the directory."""
        self._is_writing_lines = False
        self._has_ended = False
        self._too_large = RateLimitedLogger(_log.warning, _SAID_EVERY_S)
        self._failed = RateLimitedLogger(_log.warning, _SAID_EVERY_S)

    def ask(self) -> None:
        """Fetch, and again a second after each answer, until it has ended."""
        if self._has_ended:
            return
        self._asked += 1
        # What the lines before wait for is not made longer.
        future: Future[Any] = self._actor.fetch.remote(not self._is_writing_lines).future()
        self._future = future
        future.add_done_callback(lambda done: self._post(self._hear, done))
        self._call_later(ANSWER_WITHIN_S, self._look, self._asked)

    def take_last(self, fetched: RemoteTelemetry) -> None:
        """What it gave with its last breath; an answer that comes after that is older."""
        if not self._has_ended:
            self._take(fetched)
            self._has_ended = True

    def end(self) -> None:
        """Its process is gone, or is to be forgotten; from now on nothing is asked or written."""
        self._has_ended = True

    def _hear(self, done: Future[Any]) -> None:
        self._answered = self._asked
        error = done.exception()
        if self._has_ended:
            if error is None:  # lines are given once
                self._take_lines(decode_fetched(done.result()).lines)
            return
        if error is None:
            try:
                self._take(decode_fetched(done.result()))
            except (OSError, msgspec.DecodeError) as failure:
                error = failure
        if error is not None:
            self._forget()
            if isinstance(error, ActorDiedError):  # which is told by itself
                self._has_ended = True
                return
            if not isinstance(error, RayActorError):
                self._failed.log(time.monotonic(), "not_fetched", **self._whose, exc_info=error)
        self._call_later(FETCH_EVERY_S, self.ask)

    def _look(self, asked: int) -> None:
        """So long after a fetch."""
        if self._answered < asked and not self._has_ended:
            _log.warning("fetch_unanswered", **self._whose, within_s=ANSWER_WITHIN_S)
            self._forget()

    def _take(self, fetched: RemoteTelemetry) -> None:
        self._take_lines(fetched.lines)
        if fetched.left_out_bytes:
            self._too_large.log(
                time.monotonic(),
                "too_many_metrics_to_fetch",
                **self._whose,
                files_bytes=fetched.left_out_bytes,
            )
            self._forget()
            return
        changed = {name: data for name, data in fetched.files.items() if self._known.get(name) != data}
        self._files.put(self.process, changed)
        self._known = fetched.files

    def _take_lines(self, lines: bytes) -> None:
        if lines:
            self._is_writing_lines = True
            self._lines.write(lines, self._lines_written)

    def _lines_written(self) -> None:
        self._is_writing_lines = False

    def _forget(self) -> None:
        """What it has in it now is not known."""
        self._known = {}
        self._files.hide(self.process)


@final
class RemoteReplicas:
    """All of a host. Methods on the Ray thread, but for those that say otherwise."""

    def __init__(
        self,
        files: RemoteFiles,
        write_lines: Callable[[bytes], None],
        *,
        post: Callable[..., None],
        call_later: Callable[..., None],
    ) -> None:
        """What they count goes to ``files`` and what they say to ``write_lines``; the rest as for `RemoteReplica`."""
        self._files = files
        self._lines = RemoteLines(write_lines)
        self._post = post
        self._call_later = call_later

    def meet(self, actor: Any, hello: Hello) -> RemoteReplica | None:
        """A process has said ``hello``. None for one of the host's own machine. On any thread."""
        if not hello.node_id:
            return None
        far = RemoteReplica(
            actor, hello, self._files, self._lines, post=self._post, call_later=self._call_later
        )
        self._post(far.ask)
        return far

    def take_last(
        self, far: RemoteReplica | None, fetched: RemoteTelemetry | None, then: Callable[[], None]
    ) -> None:
        """``then`` after what a process gave with its last breath is taken, if there is any. On any thread."""
        if far is None or fetched is None:
            then()
            return

        def take() -> None:
            try:
                far.take_last(fetched)
            finally:
                then()

        self._post(take)

    def close(self) -> None:
        """Wait a moment until all lines are written. May block; on any thread."""
        self._lines.close()
