"""A proxy that is told to stop while another one serves: real processes, real load, and no request is lost.

The clients do what a load balancer or a careful client does: they use a connection until they are told that it closes,
look whether it was closed before they send on it, and connect elsewhere when a connection is refused. Everything that
goes wrong after a request was sent counts as failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import select
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.servers.nats_server import NatsServer
from tests.support.stacks.proxy_stack import R0, R1, Stack
from tests.support.stacks.raw_peers import raw_connection
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(180)


def proxy_environment(server: NatsServer, proxy_id: str, **more: str) -> dict[str, str]:
    return {
        **os.environ,
        "MUSTER_NATS_URL": server.url,
        "MUSTER_NATS_PASSWORD": "unused",
        "MUSTER_HTTP_PORT": "0",
        "MUSTER_OPS_PORT": "0",
        "MUSTER_PROXY_ID": proxy_id,
        "MUSTER_DRAIN_TIMEOUT_S": "10",
        **more,
    }


class ProxyProcess:
    """A proxy as a process of its own."""

    def __init__(self, proxy_id: str) -> None:
        self.proxy_id = proxy_id
        self.port = 0

    async def start(self, server: NatsServer) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "serve_proxy",
            env=proxy_environment(server, self.proxy_id),
            stderr=asyncio.subprocess.PIPE,
        )
        assert self.process.stderr is not None
        async with asyncio.timeout(90):
            while b"proxy_listening" not in (line := await self.process.stderr.readline()):
                assert line
        self.port = int(json.loads(line)["address"].rpartition(":")[2])

    async def end(self, number: int) -> str:
        """Send the signal; what it wrote until it ended."""
        self.process.send_signal(number)
        _, log = await self.process.communicate()
        return log.decode()

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.communicate()


class Load:
    """Clients that spread over all ports and count what happened to their requests."""

    def __init__(self, ports: list[int]) -> None:
        self.ports = ports
        self.outcomes: Counter[str] = Counter()
        self.open: Counter[int] = Counter()
        self.is_over = False
        self._random = random.Random(7)

    async def client(self, *, think_s: float = 0.0, requests_each_max: int = 1_000_000) -> None:
        while not self.is_over:
            port = self._random.choice(self.ports)
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionError:
                self.outcomes["connected elsewhere"] += 1
                await asyncio.sleep(0.001)
                continue
            self.open[port] += 1
            try:
                await self._use(reader, writer, think_s, requests_each_max)
            finally:
                self.open[port] -= 1
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    async def _use(self, reader, writer, think_s: float, requests_each_max: int) -> None:
        for _ in range(requests_each_max):
            if self.is_over or reader.at_eof():
                return
            try:
                answer = await asyncio.wait_for(self._query(reader, writer), 30)
            except (OSError, EOFError, TimeoutError) as error:
                self.outcomes[f"failed: {type(error).__name__}"] += 1
                return
            if answer is None:
                return
            status, is_retained = answer
            self.outcomes[str(status)] += 1
            if not is_retained:
                self.outcomes["told to close"] += 1
                return
            if think_s:
                await asyncio.sleep(self._random.uniform(0, 2 * think_s))

    async def _query(self, reader, writer) -> tuple[int, bool] | None:
        """Status, and whether the connection is kept; None when it is closed, so that nothing was sent on it."""
        poll = select.poll()
        poll.register(writer.get_extra_info("socket").fileno(), select.POLLIN)
        if poll.poll(0):  # the loop may not have looked for a second
            return None
        writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello")
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        assert await reader.readexactly(length) == b"hello"
        return int(head.split()[1]), "connection: close" not in head

    async def requests(self, count: int) -> None:
        """Until so many more were answered."""
        goal = self.outcomes["200"] + count
        await eventually(lambda: self.outcomes["200"] >= goal, within_s=60)

    async def left(self, port: int) -> None:
        """Until no client has a connection there."""
        await eventually(lambda: not self.open[port])

    @property
    def failed(self) -> dict[str, int]:
        return {
            outcome: count
            for outcome, count in self.outcomes.items()
            if outcome not in ("200", "told to close", "connected elsewhere")
        }


async def test_a_proxy_told_to_stop_behind_a_second_one_loses_no_request(
    server: NatsServer, stack: Stack
) -> None:
    await stack.serve(R0, R1)
    proxies = [ProxyProcess("leaving"), ProxyProcess("staying")]
    try:
        async with asyncio.TaskGroup() as group:
            for proxy in proxies:
                group.create_task(proxy.start(server))
        for proxy in proxies:
            await stack.report(
                lambda report, proxy=proxy: (
                    report.proxy_id == proxy.proxy_id and report.applied_snapshot_id >= stack.snapshot_id
                )
            )
        load = Load([proxy.port for proxy in proxies])
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(load.client())
            for _ in range(8):
                group.create_task(load.client(think_s=0.05))
            for _ in range(4):
                group.create_task(load.client(requests_each_max=1))
            await load.requests(500)
            log = await proxies[0].end(signal.SIGTERM)
            await load.left(proxies[0].port)
            await load.requests(500)
            load.is_over = True
        assert not load.failed, dict(load.outcomes)
        assert load.outcomes["told to close"] > 0
        assert load.outcomes["connected elsewhere"] > 0
        assert proxies[0].process.returncode == 0
        assert "drain_timed_out" not in log
        last = [report for report in stack.reports if report.proxy_id == "leaving"][-1]
        assert last.leaving
    finally:
        for proxy in proxies:
            await proxy.kill()


async def test_what_is_in_flight_in_a_proxy_told_to_stop_is_answered_and_idle_connections_are_closed(
    server: NatsServer, stack: Stack
) -> None:
    (replica,) = await stack.serve(R0)
    proxy = ProxyProcess("leaving")
    try:
        await proxy.start(server)
        await stack.report(
            lambda report: report.proxy_id == "leaving" and report.applied_snapshot_id >= stack.snapshot_id
        )
        url = f"127.0.0.1:{proxy.port}"
        async with raw_connection(url) as (held, holding), raw_connection(url) as (idle, idling):
            holding.write(b"GET /echo/hold HTTP/1.1\r\nHost: x\r\n\r\n")
            await replica.wait(lambda: len(replica.held) == 1)
            async with asyncio.TaskGroup() as group:
                group.create_task(proxy.end(signal.SIGTERM))
                await stack.report(lambda report: report.proxy_id == "leaving" and report.leaving)
                with pytest.raises(ConnectionRefusedError):
                    await asyncio.open_connection("127.0.0.1", proxy.port)
                idling.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi")
                late = await asyncio.wait_for(idle.read(), 30)
                assert late.startswith(b"HTTP/1.1 200")
                assert b"Connection: close" in late
                replica.release()
                answer = await asyncio.wait_for(held.read(), 30)
                assert answer.startswith(b"HTTP/1.1 200")
                assert answer.endswith(b"released")
        assert proxy.process.returncode == 0
    finally:
        await proxy.kill()


async def test_a_proxy_whose_log_nobody_reads_any_more_ends_all_the_same(server: NatsServer) -> None:
    proxy = ProxyProcess("leaving")
    try:
        await proxy.start(server)
        proxy.process._transport.get_pipe_transport(2).close()  # type: ignore[attr-defined]
        proxy.process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(proxy.process.wait(), 60)
    finally:
        await proxy.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_process_starts_before_nats_and_ends_cleanly_on_a_signal(
    tmp_path: Path, number: int
) -> None:
    server = NatsServer(tmp_path)
    proxy = ProxyProcess("early")
    try:
        await proxy.start(server)
        server.start()
        assert proxy.process.stderr is not None
        async with asyncio.timeout(90):
            while b"bus_connected" not in (line := await proxy.process.stderr.readline()):
                assert line
            await proxy.end(number)
        assert proxy.process.returncode == 0
    finally:
        await proxy.kill()
        server.close()
