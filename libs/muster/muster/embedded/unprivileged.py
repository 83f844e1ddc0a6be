"""How programs that refuse to run as root are run here; see demote.py for the ways.

Why tried out: which way is allowed depends on the container, the kernel and its security modules, and nothing but
trying tells.
"""

from __future__ import annotations

import enum
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

from muster.embedded import demote
from muster.embedded.errors import StackFailed

_TIMEOUT_S = 20.0


class Way(enum.Enum):
    """How a program gets to be somebody who is not root."""

    AS_WE_ARE = "as we are"
    CAPABILITY = "capability"
    NAMESPACE = "namespace"

    def command(self, argv: list[str]) -> list[str]:
        """The command line that runs ``argv`` in this way."""
        if self is Way.AS_WE_ARE:
            return argv
        return [sys.executable, "-I", "-S", str(Path(demote.__file__)), self.value, *argv]

    def own(self, directory: Path) -> None:
        """Make ``directory`` and all in it belong to the user that the program sees itself as."""
        uid, gid = os.geteuid(), os.getegid()
        if self is Way.CAPABILITY:
            nobody = pwd.getpwnam("nobody")
            uid, gid = nobody.pw_uid, nobody.pw_gid
        if directory.stat().st_uid == uid:
            return
        # The directory itself comes last, so that an interrupted walk is made again.
        for place, _, names in os.walk(directory, topdown=False):
            for name in names:
                os.chown(Path(place) / name, uid, gid, follow_symlinks=False)
            os.chown(place, uid, gid)


def find_way(program: Path, directory: Path) -> Way:
    """A way in which ``program`` can be executed here and can write ``directory``, which is then owned accordingly.

    Raises `StackFailed` when there is none.
    """
    if os.geteuid() != 0:
        return Way.AS_WE_ARE
    failures = []
    for way in (Way.CAPABILITY, Way.NAMESPACE):
        try:
            way.own(directory)
            _try(way, program, directory)
        except (OSError, KeyError, subprocess.SubprocessError) as error:
            failures.append(f"{way.value}: {error}")
        else:
            return way
    raise StackFailed(
        f"{program.name} refuses to run as root, and no other user can be used here ({'; '.join(failures)}). "
        "Run `muster up` as a user who is not root"
    )


def _try(way: Way, program: Path, directory: Path) -> None:
    shell = shutil.which("sh") or "/bin/sh"
    script = 'test "$(id -u)" != 0 && touch "$1/.writable" && rm "$1/.writable" && exec "$2" --version'
    ended = subprocess.run(  # noqa: S603 - our own command line
        way.command([shell, "-c", script, "sh", str(directory), str(program)]),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
        cwd=directory,
    )
    if ended.returncode != 0:
        raise OSError(f"exit code {ended.returncode} {ended.stderr.strip()[-300:]}")
