"""What a hundred open tabs cost, as processor time of the console and of the controller."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import aiohttp
import psutil
import pytest

from tests.browser.conftest import Visit
from tests.support.browser.console_process import ConsoleProcess
from tests.support.browser.models import delete, deploy
from tests.support.stacks.embedded_stack import EmbeddedStack

pytestmark = [pytest.mark.timeout(300), pytest.mark.alone]

TABS = 100
OVER_S = 10.0
CONTROLLER_SHARE = 0.02
CONSOLE_SHARE = 0.25
DEPLOYMENTS = [f"tab-{number}" for number in range(5)]
REQUESTS_PER_S = 20.0


@pytest.fixture(scope="module", autouse=True)
def _something_that_changes(stack: EmbeddedStack) -> Iterator[None]:
    for name in DEPLOYMENTS:
        deploy(stack, name)
    yield
    delete(stack, *DEPLOYMENTS)


def test_a_hundred_tabs_cost_a_quarter_of_a_core(
    visit: Visit, console: ConsoleProcess, stack: EmbeddedStack
) -> None:
    """Beside a load that changes what every row shows."""
    visitor = visit("view")
    [cookie] = [each for each in visitor.context.cookies() if each["name"] == "muster_session"]
    controller = psutil.Process(stack.pid("controller"))
    with ThreadPoolExecutor(1) as thread:
        urls = [f"{stack.record()['http_url']}/{name}" for name in DEPLOYMENTS]
        measured = thread.submit(
            asyncio.run, _measure(console.url, cookie["value"], urls, [console.usage, controller])
        ).result()
    (_, controller_idle), (console_busy, controller_busy), received = measured
    assert min(received) > 0, "every tab received something"
    assert console_busy < CONSOLE_SHARE, measured
    assert controller_busy - controller_idle < CONTROLLER_SHARE, measured


async def _measure(
    url: str, cookie: str, endpoints: list[str], processes: list[psutil.Process]
) -> tuple[list[float], list[float], list[int]]:
    """Shares of a core of each process without tabs and with them, and how many bytes each tab received."""
    received = [0] * TABS
    async with AsyncExitStack() as ending:
        timeout = aiohttp.ClientTimeout(total=None)
        session = await ending.enter_async_context(
            aiohttp.ClientSession(
                cookies={"muster_session": cookie},
                timeout=timeout,
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.CookieJar(unsafe=True),
            )
        )
        tasks = await ending.enter_async_context(asyncio.TaskGroup())
        started = [tasks.create_task(_load(session, endpoint)) for endpoint in endpoints]
        await asyncio.sleep(2.0)
        idle = await _measure_shares(processes)
        started += [
            tasks.create_task(_receive(session, f"{url}/live/now", received, at)) for at in range(TABS)
        ]
        await asyncio.sleep(3.0)
        received[:] = [0] * TABS
        busy = await _measure_shares(processes)
        for task in started:
            task.cancel()
    return idle, busy, received


async def _measure_shares(processes: list[psutil.Process]) -> list[float]:
    def read() -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in processes]

    before, started = read(), time.monotonic()
    await asyncio.sleep(OVER_S)
    seconds = time.monotonic() - started
    return [(now - then) / seconds for now, then in zip(read(), before, strict=True)]


async def _receive(session: aiohttp.ClientSession, url: str, received: list[int], at: int) -> None:
    async with session.get(url) as response:
        assert response.content_type == "text/event-stream", response.status
        async for chunk in response.content.iter_any():
            received[at] += len(chunk)


async def _load(session: aiohttp.ClientSession, url: str) -> None:
    while True:
        async with session.get(url) as response:
            await response.read()
        await asyncio.sleep(len(DEPLOYMENTS) / REQUESTS_PER_S)
