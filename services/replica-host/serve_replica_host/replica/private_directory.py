"""A temporary directory of this process alone, which the next process removes when this one was killed.

Why locks and not pids: replicas are mostly killed, so nobody tidies up behind them, and a pid may be somebody else's by
then. The kernel lets go of a lock when its process ends, however that was.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

PREFIX: Final = "muster-replica-"
_YOUNG_S: Final = 60.0
"""One that is younger may not be locked yet."""


def make_private_directory(now: float, root: Path | None = None) -> Path:
    """A new one below ``root``, by default where the system puts temporary files. ``now`` is wall time.

    Raises OSError.
    """
    root = Path(tempfile.gettempdir()) if root is None else root
    _remove_left(root, now)
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
    # Open as long as the process lives.
    fcntl.flock(os.open(directory, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_EX | fcntl.LOCK_NB)
    return directory


def _remove_left(root: Path, now: float) -> None:
    for directory in root.glob(f"{PREFIX}*"):
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # another user's, or removed by another process meanwhile
            continue
        try:
            found = os.fstat(descriptor)
            if found.st_uid == os.getuid() and now - found.st_mtime > _YOUNG_S:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
        except BlockingIOError:
            pass  # its process lives
        finally:
            os.close(descriptor)
