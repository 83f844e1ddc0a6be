"""Several proxy processes behind one port: real processes, real load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from serve_common.protocol.reports import ProxyReport
from serve_common.runtime.tasks import TaskOwner
from tests.integration.test_proxy_leaving import Load, proxy_environment
from tests.support.servers.nats_server import NatsServer
from tests.support.stacks.proxy_stack import R0, R1, Stack
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(240)
"""Up to seven processes start here, one after the other on a machine that is busy."""


class ProxyProcesses:
    """A parent and its children, and what they log."""

    def __init__(self) -> None:
        self.log: list[dict[str, Any]] = []
        self._logged = asyncio.Condition()
        self._tasks = TaskOwner("test")

    async def start(self, server: NatsServer, count: int = 2, http_port: int = 0) -> None:
        environment = proxy_environment(
            server, "many", MUSTER_HTTP_PORT=str(http_port), MUSTER_PROXY_PROCESSES=str(count)
        )
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "serve_proxy", env=environment, stderr=asyncio.subprocess.PIPE, limit=2**20
        )
        self._tasks.start(self._read(), "read")

    async def _read(self) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            async with self._logged:
                is_event = line.startswith(b"{")
                self.log.append(json.loads(line) if is_event else {"event": line.decode().rstrip()})
                self._logged.notify_all()

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.log if line["event"] == event]

    async def until_logged(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        async with asyncio.timeout(120), self._logged:
            await self._logged.wait_for(lambda: len(self.logged(event)) >= count)
        return self.logged(event)

    async def serve(self, server: NatsServer, count: int = 2) -> None:
        """Started, and all of them ready."""
        await self.start(server, count)
        [line] = await self.until_logged("proxy_processes_run")
        self.port = int(line["address"].rpartition(":")[2])
        self.operations = f"http://127.0.0.1:{line['operations_port']}"
        await self.until_logged("proxy_listening", count)
        await self.until_ready()

    async def until_ready(self) -> None:
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            while True:
                async with session.get(f"{self.operations}/readyz") as answer:
                    if answer.status == 200:
                        return
                await asyncio.sleep(0.05)

    @property
    def pids(self) -> dict[int, int]:
        """By number, of their present lives."""
        return {line["process"]: line["pid"] for line in self.logged("proxy_process_started")}

    async def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        async with asyncio.timeout(60):
            return await self.process.wait()

    async def close(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self._tasks.close(5)
        self.process._transport.close()  # type: ignore[attr-defined]


@pytest.fixture
async def processes() -> AsyncIterator[ProxyProcesses]:
    processes = ProxyProcesses()
    yield processes
    await processes.close()


async def fetch(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        assert answer.status == 200
        return await answer.text()


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def test_each_process_is_a_proxy_of_its_own_behind_one_port_and_all_drain_together(
    server: NatsServer, stack: Stack, processes: ProxyProcesses
) -> None:
    await stack.serve(R0, R1)
    await processes.serve(server)
    for number in (1, 2):
        report = await stack.report(lambda report, number=number: report.proxy_id == f"many-{number}")
        assert report.address == f"127.0.0.1:{processes.port}"
    load = Load([processes.port])
    async with asyncio.TaskGroup() as group:
        for _ in range(16):
            group.create_task(load.client(requests_each_max=5))
        await load.requests(500)
        load.is_over = True
    assert load.failed == {}
    page, counted = "", {}
    async with asyncio.timeout(30):
        while set(counted) != {"1", "2"}:  # one that does not answer in time is left out of the page
            page = await fetch(f"{processes.operations}/metrics")
            counted = dict(
                re.findall(r'serve_proxy_requests_total\{process="(\d)",.*code="200".*\} ([\d.]+)', page)
            )
    assert sum(map(float, counted.values())) == load.outcomes["200"]
    assert page.count("# TYPE serve_proxy_requests_total counter") == 1

    hold = f"http://127.0.0.1:{processes.port}/echo/hold"
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        held = [group.create_task(session.post(hold, headers={"Connection": "close"})) for _ in range(8)]
        await eventually(lambda: sum(len(replica.held) for replica in stack.replicas) >= 8)
        ending = group.create_task(processes.end())
        await processes.until_logged("proxy_drains", 2)
        for replica in stack.replicas:
            replica.release()
        assert [(await task).status for task in held] == [200] * 8
        assert await ending == 0


async def test_one_of_two_may_be_stopped_or_killed_and_none_outlives_the_parent(
    server: NatsServer, stack: Stack, processes: ProxyProcesses
) -> None:
    await stack.serve(R0, R1)
    await processes.serve(server)
    load = Load([processes.port])
    async with asyncio.TaskGroup() as group:
        for _ in range(12):
            group.create_task(load.client(requests_each_max=3))
        for _ in range(4):
            group.create_task(load.client())
        await load.requests(300)
        os.kill(processes.pids[1], signal.SIGTERM)
        await processes.until_logged("proxy_process_ended", 1)
        await load.requests(100)
        await processes.until_logged("proxy_listening", 3)
        load.is_over = True
    assert load.failed == {}

    first = processes.pids[2]
    os.kill(first, signal.SIGKILL)
    ended = await processes.until_logged("proxy_process_ended", 2)
    assert [(line["process"], line["code"]) for line in ended] == [(1, 0), (2, -signal.SIGKILL)]
    load = Load([processes.port])
    async with asyncio.TaskGroup() as group:
        group.create_task(load.client(requests_each_max=1))
        await load.requests(20)
        load.is_over = True
    assert load.failed == {}
    await processes.until_logged("proxy_listening", 4)
    await processes.until_ready()
    await processes.until_logged("proxy_process_started", 4)
    assert processes.pids[2] != first

    pids = list(processes.pids.values())
    processes.process.kill()
    await eventually(lambda: not any(map(_is_alive, pids)))
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", processes.port))


async def test_a_port_on_which_others_listen_is_not_shared_with_them(
    server: NatsServer, processes: ProxyProcesses
) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        await processes.start(server, http_port=other.getsockname()[1])
        async with asyncio.timeout(60):
            assert await processes.process.wait() == 1
    await processes.until_logged("cannot_listen")
    assert processes.pids == {}


# Where services say that they can be scraped: there is their page, and it says who they are.


async def test_a_proxy_reports_the_address_of_its_page(stack: Stack) -> None:
    await stack.create_bucket()
    report: ProxyReport = await stack.report(lambda report: report.metrics_url)
    assert report.metrics_url == f"http://127.0.0.1:{stack.proxy.operations.port}/metrics"
    assert 'serve_proxy_info{proxy_id="p1"} 1.0' in await fetch(report.metrics_url)


async def test_proxies_of_one_parent_report_the_page_that_shows_them_all(
    server: NatsServer, stack: Stack, processes: ProxyProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stack.create_bucket()
    # On all addresses, so that each of them has to find out under which one NATS knows it.
    monkeypatch.setenv("MUSTER_OPS_HOST", "0.0.0.0")
    await processes.start(server)
    [line] = await processes.until_logged("proxy_processes_run")
    names: set[str] = set()
    while len(names) < 2:
        report = await stack.report(
            lambda report: report.proxy_id not in {"p1", *names} and report.metrics_url
        )
        assert report.metrics_url == f"http://127.0.0.1:{line['operations_port']}/metrics"
        names.add(report.proxy_id)
    async with asyncio.timeout(30):
        shown = ""
        # Of a process that does not answer its parent in time the page shows nothing.
        while not all(f'proxy_id="{name}"' in shown for name in names):
            await asyncio.sleep(0.05)
            shown = await fetch(report.metrics_url)
