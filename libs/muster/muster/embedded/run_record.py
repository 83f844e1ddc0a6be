"""``run.json``: what a stack runs where, for other commands and for its own next start; and the lock beside it.

Why both: the lock alone tells for certain that a stack runs (the kernel drops it with the process), the file tells
where. Ports are remembered after a stop, so that the next start listens on the same ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from pathlib import Path
from typing import IO

import msgspec

from muster.embedded.errors import AlreadyRunning, StackFailed
from muster.embedded.options import StatePaths
from muster.embedded.process import RunningProcess

_LOCK_ATTEMPTS = 10


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``run.json``. Holds no secret."""

    stack_id: str
    state_dir: str
    pid: int
    """Of `muster up`; 0 when it was stopped in order."""
    nats_url: str
    nats_monitor_url: str
    http_url: str
    postgres_dsn: str
    """Without its password, which is in ``<secrets>/postgres_password``."""
    secrets: str
    """Directory of the secrets; people and tools connect to NATS with ``admin.creds`` of it."""
    ports: dict[str, int]
    """By use: http, nats, nats_monitor, postgres, controller_ops, proxy_ops, host_ops."""
    ops_urls: dict[str, str]
    """Where each service serves /metrics, /healthz and /readyz."""
    processes: list[RunningProcess] = []


def read_record(paths: StatePaths) -> RunRecord | None:
    """What the last start wrote; None when there is nothing that can be used."""
    try:
        return msgspec.json.decode(paths.run_file.read_bytes(), type=RunRecord)
    except (OSError, msgspec.DecodeError):
        return None


def write_record(paths: StatePaths, record: RunRecord) -> None:
    """Replace the file in one step."""
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


def stack_id_of(paths: StatePaths) -> str:
    """The id of the stack of this directory: the same over restarts, another for a copy or a moved directory.

    It must be no other's, because whatever bears it is killed.
    """
    last = read_record(paths)
    if last is not None and last.state_dir == str(paths.root):
        return last.stack_id
    return secrets.token_hex(8)


def lock_state(paths: StatePaths) -> IO[str]:
    """Become the only stack of this directory, until the returned file is closed or the process ends.

    Raises `AlreadyRunning` naming the other's pid, `StackFailed` when the directory cannot be used.
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
    with contextlib.suppress(
        OSError
    ):  # of a full disk: then nobody is told the pid, and the lock holds all the same
        file.truncate(0)
        os.write(file.fileno(), f"{os.getpid()}\n".encode())  # nothing is left to be tried again at the close
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
