"""Writes the log lines of this host's replicas to its own standard error as they come, and remembers the newest."""

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
"""Of one replica."""
BYTES_MAX: Final = 64 * 1024
"""Of one replica."""


@final
class RecentLines:
    """Bounded in replicas, lines and bytes; who has been silent for longest is forgotten first."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, list[bytes]] = OrderedDict()

    def take(self, piece: bytes) -> None:
        """Whole lines of one replica."""
        lines = piece.splitlines(keepends=True)[-LINES_MAX:]
        if not lines:
            return
        tag = _replica_of(lines[-1])
        kept = [*self._lines.pop(tag, ()), *lines][-LINES_MAX:]
        while sum(map(len, kept)) > BYTES_MAX:
            del kept[0]
        self._lines[tag] = kept
        if len(self._lines) > REPLICAS_MAX:
            self._lines.popitem(last=False)

    def all(self) -> list[bytes]:
        """Those of all replicas, each one's in order."""
        return [line for lines in self._lines.values() for line in lines]


def _replica_of(line: bytes) -> str:
    try:
        read: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return str(read.get("replica_tag", "")) if isinstance(read, dict) else ""


_log = structlog.get_logger(__name__)

_PIECE_BYTES_MAX: Final = 256 * 1024
_WAITING_BYTES: Final = 1024 * 1024
_CLOSE_TIMEOUT_S: Final = 1.0


@final
class LogSocket:
    """The socket whose path replicas are told."""

    def __init__(self, directory: Path) -> None:
        """``directory`` must be this user's alone. Opens nothing."""
        self.path = directory / f"log-{secrets.token_hex(4)}.sock"
        self._write: Callable[[bytes], None] = lambda _lines: None
        self._is_bound = False
        self._is_closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._recent = RecentLines()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="replica-logs", daemon=True)

    def bind(self, gid: int | None = None) -> str:
        """Let lines wait from now on. Empty, or why there can be no socket; replicas then write to Ray's files.

        ``gid`` is the group of replicas that run as another user.
        """
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_unheard(self.path.parent)
            self._socket.bind(str(self.path))
            if gid is not None:
                os.chown(self.path, -1, gid)
                self.path.chmod(0o620)
        except OSError as error:
            return f"{self.path}: {error}"
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _WAITING_BYTES)
        self._is_bound = True
        return ""

    def open(self, write: Callable[[bytes], None]) -> None:
        """Take lines from now on, if it was bound. ``write`` takes whole lines and must not raise."""
        self._write = write
        if self._is_bound:
            self._thread.start()

    def close(self) -> None:
        """Write what has come, and take no more."""
        self._is_closed = True
        if self._thread.is_alive():
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.join(_CLOSE_TIMEOUT_S)
        self.path.unlink(missing_ok=True)
        self._socket.close()

    def recent(self) -> list[bytes]:
        """The newest lines of all replicas, also of those that have ended."""
        with self._lock:
            return self._recent.all()

    def take(self, lines: bytes) -> None:
        """Write whole lines of one replica, and remember them. Blocks while nobody reads what is written."""
        self._write(lines)
        with self._lock:
            self._recent.take(lines)

    def _run(self) -> None:
        # An empty datagram is no end: anybody's code may send one.
        while (lines := self._socket.recv(_PIECE_BYTES_MAX)) or not self._is_closed:
            self.take(lines)


def _remove_unheard(directory: Path) -> None:
    """Sockets of hosts that were killed."""
    for path in directory.glob("log-*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError as error:
                _log.debug("log_socket_not_looked_at", path=str(path), reason=str(error))
