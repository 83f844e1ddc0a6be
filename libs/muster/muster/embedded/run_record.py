"""``run.json``, the record of a running stack: where it is, and whether its disk is full.

Why a lock beside the record: only the lock proves that a stack runs (the kernel drops it with the process), and only
the record says where. The record stays after a stop, so that the next start listens on the same ports.

The command line finds stacks by this module, which therefore imports little.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from pathlib import Path
from typing import IO, Final

import msgspec

from muster.embedded.options import AlreadyRunning, StackFailed, StatePaths

_LOCK_ATTEMPTS = 10


class RunningProcess(msgspec.Struct, frozen=True, kw_only=True):
    """Current state of a process."""

    name: str
    pid: int
    """Pid of the process itself (not of its guardian); 0 while it is down."""
    is_ready: bool
    restarts: int
    log: str


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``run.json``. Holds no secret."""

    stack_id: str
    state_dir: str
    pid: int
    """Pid of `muster up`; 0 after an orderly stop."""
    nats_url: str
    nats_monitor_url: str
    http_url: str
    postgres_dsn: str
    """DSN without the password, which is in ``<secrets>/postgres_password``."""
    secrets: str
    """Directory of the secrets; people and tools connect to NATS with its ``admin.creds``."""
    ports: dict[str, int]
    """Ports by use: http, nats, nats_monitor, postgres, controller_ops, proxy_ops, host_ops; with a console also
    console and console_ops."""
    ops_urls: dict[str, str]
    """Base URLs of each service's /metrics, /healthz and /readyz."""
    console_url: str = ""
    """Address of the console's pages; empty without a console."""
    http_host: str = "127.0.0.1"
    """The address that the proxies listen at."""
    is_background: bool = False
    """Whether `muster start` started it, so that it may start anew."""
    processes: list[RunningProcess] = []


def read_record(paths: StatePaths) -> RunRecord | None:
    """Read the record of the last start; None when there is no valid one."""
    try:
        return msgspec.json.decode(paths.run_file.read_bytes(), type=RunRecord)
    except (OSError, msgspec.DecodeError):
        return None


def write_record(paths: StatePaths, record: RunRecord) -> None:
    """Replace the file atomically."""
    temporary = paths.run_file.with_suffix(".json.new")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    temporary.replace(paths.run_file)


def running_stack(state_dir: Path) -> RunRecord | None:
    """The record of the stack that runs from ``state_dir`` at this moment, or None."""
    paths = StatePaths(state_dir.resolve())
    try:
        with paths.lock_file.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return read_record(paths)
    except OSError:
        return None
    return None


def get_stack_id(paths: StatePaths) -> str:
    """The id of the stack of this directory: stable over restarts, different for a copy or a moved directory.

    It must be unique, because all processes that carry it are killed.
    """
    last = read_record(paths)
    if last is not None and last.state_dir == str(paths.root):
        return last.stack_id
    return secrets.token_hex(8)


def lock_state(paths: StatePaths) -> IO[str]:
    """Lock the state directory until the returned file is closed or the process ends.

    Raises `AlreadyRunning` with the holder's pid, and `StackFailed` when the directory cannot be used.
    """
    try:
        paths.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = paths.lock_file.open("a+")
    except OSError as error:
        raise StackFailed(f"{paths.root} cannot hold the stack's state: {error.strerror}") from error
    if not _lock(file):
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise AlreadyRunning(
            f"a stack already runs from {paths.root} (pid {holder}); stop it, or choose another state directory"
        )
    with contextlib.suppress(OSError):  # on a full disk the pid is not recorded, and the lock still holds
        file.truncate(0)
        os.write(
            file.fileno(), f"{os.getpid()}\n".encode()
        )  # unbuffered: nothing is left to be flushed by close()
    return file


def _lock(file: IO[str]) -> bool:
    for _ in range(_LOCK_ATTEMPTS):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)  # `running_stack` holds it for a moment
        else:
            return True
    return False


FULL_BELOW_BYTES: Final = 1024 * 1024
"""Free bytes below which a disk counts as full: a log line may still fit, a database's file does not."""


def describe_full_disk(path: Path) -> str | None:
    """A message when the disk of ``path`` is full; None when it is not, or when that cannot be determined."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    free = found.f_bavail * found.f_frsize
    if free >= FULL_BELOW_BYTES and (found.f_favail or not found.f_files):
        return None
    what = f"{free // 1024} KiB free" if free < FULL_BELOW_BYTES else "no inode free"
    return f"the disk of {path} is full ({what}); make room there"
