"""The runtime's end of the socket to its host: performs its calls, and sends events of replicas.

Why it exits at once when the host is gone: a new host starts its own runtime. The kernel kills Ray's processes with the
thread that started them, and workers exit with their raylet.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import structlog

from serve_common.runtime.tasks import TaskOwner
from serve_common.telemetry.log_forwarder import pieces
from serve_replica_host.adapters.metrics_files import RemoteFiles
from serve_replica_host.adapters.ray_protocol import (
    CALL_BYTES_MAX,
    RESOURCES_INTERVAL_S,
    UNSENT_BYTES_MAX,
    Call,
    CheckHealth,
    Close,
    Drain,
    Evaluate,
    Kill,
    KillByForce,
    Notice,
    Open,
    OpenFailed,
    RayProtocolError,
    RaySettings,
    RayUnavailable,
    Reconfigure,
    Renew,
    Resources,
    Start,
    decode_call,
    encode,
    read_body,
)
from serve_replica_host.adapters.ray_runtime import RayRuntime
from serve_replica_host.adapters.ray_session import dead_servers
from serve_replica_host.core.events import (
    TEXT_LENGTH_MAX,
    HealthChecked,
    ProcessEnded,
    Reconfigured,
    ReplicaEvent,
    ReplicaStartFailed,
    Waits,
)
from serve_replica_host.replica.telemetry.logs import open_log_sender

_log = structlog.get_logger(__name__)

_HOST_GONE: Final = 1
_CLOSE_TIMEOUT_S: Final = 1.0


async def serve(connection: socket.socket, settings: RaySettings) -> int:
    """Start Ray and perform the host's calls on ``connection`` until `Close`; returns the exit status."""
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    sent_resources: dict[str, float] | None = None

    def send(notice: Notice) -> None:
        writer.write(encode(notice))
        if writer.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            _log.critical("host_does_not_read", unsent_bytes_max=UNSENT_BYTES_MAX)
            os._exit(_HOST_GONE)

    def send_resources() -> None:
        nonlocal sent_resources
        sent_resources = runtime.resources
        send(Resources(sent_resources))

    def on_event(event: ReplicaEvent) -> None:
        if (
            runtime.resources is not sent_resources
        ):  # first, or the host would restart what does not fit any more
            send_resources()
        send(bounded(event))

    async def run_ray() -> None:
        try:
            await runtime.open()
        except RayUnavailable as error:
            send(OpenFailed(_cut(str(error))))
            return
        # Without one of them nothing can be started; a restarted host starts a new Ray.
        while not (dead := dead_servers()):
            send_resources()
            await asyncio.sleep(RESOURCES_INTERVAL_S)
        send(OpenFailed(f"its {' and '.join(dead)} has ended"))

    runtime = RayRuntime(
        settings,
        on_event,
        files=RemoteFiles(Path(settings.metrics_dir)),
        write_lines=_in_chunks(open_log_sender()),
    )
    tasks = TaskOwner("ray_runtime", on_failure=lambda _task, _error: os._exit(1))
    tasks.start(run_ray(), "offer")
    while not isinstance(call := await _next_call(reader), Close):
        _perform(runtime, call)
    await tasks.close(_CLOSE_TIMEOUT_S)
    await runtime.close()
    return 0


async def _next_call(reader: asyncio.StreamReader) -> Call:
    try:
        body = await read_body(reader, CALL_BYTES_MAX)
        if body is not None:
            return decode_call(body)
    except RayProtocolError as error:
        _log.critical("host_broke_the_protocol", error=str(error))
    os._exit(_HOST_GONE)


def _perform(runtime: RayRuntime, call: Call) -> None:
    match call:
        case Start(goal, bus):
            runtime.start(goal, bus)
        case Reconfigure(goal):
            runtime.reconfigure(goal)
        case Renew(tag, identity):
            runtime.renew(tag, identity)
        case CheckHealth(tag):
            runtime.check_health(tag)
        case Evaluate(tag, request_id, body):
            runtime.evaluate(tag, request_id, body)
        case Drain(tag):
            runtime.drain(tag)
        case Kill(tag):
            runtime.kill(tag)
        case KillByForce(tag):
            runtime.kill_by_force(tag)
        case Open() | Close():
            raise RayProtocolError(f"{type(call).__name__} comes once")


def bounded(event: ReplicaEvent) -> ReplicaEvent:
    """``event`` with its text cut to the maximum length (the end is kept), and valid as UTF-8."""
    match event:
        case ReplicaStartFailed() | ProcessEnded():
            return msgspec.structs.replace(event, error=_cut(event.error))
        case Reconfigured(error=str(error)) | HealthChecked(error=str(error)):
            return msgspec.structs.replace(event, error=_cut(error))
        case Waits():
            return msgspec.structs.replace(event, reason=_cut(event.reason))
        case _:
            return event


def _cut(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()[-TEXT_LENGTH_MAX:]


def _in_chunks(write: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """``write`` in chunks: the size of a datagram is limited."""

    def write_all(lines: bytes) -> None:
        for piece, _ in pieces(lines.splitlines(keepends=True)):
            write(piece)

    return write_all
