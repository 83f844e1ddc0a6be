"""No service ends without a word: by an exception with a line of log and exit code 1, by order with 0."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.integration.nats_server import NatsServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LIMIT_S = 240.0
"""A guard: importing a service takes half a minute where many others want the machine."""
BREAK_CONTROLLER = """
from serve_controller.shell.leadership import Leadership as broken
name = "run"
"""
BREAK_PROXY_TASK = """
from serve_proxy.shell.reports import Reports as broken
name = "run"
"""
BREAK_PROXY_START = """
from serve_proxy.http.server import HttpServer as broken
name = "start"
"""
BREAK_HOST = """
from serve_replica_host.adapters.ray_runtime import RayRuntime
from serve_replica_host.shell.host import HostShell as broken
async def nothing(self): pass
RayRuntime.open = RayRuntime.close = nothing
name = "run"
"""
FAULT = """
async def fail(*_, **__):
    import asyncio
    await asyncio.sleep(0)
    raise OverflowError("cannot convert float infinity to integer")
setattr(broken, name, fail)
"""
RUN = """
import sys
from {module}.__main__ import main
sys.exit(main())
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    """Not pytest's: Ray's sockets need a short path."""
    with tempfile.TemporaryDirectory(prefix="ends-") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.kill()


def environment(nats: NatsServer, directory: Path) -> Mapping[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    return {
        **inherited,
        "MUSTER_NATS_URL": nats.url,
        "MUSTER_NATS_PASSWORD": "unused",
        "MUSTER_REPLICA_NATS_PASSWORD": "unused",
        "MUSTER_POSTGRES_DSN": "postgresql://nobody@127.0.0.1:1/none",
        "MUSTER_POSTGRES_PASSWORD": "unused",
        "MUSTER_OPS_PORT": "0",
        "MUSTER_HTTP_PORT": "0",
        "MUSTER_PROXY_ID": "p",
        "MUSTER_HOST_ID": "h",
        "MUSTER_RAY_TEMP_DIR": str(directory / "ray"),
        "MUSTER_METRICS_DIR": str(directory / "metrics"),
    }


@asynccontextmanager
async def running(
    code: str, nats: NatsServer, directory: Path
) -> AsyncIterator[tuple[asyncio.subprocess.Process, list[dict[str, object]]]]:
    """The process and the lines of its log, all of them once it has ended."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code),
        env=environment(nats, directory),
        stderr=asyncio.subprocess.PIPE,
        limit=2**20,
    )
    lines: list[dict[str, object]] = []
    try:
        yield process, lines
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def until_ended(process: asyncio.subprocess.Process, lines: list[dict[str, object]]) -> int:
    assert process.stderr is not None
    async with asyncio.timeout(LIMIT_S):
        text = await process.stderr.read()
        lines += [json.loads(line) for line in text.splitlines() if line.startswith(b"{")]
        return await process.wait()


@pytest.mark.parametrize(
    ("module", "fault", "event"),
    [
        ("serve_controller", BREAK_CONTROLLER, "controller_failed"),
        ("serve_proxy", BREAK_PROXY_TASK, "task_failed"),
        ("serve_proxy", BREAK_PROXY_START, "proxy_failed"),
        ("serve_replica_host", BREAK_HOST, "host_failed"),
    ],
    ids=["controller", "proxy, in a task", "proxy, at the start", "host"],
)
async def test_an_end_by_an_exception_is_logged_and_fails(
    module: str, fault: str, event: str, nats: NatsServer, directory: Path
) -> None:
    async with running(fault + FAULT + RUN.format(module=module), nats, directory) as (process, lines):
        assert await until_ended(process, lines) == 1, lines[-3:]
        told = [line for line in lines if line["event"] == event]
        assert told, [line["event"] for line in lines]
        assert "cannot convert float infinity" in json.dumps(told)
        assert "OverflowError" in json.dumps(told), "where it was raised is told too"


@pytest.mark.parametrize("module", ["serve_controller", "serve_proxy"])
async def test_an_ordered_stop_succeeds(module: str, nats: NatsServer, directory: Path) -> None:
    async with running(RUN.format(module=module), nats, directory) as (process, lines):
        assert process.stderr is not None
        async with asyncio.timeout(LIMIT_S):
            while b"operations_port" not in await process.stderr.readline():
                pass
        process.send_signal(signal.SIGTERM)
        assert await until_ended(process, lines) == 0, lines[-3:]
