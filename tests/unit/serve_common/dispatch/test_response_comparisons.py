"""Responses to copies are compared with the caller's: limited, later, and only where a rollout wants it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from serve_common.dispatch import response_comparisons
from serve_common.dispatch.response_comparisons import ResponseComparisons
from serve_common.dispatch.shadows import Shadows
from serve_common.names import BackendTag, EndpointTag, GoalId, ReplicaTag
from serve_common.protocol.frames import BodyHead, CancelHead, ErrorHead, RequestHead, ResponseHead
from serve_common.protocol.snapshots import BackendSnapshot, EndpointSnapshot, ShadowComparison
from serve_common.protocol.subjects import backend_key
from serve_common.replay.varying_paths import WARM_UP
from tests.support.proxy_world import BACKEND, R0, World, emptied

CANARY, BASELINE = BackendTag("d/a--canary"), BackendTag("d/a--baseline")
ROLLOUT, NONE = GoalId("g1"), GoalId("")
OK = ResponseHead(200, [(b"content-type", b"application/json")], True, 0)


class ComparingWorld(World):
    """A deployment with a canary and a baseline that get copies, all of which are judged."""

    def __init__(self) -> None:
        super().__init__(limit=1000, queue=1000)
        loop = asyncio.get_running_loop()
        self.comparisons = ResponseComparisons(self.routes.routers, loop.time)
        self.shadows = Shadows(self.dispatcher, lambda: self.chance, loop.time, self.comparisons)
        self.shadows.start()
        for tag in (BACKEND, CANARY, BASELINE):
            self.put_judged(tag)
        self.put_endpoint(self.endpoint())

    def endpoint(self, *, is_compared: bool = True) -> EndpointSnapshot:
        rule = ShadowComparison(own=BACKEND, canary=CANARY, baseline=BASELINE)
        return EndpointSnapshot(
            endpoint_tag=EndpointTag("d/a"),
            route="/a",
            methods=["GET"],
            traffic={BACKEND: 1.0},
            shadows={CANARY: 0.5, BASELINE: 0.5},
            comparisons=[rule] if is_compared else [],
        )

    def put_judged(self, tag: BackendTag, *, rollout_id: GoalId = ROLLOUT) -> None:
        replica = R0 if tag == BACKEND else ReplicaTag(f"{tag}#0")
        content = BackendSnapshot(
            backend_tag=tag,
            replicas=[replica],
            draining=[],
            max_concurrent_queries=1000,
            max_queued_requests=1000,
            rollout_id=rollout_id,
        )
        self._publish(backend_key(tag), content)

    async def _query(self, ask):
        pending = self.shadows.copy(ask)
        try:
            call, response = await self.dispatcher.send(ask)
        except BaseException:
            if pending is not None:
                pending.drop()
            raise
        if pending is not None:
            pending.add_response(call, response)
        return call, response

    async def start(self) -> dict[str, bytes]:
        """Reply subjects of a new request and its copies, by name."""
        await self.ask()
        replies = {"own": b"", "canary": b"", "baseline": b""}
        while self.bus.sent:
            subject, reply, head, _ = self.bus.sent.pop(0)
            assert type(head) is RequestHead
            replies[next((name for name in ("canary", "baseline") if name in subject), "own")] = reply
        assert all(replies.values()), replies
        return replies

    async def compare(self, own: object = 1, canary: object = 1, baseline: object = 1) -> None:
        replies = await self.start()
        for reply, value in zip(replies.values(), (own, canary, baseline), strict=True):
            self.answer(reply, OK, json.dumps({"label": value}).encode())
        await self.compared()

    async def compared(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        self.now += 1.0  # comparisons pause
        for _ in range(20):
            await asyncio.sleep(0)

    def counts(self, tag: BackendTag = CANARY) -> tuple[int, int]:
        counts = self.routes.request_counts()[tag]
        return counts.compared, counts.different


@pytest.fixture
async def world() -> AsyncIterator[ComparingWorld]:
    world = ComparingWorld()
    async with emptied(world):
        for _ in range(WARM_UP):
            await world.compare()
        yield world
    await world.shadows.close(1.0)


async def test_differing_responses_are_counted_of_canary_and_baseline(world: ComparingWorld) -> None:
    assert world.counts() == world.counts(BASELINE) == (0, 0), "the first ones teach only"
    await world.compare()
    await world.compare(canary=2)
    assert (world.counts(), world.counts(BASELINE)) == ((2, 1), (2, 0))
    assert world.shadows.get_differences() == {CANARY: ["$.label: 2 instead of 1"]}
    await world.compare(baseline=2)
    assert (world.counts(), world.counts(BASELINE)) == ((3, 1), (3, 1))
    assert not len(world.comparisons)


async def test_both_get_copies_of_the_same_requests_in_a_random_order(world: ComparingWorld) -> None:
    draws = [0.4, 0.4, 0.4, 0.9, 0.6, 0.0]
    world.shadows._rng = lambda: draws.pop(0)
    for first in ("canary", "baseline"):
        await world.ask()
        subjects = [world.bus.sent[at][0] for at in range(3)]
        assert first in subjects[1], subjects
        for _ in range(3):
            world.serve()
    await world.ask()
    world.serve()
    assert not world.bus.sent, "neither of them"
    await world.compared()


async def test_the_order_of_responses_does_not_matter(world: ComparingWorld) -> None:
    replies = await world.start()
    for name in ("canary", "baseline", "own"):
        world.answer(replies[name], OK, b'{"label": 2}' if name == "canary" else b'{"label": 1}')
        await asyncio.sleep(0)
    await world.compared()
    assert world.counts() == (1, 1)


async def test_a_copy_that_fails_differs_and_one_without_a_response_is_not_compared(
    world: ComparingWorld,
) -> None:
    replies = await world.start()
    world.answer(replies["own"], OK, b'{"label": 1}')
    world.answer(replies["baseline"], OK, b'{"label": 1}')
    world.answer(replies["canary"], ErrorHead("user_code_raised", 500, "ValueError", 0))
    await world.compared()
    assert world.counts() == (1, 1)
    replies = await world.start()
    world.answer(replies["own"], OK, b'{"label": 1}')
    world.answer(replies["baseline"], OK, b'{"label": 1}')
    world.look(60.0)
    await world.compared()
    assert world.take(CancelHead)[1] == replies["canary"]
    assert world.counts() == (1, 1)
    assert not len(world.comparisons)


async def test_a_callers_response_in_pieces_is_not_compared_and_a_copys_differs(
    world: ComparingWorld,
) -> None:
    for streamed, counted in (("own", (0, 0)), ("canary", (1, 1))):
        task = len(world.tasks)
        replies = await world.start()
        for name, reply in replies.items():
            if name != streamed:
                world.answer(reply, OK, b'{"label": 1}')
        world.answer(replies[streamed], ResponseHead(200, [], False, 0), b"0")
        world.answer(replies[streamed], BodyHead(1, True), b"1")
        await world.compared()
        _, response = await world.tasks[task]
        if response.stream is not None:
            while await response.stream.read() is not None:
                pass
        world.bus.sent.clear()  # credit
        assert world.counts() == counted
        assert not len(world.comparisons)


async def test_a_caller_that_leaves_or_fails_ends_its_comparison(world: ComparingWorld) -> None:
    replies = await world.start()
    world.answer(replies["own"], ErrorHead("user_code_raised", 500, "ValueError", 0))
    await asyncio.wait([world.tasks.pop()])
    for name in ("canary", "baseline"):
        world.answer(replies[name], OK, b"{}")
    await world.compared()
    assert world.counts() == (0, 0)
    assert not len(world.comparisons)


async def test_what_waits_is_limited_and_what_is_over_makes_space(
    world: ComparingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_comparisons, "PENDING_MAX", 2)
    replies = [await world.start() for _ in range(3)]
    assert len(world.comparisons) == 2
    monkeypatch.setattr(response_comparisons, "PENDING_BYTES_MAX", 30)
    world.answer(replies[0]["own"], OK, b'"twenty bytes of JSON"')
    world.answer(replies[1]["own"], OK, b'"twenty bytes of JSON"')
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(world.comparisons) == 1, "there was no space for the second one"
    for each in replies:
        for reply in each.values():
            world.ok(reply)
    await world.compared()
    assert not len(world.comparisons)
    spec = world.make_ask(timeout_s=5.0)
    abandoned = [world.comparisons.start_request(spec) for _ in range(2)]
    assert None not in abandoned
    assert world.comparisons.start_request(spec) is None
    world.now += 6.0
    assert world.comparisons.start_request(spec) is not None
    for pending in list(world.comparisons._pending):
        pending.drop()


async def test_only_so_many_are_compared_in_a_second(world: ComparingWorld) -> None:
    world.now += 10.0
    started = [world.comparisons.start_request(world.make_ask()) for _ in range(60)]
    assert sum(pending is not None for pending in started) == response_comparisons.COMPARISONS_PER_S_MAX
    for pending in started:
        if pending is not None:
            pending.drop()


async def test_another_rollout_learns_anew_and_without_one_nothing_is_compared(world: ComparingWorld) -> None:
    world.put_judged(CANARY, rollout_id=NONE)
    await world.compare(canary=2)
    assert CANARY not in world.routes.request_counts()
    assert world.shadows.get_differences() == {}
    world.put_judged(CANARY)
    await world.compare(canary=2)
    assert world.counts() == (0, 0), "it is in its warm-up"
    world.put_endpoint(world.endpoint(is_compared=False))
    await world.compare(canary=2)
    assert not len(world.comparisons)


async def test_large_bodies_are_compared_in_a_thread(
    world: ComparingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_comparisons, "THREAD_BYTES_MIN", 1)
    await world.compare(canary=2)
    for _ in range(100):
        if world.counts() == (1, 1):
            return
        await asyncio.sleep(0.01)
        world.now += 1.0
    raise AssertionError(world.counts())
