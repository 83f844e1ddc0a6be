"""Receives log lines of this host's replicas, writes them to its own standard error, and retains the newest."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, final

import msgspec
import structlog

REPLICAS_MAX: Final = 64
LINES_MAX: Final = 50
"""Lines retained per replica."""
BYTES_MAX: Final = 64 * 1024
"""Bytes retained per replica."""


@final
class RecentLines:
    """Recent lines, bounded in replicas, lines and bytes; the replica silent for longest is evicted first.

    Why the host retains them: a replica whose constructor raised never connected to NATS, and a dead one cannot be
    queried.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[str, list[bytes]] = OrderedDict()

    def take(self, piece: bytes) -> None:
        """Add whole lines of one replica."""
        lines = piece.splitlines(keepends=True)[-LINES_MAX:]
        if not lines:
            return
        tag = _parse_replica_tag(lines[-1])
        retained = [*self._lines.pop(tag, ()), *lines][-LINES_MAX:]
        while sum(map(len, retained)) > BYTES_MAX:
            del retained[0]
        self._lines[tag] = retained
        if len(self._lines) > REPLICAS_MAX:
            self._lines.popitem(last=False)

    def all(self) -> list[bytes]:
        """The lines of all replicas, each replica's in order."""
        return [line for lines in self._lines.values() for line in lines]


def _parse_replica_tag(line: bytes) -> str:
    try:
        decoded: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return str(decoded.get("replica_tag", "")) if isinstance(decoded, dict) else ""


_log = structlog.get_logger(__name__)

_DATAGRAM_BYTES_MAX: Final = 256 * 1024
_RECEIVE_BUFFER_BYTES: Final = 1024 * 1024
_CLOSE_TIMEOUT_S: Final = 1.0


@final
class LogSocket:
    """The socket to which replicas send their log lines.

    Why a thread: the reader of standard error may be slow, and the host's loop must not wait for it.
    """

    def __init__(self, directory: Path) -> None:
        """``directory`` must be private to this user. Opens nothing."""
        self.path = directory / f"log-{secrets.token_hex(4)}.sock"
        self._write: Callable[[bytes], None] = lambda _lines: None
        self._is_bound = False
        self._is_closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._recent = RecentLines()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="replica-logs", daemon=True)

    def bind(self, gid: int | None = None) -> str:
        """Bind the socket, which queues lines from now on. Returns empty, or why not: replicas then log to Ray's files.

        ``gid`` is the group of replicas that run as another user.
        """
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_stale(self.path.parent)
            self._socket.bind(str(self.path))
            if gid is not None:
                os.chown(self.path, -1, gid)
                self.path.chmod(0o620)
        except OSError as error:
            return f"{self.path}: {error}"
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        self._is_bound = True
        return ""

    def open(self, write: Callable[[bytes], None]) -> None:
        """Receive lines from now on, if it was bound. ``write`` receives whole lines and must not raise."""
        self._write = write
        if self._is_bound:
            self._thread.start()

    def close(self) -> None:
        """Write the lines received, and receive no more."""
        self._is_closed = True
        if self._thread.is_alive():
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.join(_CLOSE_TIMEOUT_S)
        self.path.unlink(missing_ok=True)
        self._socket.close()

    def recent(self) -> list[bytes]:
        """The newest lines of all replicas, including ended ones."""
        with self._lock:
            return self._recent.all()

    def take(self, lines: bytes) -> None:
        """Write and retain whole lines of one replica. Blocks while the output has no reader."""
        self._write(lines)
        with self._lock:
            self._recent.take(lines)

    def _run(self) -> None:
        # An empty datagram is not the end: user code may send one.
        while (lines := self._socket.recv(_DATAGRAM_BYTES_MAX)) or not self._is_closed:
            self.take(lines)


def _remove_stale(directory: Path) -> None:
    """Remove the sockets of hosts that were killed."""
    for path in directory.glob("log-*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError as error:
                _log.debug("log_socket_not_looked_at", path=str(path), reason=str(error))
