"""TLS for clients: one certificate for all names, loaded anew when its files change.

Why a context for each version of the files: one that a broken file was loaded into could serve nobody any more. The
listener keeps the first, and each handshake is moved to the newest.
"""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any, Final, final

import structlog

from serve_common.errors import BadField
from serve_proxy.settings import CERT_FILE, TlsSettings

CHECK_PERIOD_S: Final = 5.0
"""Seconds between two checks whether the files have changed."""
HANDSHAKE_TIMEOUT_S: Final = 10.0
SHUTDOWN_TIMEOUT_S: Final = 2.0
"""Seconds for a client to confirm the end of a connection."""

_log = structlog.get_logger(__name__)

_Version = tuple[tuple[int, int, int], ...]


def load_context(settings: TlsSettings) -> ssl.SSLContext:
    """Read certificate and key. Raises `BadField` when they cannot be read or used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        # An empty password fails where one is needed; without any, OpenSSL would ask the terminal.
        context.load_cert_chain(settings.cert_file, settings.key_file, password=settings.key_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = (
            settings.cert_file if settings.key_file is None else f"{settings.cert_file}, {settings.key_file}"
        )
        raise BadField(CERT_FILE, f"{files} cannot be used: {error}") from error
    return context


@final
class Certificate:
    """The certificate that new connections get."""

    def __init__(self, settings: TlsSettings) -> None:
        """Reads the files. Raises `BadField`."""
        self._settings = settings
        self._version = self._stat()
        self._current = load_context(settings)
        self.context: Final = self._current
        """For the listener."""
        self.context.sni_callback = self._use_current

    async def run(self) -> None:
        """Load the files whenever they have changed; while they cannot be used, the last ones stay."""
        while True:
            await asyncio.sleep(CHECK_PERIOD_S)
            await asyncio.to_thread(self.reload_if_changed)

    def reload_if_changed(self) -> None:
        """Check once."""
        version = self._stat()
        if version == self._version:
            return
        self._version = version  # what is wrong is said once
        try:
            self._current = load_context(self._settings)
        except BadField as error:
            _log.error("certificate_not_loaded", reason=error.reason, effect="the last one is used")
        else:
            _log.info("certificate_loaded", path=self._settings.cert_file)

    def _use_current(self, connection: ssl.SSLObject, _name: str | None, _context: Any) -> None:
        connection.context = self._current

    def _stat(self) -> _Version:
        files = [path for path in (self._settings.cert_file, self._settings.key_file) if path is not None]
        found = []
        for path in files:
            try:
                stat = Path(path).stat()
            except OSError:
                found.append((0, 0, 0))  # loading says why
            else:
                found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        return tuple(found)
