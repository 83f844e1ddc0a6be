"""Local processes and users: handles that survive reuse of a pid, and the user that runs user code."""

from __future__ import annotations

import ctypes
import errno
import os
import pwd
import signal
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

import msgspec
import structlog

from serve_common.errors import BadField

_log = structlog.get_logger(__name__)

_HAS_HANDLES: Final = hasattr(os, "pidfd_open")


@final
class LocalProcess:
    """A process that is alive when this is created. Close it to release its file descriptor.

    Why: a replica that survives Ray's kill is killed by the kernel. Its pid was reported long before, and the kernel
    gives a pid that has become free to another process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._handle: int | None = None
        self._is_gone = False
        if not _HAS_HANDLES:  # only Linux has them
            return
        try:
            self._handle = os.pidfd_open(pid)
        except ProcessLookupError:
            self._is_gone = True
        except OSError as error:  # forbidden, or too many open: use the pid instead
            _log.warning("process_without_handle", pid=pid, error=str(error))

    def kill(self) -> bool:
        """Send SIGKILL. Returns False when the process no longer exists."""
        if self._is_gone:
            return False
        try:
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            else:
                os.kill(self._pid, signal.SIGKILL)
        except ProcessLookupError:
            self._is_gone = True
        return not self._is_gone

    def close(self) -> None:
        """Release the process handle; idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


_CAP_SETGID: Final = 6
_CAP_SETUID: Final = 7
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4
_CAPABILITY_VERSION_3: Final = 0x20080522
_ID_MAX: Final = 2**32 - 2
"""The last id means "unchanged" to the kernel."""


class UnixUser(msgspec.Struct, frozen=True):
    """A user that a process can switch to."""

    name: str
    uid: int
    gid: int
    home: str
    """An existing directory."""


class HostUsers(msgspec.Struct, frozen=True):
    """The users of a host and of its Ray runtime; None keeps the user that started the host."""

    host: UnixUser | None = None
    replica: UnixUser | None = None

    @property
    def shared_gid(self) -> int | None:
        """The group through which replicas access files of the host; None when both are the same user."""
        return None if self.replica is None else self.replica.gid

    @property
    def shared_groups(self) -> tuple[int, ...]:
        """Supplementary groups of the host, so that it may assign files to them."""
        return () if self.replica is None else (self.replica.gid,)


def choose_users(host_user: str, replica_user: str) -> HostUsers:
    """The users named by MUSTER_HOST_USER and MUSTER_REPLICA_USER; empty for none. Raises `BadField`."""
    host = find_user(host_user, "MUSTER_HOST_USER") if host_user else None
    replica = find_user(replica_user, "MUSTER_REPLICA_USER") if replica_user else None
    if host is not None and replica is not None and host.uid == replica.uid:
        raise BadField("MUSTER_REPLICA_USER", "must be another user than MUSTER_HOST_USER")
    own = os.geteuid()
    users = HostUsers(
        None if host is None or host.uid == own else host,
        None if replica is None or replica.uid == own else replica,
    )
    if users != HostUsers() and not may_change_user():
        field = "MUSTER_HOST_USER" if users.replica is None else "MUSTER_REPLICA_USER"
        raise BadField(
            field, "can be another user only where the host is started with CAP_SETUID and CAP_SETGID"
        )
    return users


def find_user(text: str, field: str) -> UnixUser:
    """Look up ``name``, ``uid`` or ``uid:gid``; an id need not have a name. Raises `BadField` naming ``field``."""
    first, colon, second = text.partition(":")
    try:
        known = pwd.getpwuid(_number(first, text, field)) if first.isdecimal() else pwd.getpwnam(first)
    except KeyError:
        if not first.isdecimal():
            raise BadField(field, f"{text[:80]!r} is no user of this machine") from None
        uid = int(first)
        known = pwd.struct_passwd((first, "x", uid, uid, "", "/", ""))
    gid = _number(second, text, field) if colon else known.pw_gid
    if known.pw_uid == 0 or gid == 0:
        raise BadField(field, "must not be root")
    home = known.pw_dir if Path(known.pw_dir).is_dir() else "/"
    return UnixUser(known.pw_name, known.pw_uid, gid, home)


def _number(digits: str, text: str, field: str) -> int:
    if not (digits.isdecimal() and digits.isascii() and int(digits) <= _ID_MAX):
        raise BadField(field, f"{text[:80]!r} must read name, uid or uid:gid")
    return int(digits)


def may_change_user() -> bool:
    """True when this process may switch to any user; root may not if it has lost its capabilities."""
    needed = 1 << _CAP_SETGID | 1 << _CAP_SETUID
    return effective_capabilities() & needed == needed


def effective_capabilities() -> int:
    """A bit mask of the effective capabilities; 0 if they cannot be read."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)


@contextmanager
def acting_as(user: UnixUser | None, *groups: int) -> Iterator[None]:
    """Create files as ``user`` in this block, with its group and ``groups``; None changes nothing. Not thread-safe."""
    if user is None:
        yield
        return
    uid, gid, own_groups = os.geteuid(), os.getegid(), os.getgroups()
    os.setgroups(list(groups))
    os.setegid(user.gid)
    os.seteuid(user.uid)
    try:
        yield
    finally:
        os.seteuid(uid)
        os.setegid(gid)
        os.setgroups(own_groups)


def share_directory(path: Path, gid: int, mode: int) -> None:
    """Create a directory of this user with ``gid`` and ``mode``. Raises OSError, also when it is another user's."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError(errno.EPERM, "is not a directory of the host's user", str(path))
    os.chown(path, -1, gid, follow_symlinks=False)
    path.chmod(mode)


def become(user: UnixUser, *groups: int) -> None:
    """Switch to ``user`` permanently, with its group and ``groups``, and drop all privileges. Raises OSError.

    Why at the very start of the host: capabilities belong to threads, so they are dropped while there is one thread.
    What needs them (secrets that other users may not read, the start of the Ray runtime as its user) comes before,
    everything else after.
    """
    os.setgroups(list(groups))
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)
    drop_privileges()


def drop_privileges() -> None:
    """Drop all capabilities, and gain none by executing a program. Safe between fork and exec. Raises OSError."""
    if sys.platform != "linux":
        return
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    none = bytes(24)
    _check(_libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "PR_CAP_AMBIENT")
    _check(_libc.capset(header, none), "capset")
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")


_libc: Final = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
