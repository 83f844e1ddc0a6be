"""A new version's answers are compared with the old one's, in a shadow step of a real rollout."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
import pytest_asyncio

from serve_common.api.commands import Deploy, SetCapture, StartRollout
from serve_common.api.queries import GetRollouts
from serve_common.api.views import GoalStatus, GoalView
from serve_common.config.backend import BackendConfig, RayActorOptions, ReplicaConfig
from serve_common.config.rollout import RolloutConfig
from tests.support.paths import APPS
from tests.support.stacks.loaded_stack import LoadedStack

pytestmark = [pytest.mark.timeout(480), pytest.mark.asyncio(loop_scope="module")]

RATE = 80.0
DECIDED_WITHIN_S = 150.0
NAME = "labels"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LoadedStack]:
    async with LoadedStack.running(tmp_path_factory.mktemp("differences")) as stack:
        yield stack


@asynccontextmanager
async def under_load(stack: LoadedStack) -> AsyncIterator[Counter[bool]]:
    """Requests at a steady rate to both proxies; counts the answers by whether they were right."""
    seen: Counter[bool] = Counter()
    urls = [f"http://127.0.0.1:{port}/{NAME}" for port in stack.http_ports]

    async def request(session: aiohttp.ClientSession, number: int) -> None:
        async with session.get(urls[number % len(urls)], params={"number": number}) as response:
            seen[response.status == 200 and (await response.json())["label"] == number % 10] += 1

    async def send(session: aiohttp.ClientSession, requests: asyncio.TaskGroup) -> None:
        began, sent = time.monotonic(), 0
        while True:
            while sent < (time.monotonic() - began) * RATE:
                requests.create_task(request(session, sent))
                sent += 1
            await asyncio.sleep(0.004)

    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as requests:
        sending = requests.create_task(send(session, requests))
        try:
            yield seen
        finally:
            sending.cancel()


async def deployed(stack: LoadedStack) -> None:
    """The old version, anew: whatever a test left."""
    config = ReplicaConfig(
        import_path="differing_model:Labels",
        app_dir=str(APPS / "rollout_app"),
        ray_actor_options=RayActorOptions(num_cpus=0.5),
    )
    deploy = Deploy(
        name=NAME,
        replica_config=config,
        backend_config=BackendConfig(num_replicas=2),
        route_prefix=f"/{NAME}",
    )
    await stack.done(await stack.admin.call(deploy))


async def rolled_out(
    stack: LoadedStack, *, wrong: float, steps: tuple[str, ...] = ("shadow 100%", "100%"), **fields: bool
) -> GoalView:
    """The end of a rollout of a version of which this share of the answers is wrong."""
    # Times on a busy machine vary widely, and from host to host: wide limits, and strong evidence only.
    config = RolloutConfig(
        steps=steps,
        max_difference_increase=0.01,
        max_latency_ratio=3.0,
        false_abort_probability=1e-5,
        **fields,
    )
    reply = await stack.admin.call(
        StartRollout(
            name=NAME,
            version="new",
            replica_config={"init_kwargs": {"wrong": wrong}},
            rollout=config,
            again=True,
        )
    )
    assert reply.goal_id is not None
    return await stack.admin.wait_for_goal(reply.goal_id, deadline_s=DECIDED_WITHIN_S)


async def test_wrong_answers_that_look_right_are_found_and_reach_nobody(stack: LoadedStack) -> None:
    await deployed(stack)
    async with under_load(stack) as seen:
        goal = await rolled_out(stack, wrong=0.05)
    assert seen.keys() == {True}, seen
    [view] = await stack.admin.call(GetRollouts(name=NAME))
    print(f"{goal.error}; {view.differences}")
    assert goal.status is GoalStatus.FAILED
    assert goal.error.startswith("differences: ")
    assert view.passed == []
    assert view.differences is not None
    assert view.differences.baseline_different <= view.differences.compared / 100
    assert {text.partition(":")[0] for text in view.differences.examples} == {"$.label", "$.scores[*].label"}


async def test_an_equal_version_with_random_ids_passes(stack: LoadedStack) -> None:
    await deployed(stack)
    async with under_load(stack) as seen:
        goal = await rolled_out(stack, wrong=0.0)
    assert seen.keys() == {True}, seen
    [view] = await stack.admin.call(GetRollouts(name=NAME))
    print(f"{view.passed}; {view.differences}")
    assert goal.status is GoalStatus.SUCCEEDED, goal.error
    assert "differences: 0 of " in view.passed[0].why


async def test_captured_requests_decide_where_none_come_by_themselves(stack: LoadedStack) -> None:
    await deployed(stack)
    await stack.done(await stack.admin.call(SetCapture(endpoint=NAME, share=1.0)))
    async with under_load(stack) as seen:
        await asyncio.sleep(5)
    assert seen[True] > 200
    goal = await rolled_out(stack, wrong=0.3, steps=("shadow 10%", "100%"), replays_captures=True)
    [view] = await stack.admin.call(GetRollouts(name=NAME))
    print(f"{goal.error}; {view.differences}")
    assert goal.status is GoalStatus.FAILED
    assert goal.error.startswith("differences: ")
