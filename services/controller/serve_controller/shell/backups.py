"""Backups on their way: files that are fetched, or sent to be restored, in pages.

Why the leader writes and reads them: only controllers speak to Postgres, and what the leader's term holds is what was
recorded, whole and as of one moment, however much is changed meanwhile.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Final

import msgspec

from serve_common.errors import BadField, LimitReached, NotFound
from serve_common.ports import Clock
from serve_common.wires.commands import BACKUP_PAGE_BYTES_MAX, Restore, RestoreReply
from serve_common.wires.queries import GetBackup
from serve_common.wires.views import BackupPage
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.commands.restoring import check_backup
from serve_controller.ports import Backups
from serve_controller.shell.leading_term import LeadingTerm

FILES_MAX: Final = 4
"""Backups, and uploads, that are under way at once; of more, the one that was asked for longest ago is dropped."""
FILE_BYTES_MAX: Final = 64 * 1024 * 1024
IDLE_S: Final = 60.0


class _Kept(msgspec.Struct):
    """A file, or the part of it that has come."""

    data: bytes
    used_at: float


class BackupDesk:
    """What is under way; belongs to one process, and a change of leader means to begin anew."""

    def __init__(self, files: Backups, clock: Clock) -> None:
        self._files = files
        self._clock = clock
        self._taken: dict[str, _Kept] = {}
        self._uploads: dict[str, _Kept] = {}

    async def page(self, term: LeadingTerm, query: GetBackup) -> BackupPage:
        """A page of a backup, which is taken with the first one. Raises `NotFound`, `BadField`."""
        backup_id = query.backup_id or uuid.uuid4().hex
        if not query.backup_id:
            # Values never change: another thread may read them while the next ones are decided.
            data = await asyncio.to_thread(self._files.write, term.checkpoint, term.epoch, self._clock.now())
            self._keep(self._taken, backup_id, data)
        kept = self._kept(self._taken, backup_id)
        if kept is None:
            raise NotFound("backup_id: there is no such backup (any more); begin anew")
        pages = -(-len(kept.data) // BACKUP_PAGE_BYTES_MAX)
        if not 0 <= query.page < pages:
            raise BadField("page", f"must be 0 to {pages - 1}")
        begin = query.page * BACKUP_PAGE_BYTES_MAX
        data = kept.data[begin : begin + BACKUP_PAGE_BYTES_MAX]
        return BackupPage(backup_id=backup_id, page=query.page, pages=pages, data=data)

    async def take(self, command: Restore) -> tuple[str, Checkpoint] | RestoreReply:
        """Take in a page; with the last one, what the whole file holds, in words and as a checkpoint.

        Raises `BadField` for a page out of order and for a file that cannot be restored, `LimitReached`.
        """
        if not 1 <= command.pages <= FILE_BYTES_MAX // BACKUP_PAGE_BYTES_MAX:
            raise LimitReached(f"pages: a backup has at most {FILE_BYTES_MAX} bytes")
        if len(command.data) > BACKUP_PAGE_BYTES_MAX:
            raise LimitReached(f"data: a page has at most {BACKUP_PAGE_BYTES_MAX} bytes")
        if not 0 <= command.page < command.pages:
            raise BadField("page", f"must be 0 to {command.pages - 1}")
        if not 0 < len(command.upload_id) <= 100:
            raise BadField("upload_id", "must have 1 to 100 characters")
        before = b""
        if command.page > 0:
            kept = self._kept(self._uploads, command.upload_id)
            begin = command.page * BACKUP_PAGE_BYTES_MAX
            if kept is None or len(kept.data) < begin:
                raise BadField("page", "comes before the one before it; send all pages anew, from 0")
            before = kept.data[:begin]
        data = before + command.data
        self._keep(self._uploads, command.upload_id, data)
        if command.page < command.pages - 1:
            return RestoreReply()
        taken_at, saved = await asyncio.to_thread(self._files.read, data)
        return f"taken at {taken_at:.0f} s since 1970: {check_backup(saved)}", saved

    def _keep(self, files: dict[str, _Kept], name: str, data: bytes) -> None:
        files.pop(name, None)
        files[name] = _Kept(data, self._clock.now())
        while len(files) > FILES_MAX:
            del files[next(iter(files))]

    def _kept(self, files: dict[str, _Kept], name: str) -> _Kept | None:
        now = self._clock.now()
        for old in [known for known, kept in files.items() if now - kept.used_at > IDLE_S]:
            del files[old]
        kept = files.get(name)
        if kept is not None:
            kept.used_at = now
        return kept
