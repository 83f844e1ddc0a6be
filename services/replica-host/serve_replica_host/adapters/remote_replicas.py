"""Fetches metrics and log lines of replicas on other machines, and stores them with those of the local machine.

Why one fetch at a time: a replica that hangs blocks only one call, and a result is never older than the one before.
After a timeout its metrics count as unknown: the gauges are removed from the page, so that the load of the replica does
not count as measured. Its counters stay as they were.
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
from msgspec.msgpack import decode
from ray.exceptions import ActorDiedError, RayActorError

from serve_common.telemetry.log_lines import RateLimitedLogger
from serve_replica_host.adapters.metrics_files import RemoteFiles
from serve_replica_host.replica.telemetry.remote import Hello, RemoteTelemetry

_log = structlog.get_logger(__name__)

FETCH_INTERVAL_S: Final = 1.0
"""Seconds from a result to the next fetch. A replica writes counts twice a second, so the page is at most 2 s old."""
FETCH_TIMEOUT_S: Final = 3.0
_WARN_INTERVAL_S: Final = 60.0
_CLOSE_TIMEOUT_S: Final = 1.0


@final
class RemoteLines:
    """Writes log lines on a thread of its own: their reader may be slow, and Ray's thread must not block."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        """Starts the thread with the first lines."""
        self._write = write
        self._queue: queue.SimpleQueue[tuple[bytes, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def write(self, lines: bytes, on_written: Callable[[], None]) -> None:
        """Queue whole lines; callers wait for ``on_written`` before the next call, which bounds the queue."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="far-lines", daemon=True)
            self._thread.start()
        self._queue.put((lines, on_written))

    def close(self) -> None:
        """Wait briefly until everything is written. May block."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (queued := self._queue.get()) is not None:
            lines, on_written = queued
            try:
                self._write(lines)
            except Exception as error:  # noqa: BLE001 - the thread must go on
                _log.error("far_lines_not_written", exc_info=error)
            on_written()


@final
class RemoteReplica:
    """One replica on another machine. All methods run on the Ray thread, except the callbacks of fetches."""

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
        """``post`` and ``call_later`` (after seconds) run a function on the Ray thread."""
        self.process: Final = f"{hello.node_id}-{hello.pid}"
        """The process' name in `RemoteFiles`."""
        self._actor = actor
        self._log_fields = {"process": self.process, "address": hello.address}
        self._files = files
        self._lines = lines
        self._post = post
        self._call_later = call_later
        self._started_fetches = 0
        """Fetches started so far."""
        self._finished_fetches = 0
        self._future: Future[Any] | None = None
        """Keeps the future of the last fetch alive."""
        self._stored_files: dict[str, bytes] = {}
        """Contents of the files in the directory."""
        self._is_writing_lines = False
        self._has_ended = False
        self._too_large_logger = RateLimitedLogger(_log.warning, _WARN_INTERVAL_S)
        self._failed_logger = RateLimitedLogger(_log.warning, _WARN_INTERVAL_S)

    def fetch(self) -> None:
        """Fetch now, and a second after each result, until it has ended."""
        if self._has_ended:
            return
        self._started_fetches += 1
        # No more lines while the former ones are being written.
        future: Future[Any] = self._actor.fetch.remote(not self._is_writing_lines).future()
        self._future = future
        future.add_done_callback(lambda done: self._post(self._on_telemetry, done))
        self._call_later(FETCH_TIMEOUT_S, self._check_timeout, self._started_fetches)

    def store_final(self, telemetry: RemoteTelemetry) -> None:
        """Store the final telemetry of an ended process; later results of fetches are older and ignored."""
        if not self._has_ended:
            self._store(telemetry)
            self._has_ended = True

    def end(self) -> None:
        """Stop fetching: the process is gone, or not needed any more."""
        self._has_ended = True

    def _on_telemetry(self, done: Future[Any]) -> None:
        self._finished_fetches = self._started_fetches
        error = done.exception()
        if self._has_ended:
            if error is None:  # lines are returned only once
                self._write_lines(decode(done.result(), type=RemoteTelemetry).lines)
            return
        if error is None:
            try:
                self._store(decode(done.result(), type=RemoteTelemetry))
            except (OSError, msgspec.DecodeError) as failure:
                error = failure
        if error is not None:
            self._mark_unknown()
            if isinstance(error, ActorDiedError):  # which is reported separately
                self._has_ended = True
                return
            if not isinstance(error, RayActorError):
                self._failed_logger.log(time.monotonic(), "not_fetched", **self._log_fields, exc_info=error)
        self._call_later(FETCH_INTERVAL_S, self.fetch)

    def _check_timeout(self, fetch_number: int) -> None:
        """Check for a timeout of the fetch with that number."""
        if self._finished_fetches < fetch_number and not self._has_ended:
            _log.warning("fetch_unanswered", **self._log_fields, within_s=FETCH_TIMEOUT_S)
            self._mark_unknown()

    def _store(self, telemetry: RemoteTelemetry) -> None:
        self._write_lines(telemetry.lines)
        if telemetry.left_out_bytes:
            self._too_large_logger.log(
                time.monotonic(),
                "too_many_metrics_to_fetch",
                **self._log_fields,
                files_bytes=telemetry.left_out_bytes,
            )
            self._mark_unknown()
            return
        changed = {
            name: data for name, data in telemetry.files.items() if self._stored_files.get(name) != data
        }
        self._files.put(self.process, changed)
        self._stored_files = telemetry.files

    def _write_lines(self, lines: bytes) -> None:
        if lines:
            self._is_writing_lines = True
            self._lines.write(lines, self._lines_written)

    def _lines_written(self) -> None:
        self._is_writing_lines = False

    def _mark_unknown(self) -> None:
        """Mark its metrics as unknown."""
        self._stored_files = {}
        self._files.hide(self.process)


@final
class RemoteReplicas:
    """All remote replicas of a host. Methods run on the Ray thread unless noted otherwise."""

    def __init__(
        self,
        files: RemoteFiles,
        write_lines: Callable[[bytes], None],
        *,
        post: Callable[..., None],
        call_later: Callable[..., None],
    ) -> None:
        """``files`` receives metrics, ``write_lines`` log lines; the others are as for `RemoteReplica`."""
        self._files = files
        self._lines = RemoteLines(write_lines)
        self._post = post
        self._call_later = call_later

    def meet(self, actor: Any, hello: Hello) -> RemoteReplica | None:
        """Start fetching from the process of ``hello``; None if it is on the host's machine. On any thread."""
        if not hello.node_id:
            return None
        remote = RemoteReplica(
            actor, hello, self._files, self._lines, post=self._post, call_later=self._call_later
        )
        self._post(remote.fetch)
        return remote

    def store_final(
        self, remote: RemoteReplica | None, telemetry: RemoteTelemetry | None, then: Callable[[], None]
    ) -> None:
        """Store the final telemetry of a process, if there is any, then call ``then``. On any thread."""
        if remote is None or telemetry is None:
            then()
            return

        def take() -> None:
            try:
                remote.store_final(telemetry)
            finally:
                then()

        self._post(take)

    def close(self) -> None:
        """Wait briefly until all lines are written. May block; on any thread."""
        self._lines.close()
