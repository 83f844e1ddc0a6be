"""Requests and their endpoint's traffic policy: several backends, and what waits while the policy changes."""

from __future__ import annotations

import asyncio

import pytest

from serve_common.errors import NoReplicaAvailable
from serve_common.names import BackendTag, ReplicaTag
from serve_common.protocol.frames import RequestHead
from serve_common.routing.router import Router
from tests.unit.proxy_world import BACKEND, R0, TIMEOUT_S, World, failure

NEW = BackendTag("d/new")
N0 = ReplicaTag("d/new#7")


@pytest.fixture
async def world():
    world = World()
    yield world
    for task in world.tasks:
        assert task.done(), "a handler still waits"
    world.assert_nothing_is_left()


async def test_each_request_goes_by_its_own_draw(world: World) -> None:
    world.put(N0, backend=NEW)
    world.put_traffic({BACKEND: 0.75, NEW: 0.25})
    for chance, ordinal in ((0.0, "0"), (0.74, "0"), (0.76, "7"), (0.99, "7")):
        world.chance = chance
        task = await world.ask()
        replica, reply, _, _ = world.take(RequestHead)
        assert replica == ordinal
        world.ok(reply)
        await task


async def test_what_waits_for_a_backend_that_lost_all_traffic_goes_to_the_new_one_in_order(
    world: World,
) -> None:
    world.limit = 2
    world.put(R0)
    held = [await world.ask(repeatable=False) for _ in range(2)]
    replies = [world.take(RequestHead)[1] for _ in held]
    waiting = [await world.ask(b"%d" % i, repeatable=False, timeout_s=TIMEOUT_S - i) for i in range(3)]
    world.put(N0, backend=NEW)
    assert not world.bus.sent
    world.put_traffic({NEW: 1.0})
    moved = [world.take(RequestHead) for _ in range(2)]
    assert {replica for replica, *_ in moved} == {"7"}
    assert not world.bus.sent
    for _, reply, _, _ in moved:
        world.ok(reply)
    replica, reply, _, _ = world.take(RequestHead)
    assert replica == "7"
    world.ok(reply)
    for reply in replies:  # what the old one had begun, it answers
        world.ok(reply)
    await asyncio.gather(*held, *waiting)


async def test_a_shift_fails_nobody_although_the_new_queue_is_shorter(world: World) -> None:
    world.limit, world.queue = 1, 10
    world.put(R0)
    held = await world.ask()
    reply = world.take(RequestHead)[1]
    waiting = [await world.ask() for _ in range(5)]
    world.queue = 1
    world.put(backend=NEW)  # no replica yet
    world.put_traffic({NEW: 1.0})
    assert not any(task.done() for task in waiting)
    assert isinstance(await failure(await world.ask()), NoReplicaAvailable)  # new ones meet the limit
    world.put(N0, backend=NEW)
    for _ in waiting:
        world.ok(world.take(RequestHead)[1])
    world.ok(reply)
    await asyncio.gather(held, *waiting)


async def test_what_waits_stays_while_its_backend_keeps_a_share(world: World) -> None:
    held, waiting = await world.ask(), await world.ask()
    reply = world.take(RequestHead)[1]
    world.put(N0, backend=NEW)
    world.put_traffic({BACKEND: 0.01, NEW: 0.99})
    assert not world.bus.sent
    world.ok(reply)
    world.ok(world.take(RequestHead)[1])
    await asyncio.gather(held, waiting)


async def test_a_backend_without_replicas_keeps_its_share_waiting_until_one_comes(world: World) -> None:
    world.put(backend=NEW)
    world.put_traffic({BACKEND: 0.5, NEW: 0.5})
    world.chance = 0.9
    waiting = await world.ask()
    assert not world.bus.sent
    world.chance = 0.1
    served = await world.ask()
    world.ok(world.take(RequestHead)[1])
    await served
    world.put(N0, backend=NEW)
    world.ok(world.take(RequestHead)[1])
    await waiting


async def test_a_backend_that_was_not_heard_of_yet_keeps_its_share_waiting(world: World) -> None:
    world.put_traffic({NEW: 1.0})
    waiting = await world.ask()
    world.look(0.1)
    assert not waiting.done()
    world.put(N0, backend=NEW)
    world.ok(world.take(RequestHead)[1])
    await waiting


async def test_a_backend_that_is_gone_leaves_its_share_to_the_others(world: World) -> None:
    world.put(N0, backend=NEW)
    world.put_traffic({BACKEND: 0.5, NEW: 0.5})
    held, waiting = await world.ask(), await world.ask()
    reply = world.take(RequestHead)[1]
    world.ok(reply)
    reply = world.take(RequestHead)[1]
    world.ok(reply)
    await asyncio.gather(held, waiting)
    world.drop_backend()
    for chance in (0.0, 0.9):
        world.chance = chance
        task = await world.ask()
        replica, reply, _, _ = world.take(RequestHead)
        assert replica == "7"
        world.ok(reply)
        await task
    world.drop_backend(NEW)
    assert isinstance(await failure(await world.ask()), NoReplicaAvailable)


async def test_who_waits_for_a_backend_that_goes_away_is_served_by_another(world: World) -> None:
    world.put(N0, backend=NEW)
    world.put_traffic({BACKEND: 0.5, NEW: 0.5})
    held, waiting = await world.ask(), await world.ask()
    assert world.take(RequestHead)[0] == "0"
    world.drop_backend()
    world.bus.sent = [frame for frame in world.bus.sent if type(frame[2]) is RequestHead]
    for _ in range(2):  # the one in flight may run twice
        replica, reply, _, _ = world.take(RequestHead)
        assert replica == "7"
        world.ok(reply)
    await asyncio.gather(held, waiting)


async def test_a_policy_without_any_backend_is_told_at_once(world: World) -> None:
    held, waiting = await world.ask(), await world.ask()
    reply = world.take(RequestHead)[1]
    world.put_traffic({BACKEND: 0.0})
    assert isinstance(await failure(waiting), NoReplicaAvailable)
    world.ok(reply)
    await held


async def test_what_cannot_be_applied_is_not_reported_as_applied_and_stops_no_other(
    world: World, monkeypatch
) -> None:
    apply, broken = Router.apply, [True]

    def sometimes(router: Router, snapshot, now):
        if broken and router.backend_tag == NEW:
            raise RuntimeError("a defect")
        return apply(router, snapshot, now)

    monkeypatch.setattr(Router, "apply", sometimes)
    world.dispatcher.update({}, whole=True)
    before = world.routes.applied_snapshot_id
    assert before == world.snapshot_id
    with pytest.raises(ExceptionGroup):
        world.put(N0, backend=NEW)
    world.put_traffic({NEW: 1.0})
    assert world.routes.applied_snapshot_id == before
    waiting = await world.ask()
    broken.clear()
    assert not world.bus.sent
    told_again = dict(world.routes._snapshots._snapshots)
    world.dispatcher.update(told_again, whole=True)
    assert world.routes.applied_snapshot_id == world.snapshot_id
    world.ok(world.take(RequestHead)[1])
    await waiting
