"""The file of keys, read again when it has changed.

Why while it runs: a key that leaked must stop to work without a restart. The file is looked at when a request comes
and at most once a second; while it cannot be read, the keys that were there last are used, and that is logged.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final, final

import structlog

from serve_common.errors import BadField
from serve_proxy.middlewares.key_list import KeyList, parse_keys

_log = structlog.get_logger(__name__)

LOOK_INTERVAL_S: Final = 1.0
READ_TIMEOUT_S: Final = 2.0
FILE_BYTES_MAX: Final = 8 * 1024 * 1024

_Version = tuple[int, int, int]


@final
class KeyFile:
    """Knows which keys count now."""

    def __init__(self, path: str, field: str) -> None:
        """Reads the file; raises `BadField` naming ``field`` when that cannot be done."""
        self._path = Path(path)
        self._field = field
        self._version: _Version | None = None
        self._is_looking = False
        self._look_at = time.monotonic() + LOOK_INTERVAL_S
        self._error = ""
        try:
            self._version = self._stat()
            self._keys = self._read()
        except (OSError, UnicodeError) as error:
            raise BadField(field, f"{path} cannot be read: {error}") from error

    async def keys(self) -> KeyList:
        """Those that count; one request a second waits until the file was looked at."""
        now = time.monotonic()
        if now >= self._look_at and not self._is_looking:
            self._look_at = now + LOOK_INTERVAL_S
            self._is_looking = True
            looking = asyncio.get_running_loop().run_in_executor(None, self._look)
            looking.add_done_callback(self._looked)
            # Whoever waits may be cancelled; the look goes on.
            _, late = await asyncio.wait([looking], timeout=READ_TIMEOUT_S)
            if late:
                self._complain(f"{self._path} could not be read in {READ_TIMEOUT_S:g} s")
        return self._keys

    def _look(self) -> None:
        try:
            version = self._stat()
            if version == self._version:
                return
            self._version = version  # one that is wrong is not read again and again
            self._keys = self._read()
            self._error = ""
            _log.info("api_keys_read", keys=len(self._keys))
        except (BadField, OSError, UnicodeError) as error:
            self._complain(str(error))

    def _looked(self, _: asyncio.Future[None]) -> None:
        self._is_looking = False

    def _complain(self, reason: str) -> None:
        if reason != self._error:
            self._error = reason
            _log.error("api_keys_not_read", reason=reason, effect="the keys that were read last count")

    def _stat(self) -> _Version:
        stat = self._path.stat()
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _read(self) -> KeyList:
        with self._path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise BadField(self._field, f"{self._path} has more than {FILE_BYTES_MAX} bytes")
        return parse_keys(content.decode(), self._field)
