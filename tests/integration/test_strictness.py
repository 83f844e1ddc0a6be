"""One replica that takes one request at a time, and three proxies that know nothing of each other.

`max_concurrent_queries` guards what cannot be shared (a GPU's memory, a model that is not thread-safe), so it is a
promise and no aim: user code must not once see two requests at the same time.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from tests.support.paths import APPS
from tests.support.stacks.bare_stack import BareStack

pytestmark = [pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

APP_DIR = APPS / "proof_app"
TAG = "default/alone"
PROXIES = 3
CLIENTS_OF_EACH = 8
REQUESTS = 2000
WORK_S = 0.001
PATIENCE = aiohttp.ClientTimeout(total=120)
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
    """What the clients of one proxy went through.

    Waits are counted in requests that the replica began meanwhile, not in seconds: how fast a machine is, or whether
    all of it stood still for a moment, makes no difference to who is preferred.
    """

    def __init__(self) -> None:
        self.overtaken: list[int] = []
        """For each request, how many others were begun after it was sent and before it was."""
        self.most_at_once = 0


class Asking:
    """What all clients share."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._left = REQUESTS
        self._begun = 0
        """By the replica, as far as is known."""

    async def ask_on(self, url: str, waits: Waits) -> None:
        """Until none is left to be asked; each request is sent once, and must be answered."""
        while self._left > 0:
            self._left -= 1
            begun_before = self._begun
            async with self._session.post(url, params={"work_s": str(WORK_S)}) as response:
                assert response.status == 200, await response.text()
                told = await response.json()
            self._begun = max(self._begun, told["number"])
            waits.overtaken.append(told["number"] - 1 - begun_before)
            waits.most_at_once = max(waits.most_at_once, told["most_at_once"])


async def test_three_proxies_never_give_a_replica_two_requests_at_once_and_share_it(stack: BareStack) -> None:
    waits = [Waits() for _ in range(PROXIES)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=PATIENCE) as session:
        asking = Asking(session)
        async with asyncio.TaskGroup() as tasks:
            for proxy, of_proxy in zip(stack.proxies, waits, strict=True):
                for _ in range(CLIENTS_OF_EACH):
                    tasks.create_task(asking.ask_on(f"{proxy.url}/alone", of_proxy))
        async with session.get(f"{stack.proxies[0].url}/alone") as response:
            told = await response.json()
    shares = [len(of_proxy.overtaken) / REQUESTS for of_proxy in waits]
    medians = [statistics.median(of_proxy.overtaken) for of_proxy in waits]
    longest = max(max(of_proxy.overtaken) for of_proxy in waits)
    print(
        f"shares {', '.join(f'{share:.0%}' for share in shares)}; "
        f"median waits {', '.join(f'{median:.0f}' for median in medians)} requests, longest {longest}"
    )
    assert max(of_proxy.most_at_once for of_proxy in waits) == told["most_at_once"] == 1
    assert told["served"] == REQUESTS + 1, "each ran once"
    assert min(shares) >= SHARE_MIN / PROXIES, "a proxy's clients got far less than their part"
    assert max(medians) <= 3 * min(medians), "the clients of one proxy waited much longer than others"
    assert longest <= REQUESTS / 2, "somebody waited while half of all others were served"


async def test_a_replica_that_is_shared_is_free_for_all_again_afterwards(stack: BareStack) -> None:
    async with asyncio.timeout(30):
        while True:
            looks = await asyncio.gather(*(runner.look() for runner in stack.runners))
            if not any(look.get(what) for look in looks for what in ("slots", "queued", "calls")):
                break
            await asyncio.sleep(0.05)  # a proxy has answered a moment before it has put everything away
