"""Requests for a backend that was scaled to zero: held, told of, and served when it has woken."""

from __future__ import annotations

import asyncio

import pytest

from serve_common.dispatch.admission import ShadowOutcome
from serve_common.dispatch.errors import QueueIsFull
from serve_common.dispatch.request_body import RequestBody, UploadMemory
from serve_common.errors import NoReplicaAvailable
from serve_common.names import BackendTag, EndpointTag, ReplicaTag
from serve_common.protocol.frames import BodyHead, RefusedHead, RequestHead, RequestKind, ResponseHead
from serve_common.protocol.reports import Wake
from tests.unit.handle_world import call, make_world
from tests.unit.proxy_world import BACKEND, R0, R1, TIMEOUT_S, World, failure

SHADOW = BackendTag("d/shadow")


@pytest.fixture
async def world():
    world = World(limit=100, queue=1000)
    world.put(can_wake=True)
    yield world
    for task in world.tasks:
        assert task.done(), "a handler still waits"
    world.assert_nothing_is_left()


def counts(world: World) -> list[int]:
    assert all(wake.backend_tag == BACKEND for wake in world.bus.wakes)
    return [wake.waiting for wake in world.bus.wakes]


async def answer_all(world: World, tasks) -> None:
    for _ in tasks:
        world.ok(world.take(RequestHead)[1])
    for task in tasks:
        assert (await task)[1].status == 200


async def test_the_first_request_wakes_at_once_and_all_are_sent_when_a_replica_comes(world: World) -> None:
    first = await world.ask()
    assert world.bus.wakes == [Wake(backend_tag=BACKEND, waiting=1)]
    tasks = [first, *[await world.ask() for _ in range(99)]]
    assert counts(world) == [1]
    world.look(0.03)
    world.look(0.06)
    assert counts(world) == [1, 100]
    for beat in range(40):
        world.look(0.06 + beat * 0.025)
    assert counts(world) == [1, 100, 100]
    assert not world.bus.sent
    world.put(R0)
    assert len(world.bus.sent) == 100
    world.look(5.0)
    assert counts(world) == [1, 100, 100]
    await answer_all(world, tasks)


async def test_a_backend_that_starts_its_first_replica_is_waited_for_in_silence(world: World) -> None:
    task = await world.ask()
    world.put()  # the controller has heard: it is no longer at zero
    world.look(3.0)
    assert counts(world) == [1]
    world.put(R0)
    await answer_all(world, [task])


@pytest.mark.parametrize("replicas", [(R0,), ()])
async def test_nothing_is_told_where_there_are_replicas_or_waking_is_not_wanted(
    world: World, replicas
) -> None:
    world.limit = 1
    world.put(*replicas, can_wake=bool(replicas))
    tasks = [await world.ask() for _ in range(3)]
    world.look(0.9)
    assert not counts(world)
    world.put(R0, R1, ReplicaTag("d/a#2"))
    await answer_all(world, tasks)


async def test_the_deadline_holds_while_it_wakes(world: World) -> None:
    task = await world.ask()
    world.look(TIMEOUT_S)
    error = await failure(task)
    assert type(error) is NoReplicaAvailable
    assert "scaled to zero" in str(error)


async def test_a_full_queue_refuses_and_a_backend_that_may_queue_nothing_wakes_all_the_same(
    world: World,
) -> None:
    world.queue = 0
    world.put(can_wake=True)
    assert type(await failure(await world.ask())) is QueueIsFull
    assert type(await failure(await world.ask())) is QueueIsFull
    assert counts(world) == [1]


async def test_what_opened_the_circuit_is_forgotten_when_the_replicas_have_gone_to_sleep(
    world: World,
) -> None:
    world.put(R0)
    router = world.routes.routers[BACKEND]
    router.circuit.fail(world.now, 20, 0)
    assert router.circuit.is_open
    world.put(can_wake=True)
    tasks = [await world.ask() for _ in range(3)]
    world.put(R0)
    await answer_all(world, tasks)


async def test_who_has_given_up_is_not_told_of(world: World) -> None:
    task = await world.ask()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    world.look(2.0)
    assert counts(world) == [1]


async def test_while_nats_is_away_nothing_is_told_and_then_it_is(world: World) -> None:
    tasks = [await world.ask()]
    world.bus.is_connected = False
    world.look(1.1)
    tasks.append(await world.ask())  # waits for NATS
    assert counts(world) == [1]
    world.bus.is_connected = True
    world.dispatcher.bus_reconnected()
    world.look(1.2)
    assert counts(world) == [1, 2]
    world.bus.is_full = True
    world.look(3.0)
    world.bus.is_full = False
    world.look(3.1)
    assert counts(world) == [1, 2, 2]
    world.put(R0)
    await answer_all(world, tasks)


async def test_a_request_that_waits_when_the_last_replica_goes_wakes_with_the_next_beat(world: World) -> None:
    world.limit = 1
    world.put(R0)
    served, waiting = await world.ask(), await world.ask()
    world.put(draining=[R0], can_wake=True)
    world.look(0.03)
    assert counts(world) == [1]
    await answer_all(world, [served])
    assert not world.bus.sent
    world.put(R1, draining=[R0])
    assert world.bus.sent[0][0].endswith(".1")
    await answer_all(world, [waiting])


@pytest.mark.parametrize("is_snapshot_first", [True, False])
async def test_a_request_that_meets_a_replica_on_its_way_out_is_held_and_wakes(
    world: World, is_snapshot_first: bool
) -> None:
    world.put(R0)
    task = await world.ask(repeatable=False)
    _, reply, _, _ = world.take(RequestHead)
    if is_snapshot_first:
        world.put(draining=[R0], can_wake=True)
    world.answer(reply, RefusedHead("draining", 0))
    if not is_snapshot_first:
        world.look(0.03)
        assert not counts(world)
        world.put(draining=[R0], can_wake=True)
    world.look(0.06)
    assert counts(world) == [1]
    world.put(can_wake=True)  # it has left for good
    world.put(R1)
    assert world.bus.sent[0][0].endswith(".1")
    await answer_all(world, [task])


async def test_a_replica_that_is_gone_without_a_word_is_waited_for_too(world: World) -> None:
    world.put(R0)
    task = await world.ask(repeatable=False)
    world.put(draining=[R0], can_wake=True)
    world.no_responders(world.take(RequestHead)[1])
    world.look(0.03)
    assert counts(world) == [1]
    world.put(R1)
    await answer_all(world, [task])


async def test_a_copy_is_skipped_rather_than_that_it_wakes(world: World) -> None:
    world.put(R0)
    world.put(backend=SHADOW, can_wake=True)
    world.put_traffic({BACKEND: 1.0}, {SHADOW: 0.5})
    await answer_all(world, [await world.ask()])
    world.look(2.0)
    assert not world.bus.wakes
    assert world.routes.endpoints[EndpointTag("d/a")].tally.shadows == {(SHADOW, ShadowOutcome.SKIPPED): 1}


async def test_an_upload_waits_with_what_fits_and_goes_on_by_credit(world: World) -> None:
    upload = RequestBody(b"begin", UploadMemory())
    task = await world.ask(upload=upload, repeatable=False)
    assert counts(world) == [1]
    upload.add(b"more")
    world.put(R0)
    _, reply, head, body = world.take(RequestHead)
    assert (head.body_bytes, body) == (-1, b"beginmore")
    upload.add(b"end")
    assert world.take(BodyHead)[3] == b"end"
    upload.end()
    assert world.take(BodyHead)[2].last
    world.ok(reply)
    assert (await task)[1].status == 200


async def test_a_websocket_waits_and_is_then_opened(world: World) -> None:
    task = await world.ask(kind=RequestKind.WEBSOCKET, repeatable=False)
    assert counts(world) == [1]
    world.put(R0)
    _, reply, head, _ = world.take(RequestHead)
    assert head.kind is RequestKind.WEBSOCKET
    world.answer(reply, ResponseHead(101, [], False, 0))
    routed, answer = await task
    assert answer.status == 101
    world.dispatcher.abandon(routed)
    world.bus.sent.clear()


async def test_a_handle_wakes_and_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(monkeypatch)
    world.deploy("default/a", replicas=0, can_wake=True)
    responses = [call(world.handle(), number) for number in range(3)]
    await world.settle()
    world.beat.look(asyncio.get_running_loop().time() + 0.03)
    assert [wake.waiting for wake in world.wakes] == [1, 3]
    assert world.router.queues()[BackendTag("default/a")].depth == 3
    world.deploy("default/a")
    for _ in responses:
        request = await world.sent()
        request.answer(request.arguments[0][0])
    assert [await response for response in responses] == [0, 1, 2]
    queue = world.router.queues()[BackendTag("default/a")]
    assert queue.depth == 0
    assert queue.seconds > 0
    assert world.is_idle


async def test_handles_tell_of_the_backends_that_they_called_only(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(monkeypatch, "default/a", "default/b")
    response = call(world.handle())
    (await world.sent()).answer(1)
    assert await response == 1
    queues = world.router.queues()
    assert list(queues) == [BackendTag("default/a")]
    assert (queues[BackendTag("default/a")].seconds, queues[BackendTag("default/a")].depth) == (0.0, 0)
