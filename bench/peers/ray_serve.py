"""Ray Serve 2.60 in the two modes that people compare with, each a supervised process with a Ray of its own.

Why both at once beside Muster: the rounds are interleaved, and a Ray Serve takes longer to start than to measure.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from bench.console import check_peers
from bench.floors import free_port, has_file, ignore
from bench.measure import Served, System
from muster.embedded.process import ProcessSpec
from muster.embedded.supervisor import Supervisor

DEFAULT, FASTEST = "Ray Serve", "Ray Serve HAProxy"
_STARTS_WITHIN_S = 120.0
_CPUS = 2


def _modes(directory: Path) -> dict[str, dict[str, str]]:
    """Ray Serve's variables for each mode; HAProxy's files and ports are this run's own."""
    own = directory / "haproxy"
    return {
        DEFAULT: {},
        FASTEST: {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(own / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(own / "admin.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(own),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(own / "server-state"),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        },
    }


@asynccontextmanager
async def running_ray_serve(directory: Path, python: Path) -> AsyncIterator[list[System]]:
    """Both modes, with everything deployed; all is gone afterwards. Raises `StackFailed` with the end of a log."""
    await asyncio.to_thread(_prepare, directory, python)
    ports: dict[str, int] = {}
    supervisors = []
    systems = []
    for number, (name, variables) in enumerate(_modes(directory).items()):
        stack_id = uuid.uuid4().hex
        ports[name] = free_port()
        spec = _spec(directory, python, number, ports[name], variables)
        supervisors.append(Supervisor(stack_id, [spec], ignore))
        urls = {path.value: f"http://127.0.0.1:{ports[name]}/{path.value}" for path in Served}
        systems.append(System(name=name, urls=urls, stack_id=stack_id))
    started = []
    try:
        for supervisor in supervisors:
            started.append(supervisor)
            await supervisor.start()
        yield systems
    finally:
        for supervisor in started:
            await supervisor.stop()


def _prepare(directory: Path, python: Path) -> None:
    check_peers(python)
    (directory / "haproxy").mkdir()


def _spec(directory: Path, python: Path, number: int, port: int, variables: Mapping[str, str]) -> ProcessSpec:
    ready = directory / f"serve-{number}.ready"
    root = Path(__file__).parents[2]
    argv = [
        *(str(python), "-m", "bench.peers.serve_program"),
        *("--temp-dir", str(directory / f"r{number}"), "--cpus", str(_CPUS)),
        *("--port", str(port), "--ready", str(ready)),
    ]
    # As our own services' bytecode is cached, so is theirs; the packages are compiled when they are installed.
    left_out = ("RAY_", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return ProcessSpec(
        name="serve",
        argv=argv,
        env={**environment, **variables, "PYTHONPATH": str(root)},
        cwd=root,
        log_path=directory / f"serve-{number}.log",
        ready=has_file(ready),
        ready_timeout_s=_STARTS_WITHIN_S,
        stop_timeout_s=8.0,
    )
