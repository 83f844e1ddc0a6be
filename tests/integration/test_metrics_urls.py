"""Where services say that they can be scraped: there is their page, and it says who they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from serve_common.protocol.reports import ProxyReport
from tests.integration.proxy_stack import NatsServer, Stack, running_stack
from tests.integration.test_proxy_processes import ProxyProcesses

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path)
    server.start()
    yield server
    server.close()


@pytest.fixture
async def stack(server: NatsServer) -> AsyncIterator[Stack]:
    async with running_stack(server) as stack:
        await stack.create_bucket()
        yield stack


async def page(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        assert answer.status == 200
        return await answer.text()


def all_shown(shown: str, names: set[str]) -> bool:
    return all(f'proxy_id="{name}"' in shown for name in names)


async def test_a_proxy_reports_the_address_of_its_page(stack: Stack) -> None:
    report: ProxyReport = await stack.report(lambda report: report.metrics_url)
    assert report.metrics_url == f"http://127.0.0.1:{stack.proxy.operations.port}/metrics"
    assert 'serve_proxy_info{proxy_id="p1"} 1.0' in await page(report.metrics_url)


async def test_proxies_of_one_parent_report_the_page_that_shows_them_all(
    server: NatsServer, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On all addresses, so that each of them has to find out under which one NATS knows it.
    monkeypatch.setenv("MUSTER_OPS_HOST", "0.0.0.0")
    processes = ProxyProcesses()
    try:
        await processes.start(server)
        [line] = await processes.until_logged("proxy_processes_run")
        names = set()
        while len(names) < 2:
            report = await stack.report(
                lambda report: report.proxy_id not in {"p1", *names} and report.metrics_url
            )
            assert report.metrics_url == f"http://127.0.0.1:{line['operations_port']}/metrics"
            names.add(report.proxy_id)
        async with asyncio.timeout(30):
            # Of a process that does not answer its parent in time the page shows nothing.
            while not all_shown(await page(report.metrics_url), names):  # noqa: ASYNC110 - a page tells nobody
                await asyncio.sleep(0.05)
    finally:
        await processes.close()
