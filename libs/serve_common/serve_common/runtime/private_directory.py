"""A directory of this user alone, whatever was in its place before.

Why existing files must not block a start: user code runs as the same user, and others may write into the parent.
What they leave under our name is moved aside, and removed as far as possible.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from pathlib import Path

import structlog

_log = structlog.get_logger(__name__)


def ensure_private_directory(path: Path) -> None:
    """Make ``path`` a directory of mode 0700 that belongs to this user; anything else there is moved aside.

    Raises OSError where that is not possible, such as for another user's directory below a sticky one.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        found = path.lstat()
    except FileNotFoundError:
        path.mkdir(mode=0o700)
        return
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        quarantine(path)
        path.mkdir(mode=0o700)
    elif stat.S_IMODE(found.st_mode) != 0o700:
        path.chmod(0o700)


def quarantine(path: Path) -> None:
    """Free the name ``path``. Raises OSError; what cannot be removed stays beside it, under another name."""
    quarantined = path.with_name(f".{path.name}.aside-{secrets.token_hex(4)}")
    path.rename(quarantined)
    _log.warning("moved_aside", path=str(path), reason="it is not what was made there")
    if quarantined.is_dir() and not quarantined.is_symlink():
        shutil.rmtree(quarantined, ignore_errors=True)
    else:
        quarantined.unlink(missing_ok=True)
