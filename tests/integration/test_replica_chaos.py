"""A whole stack at full load while everything around the requests changes, and while replicas are killed.

This is a short storm; `python -m bench.chaos` takes the whole one.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from bench import chaos, hangs, link_cuts
from bench.chaos import CLIENTS, KINDS
from bench.forwarders import Network
from serve_common.identities.roles import Role
from serve_common.nats.client import connect_nats
from serve_common.runtime.settings import DirectMode
from serve_common.runtime.tasks import TaskOwner
from tests.support.stacks.loaded_stack import NAME, ROUTE, LoadedStack

pytestmark = [pytest.mark.timeout(480), pytest.mark.asyncio(loop_scope="module")]

REQUESTS_PER_S = 550
"""What is asked for; how much of it comes through is the machine's."""
SERVED_MIN = CLIENTS
"""Of each kind, for a storm to count: as if each client had asked once."""
KILLED_FOR_S = 10.0
CUT_REQUESTS = 420
HANG_S = 4.0
SEED = 20_000
REPLICAS = 6
BYSTANDERS = 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def network() -> AsyncIterator[Network]:
    async with Network.running() as network:
        yield network


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory, network: Network) -> AsyncIterator[LoadedStack]:
    # What is large takes links everywhere else too.
    async with LoadedStack.running(
        tmp_path_factory.mktemp("chaos"), DirectMode.ALL, front=network.stand_before_nats
    ) as stack:
        yield stack


async def test_no_request_fails_while_replicas_come_and_go_and_connections_are_cut(
    stack: LoadedStack,
) -> None:
    seen: Counter[str] = Counter()
    tasks = TaskOwner("test")
    tasks.start(_watch_links(stack, seen), "watch_links")
    storm = await chaos.ordered_changes(stack, "changing", rounds=1, requests_per_s=REQUESTS_PER_S)
    await tasks.close(5)
    print(f"most links at once: {dict(seen)}")
    assert min(seen["unix"], seen["tcp"]) >= 1
    print(f"{storm.cuts} connections cut; {storm.load.line()}")
    assert Counter(f"{failure.what}: {failure.answer}" for failure in storm.load.failures) == {}
    assert storm.cuts == 3 * (2 * 2 + chaos.REPLICAS), (
        "of two proxies with two each and of all replicas, three times"
    )
    assert min(storm.load.served[kind] for kind in KINDS) >= SERVED_MIN


async def test_links_and_connections_that_are_cut_at_any_byte_fail_no_request_and_run_none_twice(
    stack: LoadedStack, network: Network, tmp_path: Path
) -> None:
    storm = await link_cuts.storm(stack, network, CUT_REQUESTS, SEED, tmp_path / "runs")
    print(f"seed {SEED}: {storm.line()}")
    assert storm.failures == []
    assert storm.twice == []
    assert storm.served.keys() == set(link_cuts.KINDS)
    assert storm.link_cuts > CUT_REQUESTS / 100, (
        "the links of one host's replicas; those of the other are TCP"
    )
    assert storm.rolls >= 1
    assert storm.nats_cuts >= 1


async def _watch_links(stack: LoadedStack, seen: Counter[str]) -> None:
    """Keep the most direct links of the first proxy at once, by transport."""
    url = f"http://127.0.0.1:{stack.proxy_operations_ports[0]}/metrics?name[]=serve_proxy_direct_links"
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(url) as response:
                page = await response.text()
            for transport, count in re.findall(r'direct_links{transport="(\w+)"} ([0-9.]+)', page):
                seen[transport] = max(seen[transport], int(float(count)))
            await asyncio.sleep(0.2)


async def test_a_hang_of_nats_replaces_no_replica_and_runs_nothing_twice(
    stack: LoadedStack, tmp_path: Path
) -> None:
    hang = await hangs.hang(stack, "hung", HANG_S, tmp_path / "runs", rate=100.0, is_updating=True)
    print(hang.line())
    assert hang.replaced() == ""
    assert hang.twice == []
    assert hang.failed_after(hangs.BACK_WITHIN_S) == []
    assert hang.back_s < float("inf")


async def test_killed_replicas_cost_only_what_may_not_run_twice_and_had_started(stack: LoadedStack) -> None:
    storm = await chaos.killed_replicas(stack, "killed", KILLED_FOR_S, REQUESTS_PER_S, SEED)
    print(f"{len(storm.kills)} kills; {storm.load.line()}")
    assert Counter(f"{failure.kind}: {failure.what}" for failure in storm.load.forbidden) == {}
    assert storm.lost_beyond() == []
    assert len(storm.kills) == KILLED_FOR_S / chaos.KILL_EVERY_S
    assert min(storm.load.served[kind] for kind in KINDS) >= SERVED_MIN


@pytest.mark.parametrize("way", ["http", "call"])
async def test_a_query_of_death_takes_two_replicas_and_the_others_serve_on(
    stack: LoadedStack, way: str
) -> None:
    await stack.deployed("poisoned", REPLICAS)
    before = await _tags_once(stack, lambda tags: len(tags) == REPLICAS)
    url = f"http://127.0.0.1:{stack.http_ports[0]}{ROUTE}?work_s=0.002"
    is_over = asyncio.Event()
    statuses: Counter[int] = Counter()

    async def bystander(session: aiohttp.ClientSession) -> None:
        while not is_over.is_set():
            async with session.get(url) as response:
                await response.read()
                statuses[response.status] += 1

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        bystanders = [group.create_task(bystander(session)) for _ in range(BYSTANDERS)]
        try:
            status, code, message = await (_die_by_http if way == "http" else _die_by_call)(stack, url)
        finally:
            is_over.set()
            await asyncio.gather(*bystanders)
    print(f"{status} {code}: {message}; bystanders {dict(statuses)}")
    assert (status, code) == (502, "lost_twice")
    died = {tag for tag in before if f"{tag}" in message}
    assert len(died) == 2
    left = await _tags_once(stack, died.isdisjoint)
    assert before - left == died, "the query of death took others"
    # A bystander may be lost with both, by chance, and then may not be sent to a third.
    assert statuses[200] >= BYSTANDERS
    assert set(statuses) <= {200, 502}
    assert statuses[502] <= BYSTANDERS


async def _tags_once(stack: LoadedStack, is_so: Callable[[set[str]], bool]) -> set[str]:
    """The tags of all replicas, once they are as expected."""
    async with asyncio.timeout(chaos.CHANGE_LIMIT_S):
        while True:
            tags: set[str] = {view.replica_tag for view in await stack.replicas()}
            if is_so(tags):
                return tags
            await asyncio.sleep(0.05)


async def _die_by_http(_stack: LoadedStack, url: str) -> tuple[int, str, str]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}&die=1") as response:
        problem = await response.json(content_type=None)
    return response.status, problem["code"], problem["detail"]


async def _die_by_call(stack: LoadedStack, _url: str) -> tuple[int, str, str]:
    client = await connect_nats(stack.settings(Role.CLIENT), name="test", deadline_s=20.0)
    try:
        headers = {"Idempotency-Key": "poison", "Content-Type": "application/octet-stream"}
        reply = await client.request(f"serve.call.{NAME}", b"die", timeout=60, headers=headers)
    finally:
        await client.close()
    problem = msgspec.json.decode(reply.data)
    return problem["status"], problem["code"], problem["detail"]
