"""Watches whether the disk of a stack is full: notifies the user, and repairs NATS' storage afterwards.

Why a repair: once a write to a stream has failed for lack of space, nats-server refuses every later write to it, even
when there is space again. Switching its storage off and on by two reloads opens the streams again, and no connection is
interrupted.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

import structlog

from muster.embedded.process import http_probe, http_text
from muster.embedded.run_record import FULL_BELOW_BYTES, describe_full_disk
from muster.embedded.services import disable_storage

_log = structlog.get_logger()

_FREE_ENOUGH_BYTES: Final = 4 * FULL_BELOW_BYTES
"""Free bytes at which the disk no longer counts as full."""
_CHECK_S: Final = 0.5
_RELOAD_WITHIN_S: Final = 5.0
_FAILED_WRITE: Final = ("write error", "no space left", "out of resources")
"""Texts by which nats-server reports that a stream's storage failed."""


@final
class DiskWatch:
    """Watches the disk of one running stack."""

    def __init__(
        self,
        root: Path,
        nats_config: Path,
        monitor_port: int,
        nats_pid: Callable[[], int],
        notice: Callable[[str], None],
    ) -> None:
        """``nats_pid`` returns 0 while NATS is down; ``notice`` is called with sentences for the user."""
        self._root = root
        self._config = nats_config
        self._monitor_port = monitor_port
        self._probe = http_probe(monitor_port, "/healthz")
        self._nats_pid = nats_pid
        self._notice = notice
        self._is_full = False

    async def run(self) -> None:
        """Check periodically, until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_S)
            try:
                await self._check()
            except OSError as error:
                _log.warning("disk_not_watched", path=str(self._root), error=str(error))

    async def _check(self) -> None:
        message = describe_full_disk(self._root)
        if message is not None and not self._is_full:
            self._is_full = True
            self._notice(f"{message}: what is deployed serves on, changes fail until then")
        found = os.statvfs(self._root)
        if found.f_bavail * found.f_frsize < _FREE_ENOUGH_BYTES:
            return
        if self._is_full:
            self._is_full = False
            self._notice(f"the disk of {self._root} has room again")
        reason = await self._probe()
        if reason is not None and any(tokens in reason for tokens in _FAILED_WRITE):
            _log.warning("nats_storage_opened_anew", reason=reason)
            await self._reopen_storage()

    async def _reopen_storage(self) -> None:
        """Switch the server's storage off and on again.

        Both configurations are written completely before one is put in place, each atomically: a server that read half
        a file would refuse all clients, and one whose file did not fit on the disk could not start again.
        """
        whole = self._config.read_text(encoding="utf-8")
        off, on = self._config.with_suffix(".off"), self._config.with_suffix(".on")
        off.write_text(disable_storage(whole), encoding="utf-8")
        on.write_text(whole, encoding="utf-8")
        try:
            off.replace(self._config)
            await self._reload(is_on=False)
        finally:
            on.replace(self._config)
            await self._reload(is_on=True)

    async def _reload(self, *, is_on: bool) -> None:
        """Reload until the server's storage is on or off as requested; on a timeout the next check tries again."""
        pid = self._nats_pid()
        if not pid:
            return  # its next start opens the storage again
        os.kill(pid, signal.SIGHUP)
        try:
            async with asyncio.timeout(_RELOAD_WITHIN_S):
                while ('"disabled"' in await http_text(self._monitor_port, "/jsz")) is is_on:  # noqa: ASYNC110 - it only answers
                    await asyncio.sleep(0.05)
        except (OSError, TimeoutError, ValueError):
            _log.warning("nats_reload_takes_long", is_on=is_on)
