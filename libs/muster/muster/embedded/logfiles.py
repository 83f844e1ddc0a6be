"""Log files of the stack's processes: bounded in size, and quoted when something fails."""

from __future__ import annotations

import shutil
from pathlib import Path

SIZE_MAX = 16 * 1024 * 1024
"""Bytes of one log; one older file of this size is kept beside it."""


def rotate_at_start(path: Path) -> None:
    """Begin a new file, keeping the last run's as ``<name>.1``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size:
        path.replace(_older(path))


def cut_when_long(path: Path, size_max: int = SIZE_MAX) -> bool:
    """Move the content of a live log to ``<name>.1`` once it is longer than ``size_max``; whether it was.

    Its writers keep the file open for appending, so it is copied and emptied, not renamed. Lines that are written
    between the two are lost; that is the price for no process standing between a writer and its file.
    """
    try:
        if path.stat().st_size <= size_max:
            return False
        shutil.copyfile(path, _older(path))
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
