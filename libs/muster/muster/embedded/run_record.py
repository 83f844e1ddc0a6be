"""``run.json``, the record of a running stack; and finding and killing leftover processes of a stack.

Why a lock beside the record: only the lock proves that a stack runs (the kernel drops it with the process), and only
the record says where. The record stays after a stop, so that the next start listens on the same ports.

Why processes are found by a mark in their environment: names and pids are reused and rewritten; a variable with the
stack's random id is inherited by every descendant and by no other process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import time
from pathlib import Path
from typing import IO

import msgspec
import psutil
import structlog

from muster.embedded.options import AlreadyRunning, StackFailed, StatePaths
from muster.embedded.process import PROCESS_MARK, STACK_MARK, RunningProcess

_log = structlog.get_logger()
_GONE_TIMEOUT_S = 3.0


def find_marked(stack_id: str, process: str | None = None) -> list[psutil.Process]:
    """Find the processes that carry this stack's mark; with ``process``, only those of that process of the stack.

    Never the calling process itself nor its ancestors: `muster up` may be run by a process within a stack.
    """
    own = psutil.Process()
    excluded = {own.pid, *(parent.pid for parent in own.parents())}
    found = []
    for candidate in psutil.process_iter():
        if candidate.pid in excluded:
            continue
        try:
            environment = candidate.environ()
        except (psutil.Error, OSError):
            continue  # gone, a zombie, or another user's and so not ours
        if environment.get(STACK_MARK) == stack_id and process in (None, environment.get(PROCESS_MARK)):
            found.append(candidate)
    return found


def kill_marked(stack_id: str, process: str | None = None) -> int:
    """Kill the marked processes and their descendants (which may have overwritten their environment).

    Returns their number. Blocks for at most a few seconds.
    """
    victims: dict[int, psutil.Process] = {}
    for marked in find_marked(stack_id, process):
        victims[marked.pid] = marked
        try:
            victims.update((child.pid, child) for child in marked.children(recursive=True))
        except psutil.Error:
            continue  # it ended meanwhile; its children ended too or carry the mark themselves
    victims.pop(os.getpid(), None)
    for victim in victims.values():
        try:
            victim.send_signal(signal.SIGKILL)  # psutil compares start times: a reused pid is not hit
        except psutil.NoSuchProcess:
            continue
        except psutil.AccessDenied:
            _log.warning("leftover_cannot_be_killed", pid=victim.pid, stack_id=stack_id)
    psutil.wait_procs(list(victims.values()), timeout=_GONE_TIMEOUT_S)
    return len(victims)


def reap_zombies(seen_before: frozenset[int]) -> frozenset[int]:
    """Reap children that no other code waits for; returns the zombies that remain.

    Orphans are reparented to this process when a guardian is killed. Only a zombie that also existed at the last call
    is reaped: code that started a process and waits for it has had its chance by then.
    """
    zombies = set()
    for child in psutil.Process().children():
        try:
            if child.status() == psutil.STATUS_ZOMBIE:
                zombies.add(child.pid)
                if child.pid in seen_before:
                    os.waitpid(child.pid, os.WNOHANG)
        except (psutil.Error, ChildProcessError):
            continue  # reaped by other code
    return frozenset(zombies - seen_before)


_LOCK_ATTEMPTS = 10


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
    """Ports by use: http, nats, nats_monitor, postgres, controller_ops, proxy_ops, host_ops."""
    ops_urls: dict[str, str]
    """Base URLs of each service's /metrics, /healthz and /readyz."""
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
