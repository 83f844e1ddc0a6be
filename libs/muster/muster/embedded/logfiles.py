"""Log files of the stack's processes: bounded in size, and quoted when something fails."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import IO

import structlog

_log = structlog.get_logger()

SIZE_MAX = 16 * 1024 * 1024
"""Bytes of one log; one older file of this size is kept beside it."""


def rotate_at_start(path: Path) -> None:
    """Begin a new file, keeping the last run's as ``<name>.1``; where that cannot be, the old one is continued."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            path.replace(_older(path))
    except OSError as error:
        _log.warning("log_not_rotated", path=str(path), error=str(error))


def open_log(path: Path) -> IO[bytes]:
    """To be appended to by a process; nowhere, where no file can be: a log must keep nothing from starting."""
    try:
        return path.open("ab")
    except OSError as error:
        _log.warning("log_not_opened", path=str(path), error=str(error))
        return Path(os.devnull).open("ab")


def cut_when_long(path: Path, size_max: int = SIZE_MAX) -> bool:
    """Move the content of a live log to ``<name>.1`` once it is longer than ``size_max``; whether it was.

    Its writers keep the file open for appending, so it is copied and emptied, not renamed. Lines that are written
    between the two are lost; that is the price for no process standing between a writer and its file. On a full disk
    nothing can be copied: then its content is given up, for it is what may have filled the disk.
    """
    try:
        if path.stat().st_size <= size_max:
            return False
        try:
            shutil.copyfile(path, _older(path))
        except OSError as error:
            _log.warning("log_not_kept", path=str(path), error=str(error))
            _older(path).unlink(missing_ok=True)
        with path.open("r+b") as file:
            file.truncate(0)
    except FileNotFoundError:
        return False
    return True


def last_lines(path: Path, count: int = 15, width: int = 300) -> str:
    """The end of a log for an error message; says so when there is nothing."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - count * 1024))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError as error:
        return f"(the log cannot be read: {error.strerror})"
    return "\n".join(line[:width] for line in lines[-count:]) or "(its log is empty)"


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")
