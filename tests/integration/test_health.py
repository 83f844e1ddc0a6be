"""`/healthz` and `/readyz` of real processes: each says no in the case that it is meant for, and in no other."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

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
from tests.integration.nats_server import NatsServer
from tests.integration.postgres_server import PostgresServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

UNHEALTHY_AFTER_S = 1.0
OK = (200, "ok\n")


class Service:
    """A service's process, asked at its operations port."""

    def __init__(self, module: str, process: asyncio.subprocess.Process) -> None:
        self.module = module
        self.process = process
        self.url = ""
        self.lines: list[str] = []
        self._found = asyncio.Event()

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

    async def listens(self) -> None:
        async with asyncio.timeout(60):
            await self._found.wait()

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
            raise AssertionError(f"{self.module}{path}: {seen}, not {status} {said!r}\n{log}") from error
        return seen[1]


@asynccontextmanager
async def running(module: str, environment: Mapping[str, str]) -> AsyncIterator[Service]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module),
        env={
            **inherited,
            "MUSTER_NATS_PASSWORD": "unused",
            "MUSTER_OPS_PORT": "0",
            "MUSTER_UNHEALTHY_AFTER_S": str(UNHEALTHY_AFTER_S),
            **environment,
        },
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        limit=2**20,
    )
    service = Service(module, process)
    tasks = TaskOwner("test")
    tasks.start(service.read(), "read")
    try:
        await service.listens()
        yield service
    finally:
        process.kill()
        await process.wait()
        await tasks.close(1.0)


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path)
    server.start()
    yield server
    if server.process is not None:
        server.process.send_signal(signal.SIGCONT)
        server.kill()


PROXY = {"MUSTER_HTTP_PORT": "0", "MUSTER_PROXY_ID": "p"}


@pytest.fixture
async def services(nats: NatsServer, postgres_server: PostgresServer) -> AsyncIterator[list[Service]]:
    dsn, password = await postgres_server.make_database()
    bus = {"MUSTER_NATS_URL": nats.url}
    store = {"MUSTER_POSTGRES_DSN": dsn, "MUSTER_POSTGRES_PASSWORD": password}
    async with (
        running("serve_controller", {**bus, **store}) as first,
        running("serve_proxy", {**bus, **PROXY}) as second,
    ):
        for service in (first, second):
            await service.until("/readyz", 200)
            await service.until("/healthz", 200)
        yield [first, second]


async def test_a_bus_that_is_away_makes_unready_and_one_that_is_silent_makes_unhealthy(
    services: list[Service], nats: NatsServer
) -> None:
    nats.kill()
    for service in services:
        await service.until("/readyz", 503, "NATS")
    await asyncio.sleep(1.5 * UNHEALTHY_AFTER_S)  # what must not come has no event
    for service in services:
        assert await service.get("/healthz") == OK
    nats.start()
    for service in services:
        await service.until("/readyz", 200)
        await service.until("/healthz", 200)

    assert nats.process is not None
    nats.process.send_signal(signal.SIGSTOP)
    for service in services:
        await service.until("/healthz", 503, "connected to NATS, which has not answered a ping for ")
    nats.process.send_signal(signal.SIGCONT)
    for service in services:
        await service.until("/healthz", 200)
        await service.until("/readyz", 200)


async def test_a_process_that_stands_still_answers_nothing_and_its_parent_says_so(nats: NatsServer) -> None:
    environment = {**PROXY, "MUSTER_NATS_URL": nats.url, "MUSTER_PROXY_PROCESSES": "2"}
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
    events = [json.loads(line) for line in parent.lines if line.startswith("{")]
    started = [event for event in events if event["event"] == "proxy_process_started"]
    return next((event["pid"] for event in started if event["process"] == number), 0)


async def test_a_hosts_connection_tells_silence_from_absence(nats: NatsServer) -> None:
    bus = ControlBus(
        BusSettings(
            servers=[nats.url], user="", password="", inbox_prefix="_INBOX_host", subject_prefix="serve"
        ),
        HostId("h1"),
        on_goal=lambda _: None,
        on_leader=lambda _: None,
        on_connected=lambda: None,
        on_reconnect=lambda: None,
    )
    pulse = BusHealthCheck(
        "control plane", is_connected=lambda: bus.is_connected, ping=bus.ping, silent_after_s=0.3
    )
    tasks = TaskOwner("test")
    tasks.start(bus.run(), "bus")
    tasks.start(pulse.run(), "pulse")

    async def until(is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not is_so():  # noqa: ASYNC110 - health is asked for
                await asyncio.sleep(0.02)

    try:
        await until(lambda: bus.is_connected)
        assert nats.process is not None
        nats.process.send_signal(signal.SIGSTOP)
        await until(lambda: pulse.health_error() is not None)
        assert bus.is_connected
        nats.process.send_signal(signal.SIGCONT)
        await until(lambda: pulse.health_error() is None)
        nats.kill()
        await until(lambda: not bus.is_connected)
        await asyncio.sleep(0.5)  # longer than silence may last
        assert pulse.health_error() is None
    finally:
        await tasks.close(1.0)
        await bus.close()


async def test_a_leader_whose_postgres_hangs_says_so_and_is_not_ready(
    nats: NatsServer, breakable_postgres: PostgresServer
) -> None:
    """It resets no connection, so every attempt takes as long as it may; who waits for it has not stood still."""
    await asyncio.to_thread(breakable_postgres.start)
    dsn, password = await breakable_postgres.make_database()
    environment = {
        "MUSTER_NATS_URL": nats.url,
        "MUSTER_POSTGRES_DSN": dsn,
        "MUSTER_POSTGRES_PASSWORD": password,
        "MUSTER_UNHEALTHY_AFTER_S": "60",
    }
    async with running("serve_controller", environment) as controller, nats_client(nats) as client:
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
async def nats_client(nats: NatsServer) -> AsyncIterator[Client]:
    client = await nats_connect(nats.url)
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
