"""Telemetry of a replica on another machine than its host, kept until the host fetches it; and the host's location."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, final

import msgspec

from serve_common.clock import Clock, SystemClock
from serve_common.names import BackendTag, ReplicaTag
from serve_common.telemetry.log_lines import dropped_line
from serve_replica_host.replica.telemetry.logs import HOST_ID, LOG_SOCKET, log_ids, open_stderr

FILES_BYTES_MAX: Final = 4 * 1024 * 1024
"""Maximum size of all metrics files of a process; a replica without user metrics has some 10 kB."""
LINES_BYTES_MAX: Final = 2 * 1024 * 1024
"""Maximum bytes of log lines kept until they are fetched."""
_USED_BYTES: Final = 4
"""Size of the header of prometheus_client's files, which has the number of used bytes."""


class RemoteTelemetry(msgspec.Struct, frozen=True, array_like=True):
    """The result of a fetch by the host."""

    files: dict[str, bytes] = {}
    """The used part of all of prometheus_client's files, by name."""
    lines: bytes = b""
    """Complete log lines that were not fetched before."""
    left_out_bytes: int = 0
    """Size of the files when they are too large, and left out; else 0."""


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """Identity of a process that Ray has placed."""

    pid: int
    node_id: str = ""
    """Ray's id of its node, if its host must fetch its telemetry; else empty."""
    address: str = ""
    """Address of that node."""


@final
class RetainedLines:
    """A bounded buffer of log lines: excess lines are written elsewhere and counted, and the count is logged."""

    def __init__(self, spill: Callable[[bytes], None], ids: Mapping[str, str], clock: Clock) -> None:
        """``spill`` receives excess lines; ``ids`` are fields of the line with their count."""
        self._spill = spill
        self._ids = dict(ids)
        self._clock = clock
        self._lock = threading.Lock()
        self._pieces: list[bytes] = []
        self._retained_bytes = 0
        self._left_out = 0

    def keep(self, piece: bytes) -> None:
        """Add whole lines, on one thread at a time."""
        with self._lock:
            fits = self._retained_bytes + len(piece) <= LINES_BYTES_MAX
            if fits:
                self._pieces.append(piece)
                self._retained_bytes += len(piece)
            else:
                self._left_out += piece.count(b"\n")
        if not fits:
            self._spill(piece)

    def give(self) -> bytes:
        """Return and remove all lines."""
        with self._lock:
            pieces, self._pieces, self._retained_bytes = self._pieces, [], 0
            left_out, self._left_out = self._left_out, 0
        if left_out:
            why = (
                "they came faster than the host fetched them; they are in Ray's log on the replica's machine"
            )
            pieces.append(dropped_line(self._clock.now(), self._ids, left_out, why))
        return b"".join(pieces)


def read_files(directory: Path) -> tuple[dict[str, bytes], int]:
    """Read the used bytes of the directory's ``.db`` files by name; or none and their size, if that is too large."""
    files: dict[str, bytes] = {}
    total = 0
    for path in sorted(directory.glob("*.db")):
        with path.open("rb") as file:
            head = file.read(_USED_BYTES)
            used = int.from_bytes(head, "little")
            if used < 2 * _USED_BYTES:
                continue  # being created
            total += used
            if total <= FILES_BYTES_MAX:
                files[path.name] = head + file.read(used - _USED_BYTES)
    return ({}, total) if total > FILES_BYTES_MAX else (files, 0)


PREFIX: Final = "muster-replica-"
_LOCK_GRACE_S: Final = 60.0
"""Seconds for which a new directory may not be locked yet."""


def make_locked_directory(now: float, root: Path | None = None) -> Path:
    """Create a private directory that this process locks, below ``root``: by default, where temporary files are.

    ``now`` is wall time. Raises OSError.

    Directories of processes that were killed are removed first. Why by locks and not by pids: replicas are mostly
    killed, so they cannot clean up, and a pid may be another process' by then. The kernel releases a lock when its
    process ends, however that happened.
    """
    root = Path(tempfile.gettempdir()) if root is None else root
    _remove_stale(root, now)
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
    # Open, and locked, as long as the process lives.
    fcntl.flock(os.open(directory, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_EX | fcntl.LOCK_NB)
    return directory


def _remove_stale(root: Path, now: float) -> None:
    for directory in root.glob(f"{PREFIX}*"):
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # another user's, or removed by another process meanwhile
            continue
        try:
            found = os.fstat(descriptor)
            if found.st_uid == os.getuid() and now - found.st_mtime > _LOCK_GRACE_S:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
        except BlockingIOError:
            pass  # its process lives
        finally:
            os.close(descriptor)


@final
class RemoteSide:
    """Telemetry of this process for its remote host. Thread-safe, but only one `fetch` at a time.

    Why fetched and not sent: the host requests more only when it has processed what came before, so neither side can be
    flooded.
    """

    def __init__(self, *, has_metrics: bool) -> None:
        """Raises OSError when no temporary directory can be created."""
        self._directory = make_locked_directory(SystemClock().now()) if has_metrics else None
        self._lines: RetainedLines | None = None

    @property
    def metrics_dir(self) -> str:
        """Private multiprocess directory of prometheus_client; empty for none."""
        return "" if self._directory is None else str(self._directory)

    def retain_lines(self, replica_tag: ReplicaTag, backend_tag: BackendTag) -> Callable[[bytes], None]:
        """Return the function that keeps the log lines of this process' replica."""
        ids = {"service": "replica", **log_ids(replica_tag, backend_tag)}
        self._lines = RetainedLines(open_stderr(), ids, SystemClock())
        return self._lines.keep

    def fetch(self, *, with_lines: bool) -> RemoteTelemetry:
        """Return all current metrics, and the lines since the last fetch with lines. Raises OSError."""
        files, left_out_bytes = ({}, 0) if self._directory is None else read_files(Path(self._directory))
        lines = self._lines.give() if with_lines and self._lines is not None else b""
        return RemoteTelemetry(files, lines, left_out_bytes)

    def leave(self) -> RemoteTelemetry:
        """The final fetch; removes the directory."""
        last = self.fetch(with_lines=True)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        return last


class HostLocation(msgspec.Struct, frozen=True, kw_only=True):
    """Location of the host, given to each actor when it is created."""

    metrics_dir: str = ""
    """prometheus_client's multiprocess directory on the host's machine; empty for none."""
    node_id: str = ""
    """Ray's id of the host's node; empty if all replicas are on it, and have inherited its environment."""
    host_id: str = ""
    log_socket: str = ""
    """Path of the log socket on the host's machine; empty for none."""
    variables: dict[str, str] = {}
    """Variables of the host, set in a process unless it has its own."""

    def is_shared_by(self, node_id: str) -> bool:
        """True when a process on ``node_id`` can write to the host's directories.

        The same node is not enough: it may run as another user, or in another container.

        Why by Ray's node and not by the directory alone: one of the same name may well exist on two machines, and is
        then a different one.
        """
        if not self.node_id:
            return True
        if node_id != self.node_id or not os.access(self.metrics_dir, os.R_OK | os.W_OK | os.X_OK):
            return False
        # Its name is random, so a process that sees it sees the host's own files.
        return not self.log_socket or Path(self.log_socket).exists()

    def enter(self, *, is_shared: bool) -> None:
        """Set the variables that this process would have inherited from its host."""
        if not self.node_id:
            return
        for name, value in self.variables.items():
            os.environ.setdefault(name, value)
        os.environ[HOST_ID] = self.host_id
        # The present value may be of another host, which started this Ray.
        os.environ.pop(LOG_SOCKET, None)
        if is_shared and self.log_socket:
            os.environ[LOG_SOCKET] = self.log_socket
