"""The Ray runtime of a host as a process: ``python -m serve_replica_host.ray_main FD``, started by the host alone.

It has no credentials but the replicas' own. It exits at once when the host's end of the socket is closed, and Ray's own
processes with it.

Why the late import: Ray reads the environment only when it is imported.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from serve_common.errors import BadField
from serve_common.telemetry.logs import configure_child_logs
from serve_replica_host.adapters.ray_environment import prepare_ray_environment
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
        prepare_ray_environment(Path(settings.temp_dir), is_local=settings.address is None)
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
