"""The Ray runtime of a host as a process: ``python -m serve_replica_host.ray_main FD``, started by the host alone.

It has no credentials but the replicas' own. It exits at once when the host's end of the socket is closed, and Ray's own
processes with it.

Why the late import: Ray reads the environment only when it is imported.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
from typing import Final, NoReturn

from serve_common.errors import BadField
from serve_common.runtime.child_process import ensure_private_directory
from serve_common.telemetry.logs import configure_child_logs
from serve_replica_host.adapters.ray_protocol import (
    CALL_BYTES_MAX,
    LENGTH_BYTES,
    Open,
    OpenFailed,
    RayProtocolError,
    RaySettings,
    body_length,
    decode_call,
    encode,
)
from serve_replica_host.core.events import TEXT_LENGTH_MAX
from serve_replica_host.replica.telemetry.logs import HOST_ID, LOG_SOCKET, open_log_sender

_DEFAULTS: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's future default; unset, it warns at each start
    "RAY_DEDUP_LOGS": "0",
    # Ray starts workers at niceness 15, which is right for batch work. Replicas serve requests: with a low priority
    # they would start and serve several times slower on a busy machine.
    "RAY_worker_niceness": "0",
}


_LOCAL_DEFAULTS: Final = {
    # Without a cluster Ray uses the loopback address, and its servers listen there only. Despite its name the variable
    # also works on Linux.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Ray would start as many idle workers as there are CPUs, which hardly speed up replicas; `SparePool` does better.
    "RAY_prestart_worker_first_driver": "0",
    # Maximum delay of a reservation after resources for it have become free.
    "RAY_gcs_create_placement_group_retry_max_interval_ms": "200",
}


def prepare_ray_environment(settings: RaySettings) -> None:
    """Set Ray's variables unless the operator has set them. Call it before Ray is imported.

    A local runtime gets token authentication, with a token of this process that is in no file: by default Ray would
    write one into the home directory, which a container may not have. A private directory of this user is created in
    the host's own. Raises `BadField` when that fails.
    """
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if settings.address is not None:
        return
    for name, value in _LOCAL_DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        ensure_private_directory(settings.ray_directory)
    except OSError as error:
        raise BadField(
            "MUSTER_RAY_TEMP_DIR", f"{settings.ray_directory} cannot be this user's alone: {error}"
        ) from error
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def main() -> int:
    """Run until the host exits or sends `Close`; returns 0 after `Close`, 1 after a failure."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    try:
        settings = _read_settings(connection)
    except (OSError, RayProtocolError) as error:
        sys.stderr.write(f"serve_replica_host.ray_main: {error}\n")
        return 1
    try:
        prepare_ray_environment(settings)
    except (BadField, OSError) as error:
        connection.sendall(encode(OpenFailed(str(error)[-TEXT_LENGTH_MAX:])))
        return 1
    os.environ[HOST_ID] = settings.host_id
    if settings.log_socket:
        os.environ[LOG_SOCKET] = settings.log_socket
    from serve_replica_host.adapters.ray_service import serve  # noqa: PLC0415 - see above

    logs = configure_child_logs("replica-host", open_log_sender(), host_id=settings.host_id, process="ray")
    try:
        return asyncio.run(serve(connection, settings))
    finally:
        logs.flush()


def _read_settings(connection: socket.socket) -> RaySettings:
    head = _read(connection, LENGTH_BYTES)
    first = decode_call(_read(connection, body_length(head, CALL_BYTES_MAX)))
    if not isinstance(first, Open):
        raise RayProtocolError("the host does not begin with its settings")
    return first.settings


def _read(connection: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        chunk = connection.recv(length - len(received))
        if not chunk:
            raise RayProtocolError("the host is gone")
        received += chunk
    return bytes(received)


def _end(status: int) -> NoReturn:
    """Exit without the interpreter's teardown, in which Ray's threads sometimes abort the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _end(main())
