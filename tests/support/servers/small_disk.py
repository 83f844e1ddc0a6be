"""A real file system of a few megabytes, to be filled up and freed again."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

_PIECE = b"\0" * 4096


class SmallDisk:
    """Mounted while open. `fill` leaves not one block free, as often as it is called."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._fillers: list[Path] = []

    @classmethod
    @contextlib.contextmanager
    def mounted(cls, size_mib: int) -> Iterator[Self]:
        """Below a short path, for sockets; skips the test, saying why, where nothing may be mounted."""
        # A lazy unmount: what still ends there must not keep the test from ending.
        with tempfile.TemporaryDirectory(prefix="md", dir="/tmp", ignore_cleanup_errors=True) as text:
            options = f"size={size_mib}m,mode=0700"
            command = ["mount", "-t", "tmpfs", "-o", options, "muster-test", text]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            except FileNotFoundError:
                pytest.skip("NOT TESTED: what a full disk does; there is no program to mount a small one")
            if done.returncode != 0:
                pytest.skip(f"NOT TESTED: what a full disk does; none may be mounted: {done.stderr.strip()}")
            disk = cls(Path(text))
            try:
                yield disk
            finally:
                subprocess.run(["umount", "--lazy", text], check=True)

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    def fill(self) -> None:
        """Take every block that is free now."""
        filler = self.root / f"filler-{len(self._fillers)}"
        self._fillers.append(filler)
        file = os.open(filler, os.O_WRONLY | os.O_CREAT)
        try:
            for piece in (_PIECE * 256, _PIECE):
                with contextlib.suppress(OSError):
                    while os.write(file, piece) == len(piece):
                        pass
        finally:
            os.close(file)

    def free(self) -> None:
        """Give back what `fill` took."""
        for filler in self._fillers:
            filler.unlink(missing_ok=True)
        self._fillers.clear()
