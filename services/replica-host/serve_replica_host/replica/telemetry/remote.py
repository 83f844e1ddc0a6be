"""A replica on another machine than its host: what it keeps until its host fetches it, and where that host is."""

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

from serve_common.names import BackendTag, ReplicaTag
from serve_common.ports import Clock
from serve_common.runtime.clock import SystemClock
from serve_common.telemetry.log_lines import dropped_line
from serve_replica_host.replica.telemetry.logs import HOST_ID, LOG_SOCKET, log_ids, own_stderr

FILES_BYTES_MAX: Final = 4 * 1024 * 1024
"""Of all metrics of a process. A replica of ours alone has some 10 kB."""
LINES_BYTES_MAX: Final = 2 * 1024 * 1024
"""Log lines that wait to be fetched."""
_USED_BYTES: Final = 4
"""prometheus_client's files begin with how many of their bytes are used."""


class RemoteTelemetry(msgspec.Struct, frozen=True, array_like=True):
    """An answer to the host."""

    files: dict[str, bytes] = {}
    """The used part of prometheus_client's files, by name; whole, for every one that there is."""
    lines: bytes = b""
    """Whole log lines that the host has not been given yet."""
    left_out_bytes: int = 0
    """So large are the files when they are too large, and none is there."""


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """Who a process is that Ray has placed."""

    pid: int
    node_id: str = ""
    """Ray's name of its machine, when its host must fetch what it has to say; else empty."""
    address: str = ""
    """Of that machine."""


@final
class KeptLines:
    """Bounded: what does not fit is written elsewhere, counted, and the count is a line itself."""

    def __init__(self, spill: Callable[[bytes], None], ids: Mapping[str, str], clock: Clock) -> None:
        """``spill`` takes what does not fit; ``ids`` are in the line that counts it."""
        self._spill = spill
        self._ids = dict(ids)
        self._clock = clock
        self._lock = threading.Lock()
        self._pieces: list[bytes] = []
        self._kept_bytes = 0
        self._left_out = 0

    def keep(self, piece: bytes) -> None:
        """Take whole lines, on one thread at a time."""
        with self._lock:
            fits = self._kept_bytes + len(piece) <= LINES_BYTES_MAX
            if fits:
                self._pieces.append(piece)
                self._kept_bytes += len(piece)
            else:
                self._left_out += piece.count(b"\n")
        if not fits:
            self._spill(piece)

    def give(self) -> bytes:
        """Everything that is kept, which is then forgotten."""
        with self._lock:
            pieces, self._pieces, self._kept_bytes = self._pieces, [], 0
            left_out, self._left_out = self._left_out, 0
        if left_out:
            why = (
                "they came faster than the host fetched them; they are in Ray's log on the replica's machine"
            )
            pieces.append(dropped_line(self._clock.now(), self._ids, left_out, why))
        return b"".join(pieces)


def read_files(directory: Path) -> tuple[dict[str, bytes], int]:
    """The used bytes of the directory's ``.db`` files by name; or none and their size, when that is too large."""
    files: dict[str, bytes] = {}
    total = 0
    for path in sorted(directory.glob("*.db")):
        with path.open("rb") as file:
            head = file.read(_USED_BYTES)
            used = int.from_bytes(head, "little")
            if used < 2 * _USED_BYTES:
                continue  # being made at this moment
            total += used
            if total <= FILES_BYTES_MAX:
                files[path.name] = head + file.read(used - _USED_BYTES)
    return ({}, total) if total > FILES_BYTES_MAX else (files, 0)


def encode_fetched(value: RemoteTelemetry | Hello) -> bytes:
    """The bytes that travel through Ray."""
    return msgspec.msgpack.encode(value)


def decode_fetched(data: bytes) -> RemoteTelemetry:
    """A `RemoteTelemetry`; raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=RemoteTelemetry)


def decode_hello(data: bytes) -> Hello:
    """A `Hello`; raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=Hello)


PREFIX: Final = "muster-replica-"
_YOUNG_S: Final = 60.0
"""One that is younger may not be locked yet."""


def make_private_directory(now: float, root: Path | None = None) -> Path:
    """A new one below ``root``, by default where the system puts temporary files. ``now`` is wall time.

    Raises OSError.
    """
    root = Path(tempfile.gettempdir()) if root is None else root
    _remove_left(root, now)
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
    # Open as long as the process lives.
    fcntl.flock(os.open(directory, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_EX | fcntl.LOCK_NB)
    return directory


def _remove_left(root: Path, now: float) -> None:
    for directory in root.glob(f"{PREFIX}*"):
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # another user's, or removed by another process meanwhile
            continue
        try:
            found = os.fstat(descriptor)
            if found.st_uid == os.getuid() and now - found.st_mtime > _YOUNG_S:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
        except BlockingIOError:
            pass  # its process lives
        finally:
            os.close(descriptor)


@final
class RemoteSide:
    """Of one process. Methods may be called from any thread, `fetch` from one at a time."""

    def __init__(self, *, has_metrics: bool) -> None:
        """Raises OSError when there is no room for temporary files."""
        self._directory = make_private_directory(SystemClock().now()) if has_metrics else None
        self._lines: KeptLines | None = None

    @property
    def metrics_dir(self) -> str:
        """prometheus_client's multiprocess directory of this process alone; empty for none."""
        return "" if self._directory is None else str(self._directory)

    def keep_lines(self, replica_tag: ReplicaTag, backend_tag: BackendTag) -> Callable[[bytes], None]:
        """The way for the log lines of the replica that this process has become."""
        ids = {"service": "replica", **log_ids(replica_tag, backend_tag)}
        self._lines = KeptLines(own_stderr(), ids, SystemClock())
        return self._lines.keep

    def fetch(self, *, with_lines: bool) -> RemoteTelemetry:
        """All metrics as they are now, and the lines since the last time. Raises OSError."""
        files, left_out_bytes = ({}, 0) if self._directory is None else read_files(Path(self._directory))
        lines = self._lines.give() if with_lines and self._lines is not None else b""
        return RemoteTelemetry(files, lines, left_out_bytes)

    def leave(self) -> RemoteTelemetry:
        """The last fetch of a process that has nothing more to say."""
        last = self.fetch(with_lines=True)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        return last


class HostLocation(msgspec.Struct, frozen=True, kw_only=True):
    """What the actor is told when it is made."""

    metrics_dir: str = ""
    """prometheus_client's multiprocess directory on the host's machine; empty for none."""
    node_id: str = ""
    """Ray's name of the host's machine; empty where all replicas are on it, and have inherited its environment."""
    host_id: str = ""
    log_socket: str = ""
    """Its path on the host's machine; empty where the host has none."""
    variables: dict[str, str] = {}
    """Of the host's environment, for a process whose own has none of that name."""

    def is_shared_by(self, node_id: str) -> bool:
        """Whether a process on ``node_id`` can write to what the host reads.

        The same node is not enough: it may run as another user, or in another container.
        """
        if not self.node_id:
            return True
        if node_id != self.node_id or not os.access(self.metrics_dir, os.R_OK | os.W_OK | os.X_OK):
            return False
        # Its name is random, so who sees it sees the host's own files.
        return not self.log_socket or Path(self.log_socket).exists()

    def enter(self, *, is_shared: bool) -> None:
        """Make this process' environment what it would have inherited from its host."""
        if not self.node_id:
            return
        for name, value in self.variables.items():
            os.environ.setdefault(name, value)
        os.environ[HOST_ID] = self.host_id
        # What is there may be another host's, that started this Ray.
        os.environ.pop(LOG_SOCKET, None)
        if is_shared and self.log_socket:
            os.environ[LOG_SOCKET] = self.log_socket


def encode_place(place: HostLocation) -> bytes:
    """The bytes that travel through Ray."""
    return msgspec.msgpack.encode(place)


def decode_place(data: bytes) -> HostLocation:
    """A `HostLocation`; raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=HostLocation)
