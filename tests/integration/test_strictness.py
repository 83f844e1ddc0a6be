"""One replica that takes one request at a time, and three proxies that know nothing of each other.

`max_concurrent_queries` guards what cannot be shared (a GPU's memory, a model that is not thread-safe), so it is a
promise and no aim: user code must not once see two requests at the same time.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from tests.integration.bare_stack import BareStack

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

APP_DIR = Path(__file__).with_name("proof_app")
TAG = "default/alone"
PROXIES = 3
CLIENTS_OF_EACH = 8
REQUESTS = 2000
WORK_S = 0.001
SHARE_MIN = 1 / 2
"""Of an equal part, for the clients of each proxy: these know nothing of each other, so it is never quite equal."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[BareStack]:
    async with BareStack.running(tmp_path_factory.mktemp("strict")) as stack:
        await asyncio.gather(
            stack.add_proxies(PROXIES),
            stack.add_replica(
                f"{TAG}#0", "proof_models:Alone", app_dir=str(APP_DIR), max_concurrent_queries=1
            ),
        )
        await stack.put_endpoint(TAG, "/alone")
        await stack.put_backend(TAG, [f"{TAG}#0"], limit=1)
        yield stack


class Waits:
    """What the clients of one proxy went through."""

    def __init__(self) -> None:
        self.each_s: list[float] = []
        self.most_at_once = 0


async def ask_on(session: aiohttp.ClientSession, url: str, left: list[int], waits: Waits) -> None:
    """Until none is left to be asked; each request is sent once, and must be answered."""
    loop = asyncio.get_running_loop()
    while left[0] > 0:
        left[0] -= 1
        began = loop.time()
        async with session.post(url, params={"work_s": str(WORK_S)}) as response:
            assert response.status == 200, await response.text()
            told = await response.json()
        waits.each_s.append(loop.time() - began)
        waits.most_at_once = max(waits.most_at_once, told["most_at_once"])


async def test_three_proxies_never_give_a_replica_two_requests_at_once_and_share_it(stack: BareStack) -> None:
    left = [REQUESTS]
    waits = [Waits() for _ in range(PROXIES)]
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        async with asyncio.TaskGroup() as tasks:
            for proxy, of_proxy in zip(stack.proxies, waits, strict=True):
                for _ in range(CLIENTS_OF_EACH):
                    tasks.create_task(ask_on(session, f"{proxy.url}/alone", left, of_proxy))
        taken_s = loop.time() - began
        async with session.get(f"{stack.proxies[0].url}/alone") as response:
            told = await response.json()
    shares = [len(of_proxy.each_s) / REQUESTS for of_proxy in waits]
    medians_s = [statistics.median(of_proxy.each_s) for of_proxy in waits]
    longest_s = max(max(of_proxy.each_s) for of_proxy in waits)
    print(
        f"{REQUESTS} requests in {taken_s:.1f} s; shares {', '.join(f'{share:.0%}' for share in shares)}; "
        f"median waits {', '.join(f'{wait_s * 1000:.0f}' for wait_s in medians_s)} ms, "
        f"longest {longest_s * 1000:.0f} ms"
    )
    assert told["most_at_once"] == 1
    assert told["served"] == REQUESTS + 1, "each ran once"
    assert min(shares) >= SHARE_MIN / PROXIES, "a proxy's clients got far less than their part"
    assert max(medians_s) <= 3 * min(medians_s), "the clients of one proxy waited much longer than others"
    assert longest_s <= taken_s / 4, "somebody waited while a quarter of all others were served"


async def test_a_replica_that_is_shared_is_free_for_all_again_afterwards(stack: BareStack) -> None:
    looks = await asyncio.gather(*(runner.look() for runner in stack.runners))
    assert [look["slots"] for look in looks] == [0] * len(looks)
    assert all(look["queued"] == look["calls"] == 0 for look in looks if "queued" in look)
