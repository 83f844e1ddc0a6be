"""Child processes: how they are started, stopped and started again, what they report, and the directories they get.

Why not the library's own alone: each parent must get the same things right. A child inherits no descriptor that was
not meant for it, gets no Ctrl-C of its parent's terminal, may end at any moment, and may crash again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final, Self, final

import structlog

from serve_common.clock import backoff_s

_log = structlog.get_logger(__name__)

STABLE_S: Final = 10.0
"""Seconds of life after which the end of a process does not count as a crash."""
RESTART_WAIT_MIN_S: Final = 0.2
RESTART_WAIT_MAX_S: Final = 5.0
_REPORT_BYTES_MAX: Final = 64


@final
class ChildLink:
    """A socket pair between a parent and one child, which reports one number through it.

    A child that keeps its end open also detects through it that its parent is gone, however that ended.
    """

    def __init__(self) -> None:
        """Raises OSError."""
        self._own, self._child = socket.socketpair()
        self._own.settimeout(0)

    @property
    def child_fd(self) -> int:
        """The child's end, until the child is started."""
        return self._child.fileno()

    async def read_number(self) -> int | None:
        """Wait for the number that the child reports on a line; None when it closes its end, or exits, before."""
        loop = asyncio.get_running_loop()
        line = b""
        while not line.endswith(b"\n"):
            try:
                part = await loop.sock_recv(self._own, _REPORT_BYTES_MAX)
            except ConnectionError:
                part = b""
            if not part:
                return None
            line += part
        return int(line)

    def close_child_end(self) -> None:
        """Close the child's end in this process, which makes the child's own the last one."""
        self._child.close()

    def close(self) -> None:
        """Close both ends; idempotent."""
        self._own.close()
        self._child.close()


@final
class ChildProcess:
    """A child process, as its parent controls it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        link: ChildLink | None = None,
        cwd: Path | None = None,
        stdin: int = asyncio.subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        line_bytes_max: int = 64 * 1024,
    ) -> Self:
        """Start ``argv`` with the whole environment ``env``. Raises OSError.

        It inherits no descriptors but its standard streams and its end of ``link``, which is closed in this process;
        after a failure both ends are. It gets a session of its own: Ctrl-C in a terminal is for the parent alone.
        ``line_bytes_max`` bounds a line that is read from its pipes.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                env=env,
                cwd=cwd,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                limit=line_bytes_max,
                pass_fds=() if link is None else (link.child_fd,),
                start_new_session=True,
            )
        except BaseException:
            if link is not None:
                link.close()
            raise
        if link is not None:
            link.close_child_end()
        return cls(process)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it has exited, as far as this process has been notified."""
        return self._process.returncode is not None

    @property
    def stdin(self) -> asyncio.StreamWriter:
        """Its standard input, where that is a pipe."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> asyncio.StreamReader:
        """Its standard output, where that is a pipe."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def stderr(self) -> asyncio.StreamReader:
        """Its standard error, where that is a pipe."""
        assert self._process.stderr is not None
        return self._process.stderr

    async def ended(self) -> int:
        """Wait for its exit code; negative for the signal that killed it."""
        return await self._process.wait()

    async def ended_within(self, timeout_s: float) -> bool:
        """Wait for its end for at most so many seconds; returns whether it has ended."""
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                _ = await self._process.wait()
        except TimeoutError:
            return False
        return True

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            self._process.send_signal(number)

    def kill_group(self) -> None:
        """Kill it and what it has started, except in sessions and groups of their own, unless it has ended."""
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, *steps: tuple[signal.Signals, float]) -> bool:
        """Send the signals in turn, each when it has not ended so many seconds after the one before.

        Returns whether it has ended.
        """
        for number, timeout_s in steps:
            self.send_signal(number)
            if await self.ended_within(timeout_s):
                return True
        return False


@final
class RestartBackoff:
    """Decides how long to wait before a process that has ended is started again.

    Why a bounded wait: one that crashes at once, again and again, must neither use up the machine nor be given up.
    """

    def __init__(self, min_s: float = RESTART_WAIT_MIN_S, max_s: float = RESTART_WAIT_MAX_S) -> None:
        self.crashes = 0
        """Quick deaths in a row."""
        self._min_s = min_s
        self._max_s = max_s

    def on_ended(self, lived_s: float) -> float:
        """Count an end after so many seconds of life; returns the seconds to wait before the next start.

        The first quick death is most often a ``kill -9``, not a crash loop: no wait.
        """
        self.crashes = 0 if lived_s >= STABLE_S else self.crashes + 1
        return backoff_s(self.crashes - 1, self._min_s, self._max_s)


def describe_exit(code: int) -> str:
    """Describe an exit code; below 0, or above 128 as shells and the guardian report it, it means a signal."""
    number = -code if code < 0 else code - 128
    if number > 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(number).name}"
    return f"exited with code {code}"


def ensure_private_directory(path: Path) -> None:
    """Make ``path`` a directory of mode 0700 that belongs to this user; anything else there is moved aside.

    Why existing files must not block a start: user code runs as the same user, and others may write into the parent.
    What they leave under our name is moved aside, and removed as far as possible.

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
