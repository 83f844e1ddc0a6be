"""What a router counts of a backend that takes part in a rollout: each request once, by what its caller got."""

from __future__ import annotations

import asyncio

import pytest

from serve_common.errors import ServeError
from serve_common.names import GoalId
from serve_common.protocol.frames import ErrorHead, RequestHead, ResponseHead
from serve_common.protocol.reports import RequestCounts
from serve_common.protocol.snapshots import BackendSnapshot
from serve_common.protocol.subjects import backend_key
from serve_common.routing.request_counts import (
    BUCKETS_MAX,
    BUCKETS_PER_OCTAVE,
    get_bucket,
    get_bucket_start_s,
)
from tests.support.proxy_world import BACKEND, R0, TIMEOUT_S, World, emptied, failure


@pytest.fixture
async def world():
    async with emptied(World()) as world:
        put(world)
        yield world


FIRST, SECOND, NONE = GoalId("g1"), GoalId("g2"), GoalId("")


def put(world: World, rollout_id: GoalId = FIRST) -> None:
    content = BackendSnapshot(
        backend_tag=BACKEND,
        replicas=[R0],
        draining=[],
        max_concurrent_queries=4,
        max_queued_requests=0,
        rollout_id=rollout_id,
    )
    world._publish(backend_key(BACKEND), content)


def counts(world: World) -> RequestCounts:
    return world.routes.request_counts()[BACKEND]


async def answered(world: World, status: int, after_s: float = 0.0) -> None:
    task = await world.ask()
    reply = world.take(RequestHead)[1]
    world.now += after_s
    world.answer(reply, ResponseHead(status, [], True, 0), b"ok")
    await task


async def test_answers_count_by_status_and_time(world: World) -> None:
    await answered(world, 200, 0.1)
    await answered(world, 302, 0.1)
    await answered(world, 404, 0.2)
    await answered(world, 500, 0.3)
    assert counts(world) == RequestCounts(
        rollout_id=FIRST,
        successes=2,
        client_errors=1,
        errors=1,
        times={get_bucket(0.1): 2, get_bucket(0.2): 1},
    )


async def test_what_user_code_raises_and_what_has_no_room_are_errors(world: World) -> None:
    task = await world.ask()
    world.answer(world.take(RequestHead)[1], ErrorHead("user_code_raised", 500, "no", 0))
    await failure(task)
    assert counts(world).errors == 1
    busy = [await world.ask() for _ in range(5)]
    await failure(busy[-1])
    assert counts(world).errors == 2, "the queue is full, and its callers get 503"
    for _ in range(4):
        world.serve()
    await asyncio.wait(busy)
    assert counts(world).successes == 4


async def test_a_deadline_that_passes_is_an_error(world: World) -> None:
    task = await world.ask()
    world.take(RequestHead)
    world.look(TIMEOUT_S)
    await failure(task)
    world.bus.sent.clear()
    assert (counts(world).errors, counts(world).times) == (1, {})


async def test_a_client_that_leaves_has_measured_how_long_it_took(world: World) -> None:
    task = await world.ask()
    world.take(RequestHead)
    world.now += 5.0
    task.cancel()
    await asyncio.wait([task])
    world.bus.sent.clear()
    assert counts(world) == RequestCounts(rollout_id=FIRST, times={get_bucket(5.0): 1})


async def test_a_stream_counts_at_its_end_and_one_that_breaks_off_is_an_error(world: World) -> None:
    reply, _, answer = await world.stream()
    assert counts(world) == RequestCounts(rollout_id=FIRST)
    world.now += 2.0
    world.answer(reply, ErrorHead("user_code_raised", 500, "no", 0))
    assert answer.stream is not None
    assert await answer.stream.read() == b"0"
    with pytest.raises(ServeError, match="no"):
        await answer.stream.read()
    world.bus.sent.clear()
    assert counts(world).errors == 1


async def test_a_backend_that_is_judged_no_longer_is_counted_no_longer(world: World) -> None:
    await answered(world, 200)
    put(world)
    await answered(world, 200)
    assert counts(world).successes == 2, "a new snapshot does not begin anew"
    put(world, NONE)
    await answered(world, 200)
    assert world.routes.request_counts() == {}


async def test_another_rollout_begins_anew(world: World) -> None:
    await answered(world, 500)
    task = await world.ask()
    reply = world.take(RequestHead)[1]
    put(world, SECOND)
    assert counts(world) == RequestCounts(rollout_id=SECOND)
    world.answer(reply, ResponseHead(500, [], True, 0), b"late")
    await task
    assert counts(world).errors == 0, "it began for the rollout before"
    await answered(world, 200)
    assert counts(world).successes == 1


def test_buckets_are_nine_percent_wide_and_have_an_end() -> None:
    for bucket in range(1, BUCKETS_MAX):
        start_s = get_bucket_start_s(bucket)
        assert get_bucket(start_s * 1.001) == bucket
        assert get_bucket(start_s * 0.999) == bucket - 1
        assert get_bucket_start_s(bucket + 1) / start_s == pytest.approx(2 ** (1 / BUCKETS_PER_OCTAVE))
    assert get_bucket(0.0) == get_bucket(-1.0) == 0
    assert get_bucket(1e9) == BUCKETS_MAX
