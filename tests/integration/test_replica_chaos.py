"""A whole stack at full load while everything around the requests changes, and while replicas are killed.

This is a short storm; `python -m tests.bench.chaos` takes the whole one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.integration import chaos
from tests.integration.chaos_load import CLIENTS, KINDS
from tests.integration.loaded_stack import LoadedStack

pytestmark = [
    pytest.mark.alone,
    pytest.mark.integration,
    pytest.mark.timeout(480),
    pytest.mark.asyncio(loop_scope="module"),
]

REQUESTS_PER_S = 550
"""What is asked for; how much of it comes through is the machine's."""
SERVED_MIN = CLIENTS
"""Of each kind, for a storm to count: as if each client had asked once."""
KILLED_FOR_S = 10.0
SEED = 20_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LoadedStack]:
    async with LoadedStack.running(tmp_path_factory.mktemp("chaos")) as stack:
        yield stack


async def test_no_request_fails_while_replicas_come_and_go_and_connections_are_cut(
    stack: LoadedStack,
) -> None:
    storm = await chaos.ordered_changes(stack, "changing", rounds=1, requests_per_s=REQUESTS_PER_S)
    print(f"{storm.cuts} connections cut; {storm.load.line()}")
    assert Counter(f"{failure.what}: {failure.answer}" for failure in storm.load.failures) == {}
    assert storm.cuts == 3 * (2 * 2 + chaos.REPLICAS), (
        "of two proxies with two each and of all replicas, three times"
    )
    assert min(storm.load.served[kind] for kind in KINDS) >= SERVED_MIN


async def test_killed_replicas_cost_only_what_may_not_run_twice_and_had_started(stack: LoadedStack) -> None:
    storm = await chaos.killed_replicas(stack, "killed", KILLED_FOR_S, REQUESTS_PER_S, SEED)
    print(f"{len(storm.kills)} kills; {storm.load.line()}")
    assert Counter(f"{failure.kind}: {failure.what}" for failure in storm.load.forbidden) == {}
    assert storm.lost_beyond() == []
    assert len(storm.kills) == KILLED_FOR_S / chaos.KILL_EVERY_S
    assert min(storm.load.served[kind] for kind in KINDS) >= SERVED_MIN
