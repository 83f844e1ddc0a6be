"""The replica host as a process: ``python -m serve_replica_host``.

Why the late import: prometheus_client reads the environment only when it is imported. And Ray's process, which takes
longest to start, is starting by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import NoReturn

import structlog

from serve_common.errors import BadField
from serve_common.runtime.child_process import ensure_private_directory
from serve_common.runtime.settings import Environment
from serve_common.telemetry.logs import configure_logs
from serve_replica_host.adapters.local_process import (
    HostUsers,
    acting_as,
    become,
    choose_users,
    share_directory,
)
from serve_replica_host.adapters.log_socket import LogSocket
from serve_replica_host.adapters.ray_process import RayProcess, ray_settings
from serve_replica_host.settings import HostSettings, read_host_settings


def main() -> int:
    """Run until stopped by a signal; returns 2 for bad settings, else the exit status of `run_host`."""
    try:
        settings = read_host_settings(Environment())  # includes secrets: later reads happen as another user
        users = choose_users(settings.host_user, settings.replica_user)
        log_socket = LogSocket(Path(settings.own_dir))
        with acting_as(users.host, *users.shared_groups):
            _make_directories(settings, users)
            no_logs = log_socket.bind(users.shared_gid)
        runtime = RayProcess(ray_settings(settings, "" if no_logs else str(log_socket.path)), users.replica)
        if users.host is not None:
            become(users.host, *users.shared_groups)
    except (BadField, OSError) as error:
        sys.stderr.write(f"serve_replica_host: {error}\n")
        return 2
    logs = configure_logs("replica-host", host_id=settings.host_id)
    log = structlog.get_logger(__name__)
    if no_logs:
        log.warning("no_log_socket", reason=no_logs)
    if users.replica is None:
        log.warning(
            "user_code_has_the_hosts_rights",
            uid=os.geteuid(),
            reason="MUSTER_REPLICA_USER names no other user",
        )
    else:
        log.info("user_code_is_another_user", uid=users.replica.uid, host_uid=os.geteuid())
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = settings.metrics_dir
    from serve_replica_host.wiring import run_host  # noqa: PLC0415 - see above

    try:
        return asyncio.run(run_host(settings, logs, runtime, log_socket))
    except Exception as error:
        log.critical("host_ended_by_an_error", exc_info=error)
        return 1
    finally:
        logs.flush()


def _make_directories(settings: HostSettings, users: HostUsers) -> None:
    if users.shared_gid is None:
        for directory in (settings.own_dir, settings.metrics_dir, settings.code_dir):
            ensure_private_directory(Path(directory))
        return
    # Replicas traverse the one, and create files in the other that only they and the host may remove.
    share_directory(Path(settings.own_dir), users.shared_gid, 0o710)
    share_directory(Path(settings.metrics_dir), users.shared_gid, 0o1770)
    share_directory(Path(settings.code_dir), users.shared_gid, 0o750)  # they read what is in there


def _end(status: int) -> NoReturn:
    """Exit without the interpreter's teardown, which would wait for hanging threads."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # such as of a full disk
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    _end(main())
