"""What a replica that is not on its host's machine keeps until its host fetches it: metrics, and log lines.

Why fetched and not sent: the host asks only when it has taken what came before, so neither side can be flooded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, final

import msgspec

from serve_common.logs.lines import dropped_line
from serve_common.ports import Clock

FILES_BYTES_MAX: Final = 4 * 1024 * 1024
"""Of all metrics of a process. A replica of ours alone has some 10 kB."""
LINES_BYTES_MAX: Final = 2 * 1024 * 1024
"""Log lines that wait to be fetched."""
_USED_BYTES: Final = 4
"""prometheus_client's files begin with how many of their bytes are used."""


class Fetched(msgspec.Struct, frozen=True, array_like=True):
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


def encode_fetched(value: Fetched | Hello) -> bytes:
    """The bytes that travel through Ray."""
    return msgspec.msgpack.encode(value)


def decode_fetched(data: bytes) -> Fetched:
    """A `Fetched`; raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=Fetched)


def decode_hello(data: bytes) -> Hello:
    """A `Hello`; raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=Hello)
