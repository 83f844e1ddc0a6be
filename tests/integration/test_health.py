"""`/healthz` and `/readyz` of real processes: each says no in the case that it is meant for, and in no other."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from nats import connect as nats_connect
from nats.aio.client import Client
from nats.errors import NoRespondersError

from serve_common.names import HostId
from serve_common.runtime.health import BusHealthCheck
from serve_common.runtime.settings import BusSettings
from serve_common.runtime.tasks import TaskOwner
from serve_controller.shell.leadership import LEASE_TTL_S
from serve_replica_host.adapters.control_bus import ControlBus
from tests.support.servers.nats_server import NatsServer
from tests.support.servers.postgres_server import PostgresServer
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(300)

UNHEALTHY_AFTER_S = 1.0
OK = (200, "ok\n")
LIMIT_S = 240.0
"""A guard: importing a service takes half a minute where many others want the machine."""
ANYWHERE = {
    "MUSTER_NATS_PASSWORD": "unused",
    "MUSTER_REPLICA_NATS_PASSWORD": "unused",
    "MUSTER_POSTGRES_DSN": "postgresql://nobody@127.0.0.1:1/none",
    "MUSTER_POSTGRES_PASSWORD": "unused",
    "MUSTER_OPS_PORT": "0",
    "MUSTER_HTTP_PORT": "0",
    "MUSTER_PROXY_ID": "p",
    "MUSTER_HOST_ID": "h",
    "MUSTER_UNHEALTHY_AFTER_S": str(UNHEALTHY_AFTER_S),
}
"""What every service takes that is told nothing else."""


class Service:
    """A service's process, asked at its operations port."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.url = ""
        self.lines: list[str] = []
        self._found = asyncio.Event()
        self._ended = asyncio.Event()

    async def read(self) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            self.lines.append(line.decode())
            if not line.startswith(b"{"):
                continue
            event = json.loads(line)
            port = event.get("port" if event["event"] == "operations_port" else "operations_port")
            if port is not None and not self.url:  # a parent speaks before its children do
                self.url = f"http://127.0.0.1:{port}"
                self._found.set()
        self._ended.set()

    async def listens(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await self._found.wait()

    async def ended(self) -> int:
        """Its exit code, once all of its log was read."""
        async with asyncio.timeout(LIMIT_S):
            await self._ended.wait()
            return await self.process.wait()

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines if line.startswith("{")]

    async def get(self, path: str) -> tuple[int, str]:
        timeout = aiohttp.ClientTimeout(total=15)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(self.url + path) as answer:
            return answer.status, await answer.text()

    async def until(self, path: str, status: int, said: str = "") -> str:
        """Until ``path`` is answered so; what was said then."""
        seen: tuple[int, str] | None = None
        try:
            async with asyncio.timeout(60):
                while seen is None or seen[0] != status or said not in seen[1]:
                    await asyncio.sleep(0.05)
                    seen = await self.get(path)
        except TimeoutError as error:
            log = "".join(self.lines[-20:])
            raise AssertionError(f"{self.url}{path}: {seen}, not {status} {said!r}\n{log}") from error
        return seen[1]


@asynccontextmanager
async def started(environment: Mapping[str, str], *command: str) -> AsyncIterator[Service]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *command),
        env={**inherited, **ANYWHERE, **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        limit=2**20,
    )
    service = Service(process)
    tasks = TaskOwner("test")
    tasks.start(service.read(), "read")
    try:
        yield service
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await tasks.close(1.0)


@asynccontextmanager
async def running(module: str, environment: Mapping[str, str]) -> AsyncIterator[Service]:
    async with started(environment, "-m", module) as service:
        await service.listens()
        yield service


@pytest.fixture
async def services(server: NatsServer, postgres_server: PostgresServer) -> AsyncIterator[list[Service]]:
    dsn, password = await postgres_server.make_database()
    bus = {"MUSTER_NATS_URL": server.url}
    store = {"MUSTER_POSTGRES_DSN": dsn, "MUSTER_POSTGRES_PASSWORD": password}
    async with (
        running("serve_controller", {**bus, **store}) as first,
        running("serve_proxy", bus) as second,
    ):
        for service in (first, second):
            await service.until("/readyz", 200)
            await service.until("/healthz", 200)
        yield [first, second]


async def test_a_bus_that_is_away_makes_unready_and_one_that_is_silent_makes_unhealthy(
    services: list[Service], server: NatsServer
) -> None:
    server.kill()
    for service in services:
        await service.until("/readyz", 503, "NATS")
    await asyncio.sleep(1.5 * UNHEALTHY_AFTER_S)  # what must not come has no event
    for service in services:
        assert await service.get("/healthz") == OK
    server.start()
    for service in services:
        await service.until("/readyz", 200)
        await service.until("/healthz", 200)

    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    for service in services:
        await service.until("/healthz", 503, "connected to NATS, which has not answered a ping for ")
    server.process.send_signal(signal.SIGCONT)
    for service in services:
        await service.until("/healthz", 200)
        await service.until("/readyz", 200)


async def test_a_process_that_stands_still_answers_nothing_and_its_parent_says_so(server: NatsServer) -> None:
    environment = {"MUSTER_NATS_URL": server.url, "MUSTER_PROXY_PROCESSES": "2"}
    async with running("serve_proxy", environment) as parent:
        await parent.until("/healthz", 200)
        await parent.until("/readyz", 503, "process 2: the bucket of snapshots was not read yet")
        async with asyncio.timeout(60):
            while not (stopped := pid_of_process(parent, 2)):  # its log is another way than its answer  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        os.kill(stopped, signal.SIGSTOP)
        try:
            await parent.until("/healthz", 503, "process 2: it does not answer within 2 s\n")
        finally:
            os.kill(stopped, signal.SIGCONT)
        await parent.until("/healthz", 200)


def pid_of_process(parent: Service, number: int) -> int:
    """As the parent logged it; 0 before that."""
    begun = [event for event in parent.events if event["event"] == "proxy_process_started"]
    return next((event["pid"] for event in begun if event["process"] == number), 0)


async def test_a_hosts_connection_tells_silence_from_absence(server: NatsServer) -> None:
    bus = ControlBus(
        BusSettings(
            servers=[server.url], user="", password="", inbox_prefix="_INBOX_host", subject_prefix="serve"
        ),
        HostId("h1"),
        on_goal=lambda _: None,
        on_leader=lambda _: None,
        on_evaluation=lambda _: None,
        on_connected=lambda: None,
        on_reconnect=lambda: None,
    )
    pulse = BusHealthCheck(
        "control plane", is_connected=lambda: bus.is_connected, ping=bus.ping, silent_after_s=0.3
    )
    tasks = TaskOwner("test")
    tasks.start(bus.run(), "bus")
    tasks.start(pulse.run(), "pulse")

    try:
        await eventually(lambda: bus.is_connected)
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        await eventually(lambda: pulse.health_error() is not None)
        assert bus.is_connected
        server.process.send_signal(signal.SIGCONT)
        await eventually(lambda: pulse.health_error() is None)
        server.kill()
        await eventually(lambda: not bus.is_connected)
        await asyncio.sleep(0.5)  # longer than silence may last
        assert pulse.health_error() is None
    finally:
        await tasks.close(1.0)
        await bus.close()


async def test_a_leader_whose_postgres_hangs_says_so_and_is_not_ready(
    server: NatsServer, breakable_postgres: PostgresServer
) -> None:
    """It resets no connection, so every attempt takes as long as it may; who waits for it has not stood still."""
    await asyncio.to_thread(breakable_postgres.start)
    dsn, password = await breakable_postgres.make_database()
    environment = {
        "MUSTER_NATS_URL": server.url,
        "MUSTER_POSTGRES_DSN": dsn,
        "MUSTER_POSTGRES_PASSWORD": password,
        "MUSTER_UNHEALTHY_AFTER_S": "60",
    }
    async with running("serve_controller", environment) as controller, nats_client(server) as client:
        numbers = itertools.count(1)

        async def told() -> str:
            """What a command is answered: the code of its error, or ok."""
            change = {"options": {"request_timeout_s": next(numbers)}}
            answer = await client.request(
                "serve.admin.set_http_options", json.dumps(change).encode(), timeout=60
            )
            return str(json.loads(answer.data).get("code", "ok"))

        await controller.until("/readyz", 200)
        async with asyncio.timeout(60):
            while not await is_served(client):  # noqa: ASYNC110 - it is asked
                await asyncio.sleep(0.05)
        assert await told() == "ok"
        breakable_postgres.freeze()
        try:
            await controller.until("/readyz", 503, "Postgres is away")
            answers = [await told() for _ in range(5)]
            loop = asyncio.get_running_loop()
            until = loop.time() + 2 * LEASE_TTL_S
            while loop.time() < until:
                answers.append(await told())
                assert (await controller.get("/readyz"))[0] == 503
                await asyncio.sleep(0.2)
            assert set(answers) == {"store_unavailable"}
            answer = await client.request("serve.admin.list_deployments", b"", timeout=60)
            assert answer.data == b"[]", "queries are answered"
        finally:
            breakable_postgres.thaw()
        await controller.until("/readyz", 200)
        async with asyncio.timeout(60):
            while await told() != "ok":  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.05)
        lost = [line for line in controller.lines if "leadership_lost" in line]
        assert lost == []


@asynccontextmanager
async def nats_client(server: NatsServer) -> AsyncIterator[Client]:
    client = await nats_connect(server.url)
    try:
        yield client
    finally:
        await client.close()


async def is_served(client: Client) -> bool:
    """Whether a leader answers."""
    try:
        await client.request("serve.admin.list_deployments", b"", timeout=5)
    except NoRespondersError:
        return False
    return True


# No service ends without a word: by an exception with a line of log and exit code 1, by order with 0.


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
    module: str, fault: str, event: str, shared_server: NatsServer
) -> None:
    with tempfile.TemporaryDirectory(prefix="ends-") as directory:  # Ray's sockets need a short path
        environment = {
            "MUSTER_NATS_URL": shared_server.url,
            "MUSTER_RAY_TEMP_DIR": f"{directory}/ray",
            "MUSTER_METRICS_DIR": f"{directory}/metrics",
        }
        async with started(environment, "-c", fault + FAULT + RUN.format(module=module)) as service:
            assert await service.ended() == 1, service.lines[-3:]
    told = [line for line in service.events if line["event"] == event]
    assert told, [line["event"] for line in service.events]
    assert "cannot convert float infinity" in json.dumps(told)
    assert "OverflowError" in json.dumps(told), "where it was raised is told too"


async def test_an_ordered_stop_succeeds_also_without_a_store(shared_server: NatsServer) -> None:
    async with running("serve_controller", {"MUSTER_NATS_URL": shared_server.url}) as controller:
        controller.process.send_signal(signal.SIGTERM)
        assert await controller.ended() == 0, controller.lines[-3:]
