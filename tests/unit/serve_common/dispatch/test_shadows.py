"""Copies of requests: sent after the real one, limited, dropped, counted."""

from __future__ import annotations

import asyncio

import pytest

from serve_common.dispatch import shadows
from serve_common.dispatch.admission import ShadowOutcome
from serve_common.dispatch.errors import BackPressureError
from serve_common.dispatch.request_body import RequestBody, UploadMemory
from serve_common.errors import NoReplicaAvailable
from serve_common.names import BackendTag, EndpointTag, ReplicaTag
from serve_common.protocol.frames import (
    CREDIT_FRAMES,
    BodyHead,
    CancelHead,
    CreditHead,
    ErrorHead,
    RefusedHead,
    RequestHead,
    RequestKind,
    ResponseHead,
)
from serve_common.protocol.reports import Wake
from tests.support.handle_world import call, make_world
from tests.support.proxy_world import BACKEND, R0, R1, TIMEOUT_S, World, emptied, failure

SHADOW = BackendTag("d/shadow")
S5, S6 = ReplicaTag("d/shadow#5"), ReplicaTag("d/shadow#6")


@pytest.fixture
async def world():
    world = World(limit=100)
    world.put(ReplicaTag("d/a#0"))
    world.put(S5, backend=SHADOW)
    world.put_traffic({BACKEND: 1.0}, {SHADOW: 0.5})
    async with emptied(world):
        yield world


def outcomes(world: World) -> dict[str, int]:
    tally = world.routes.endpoints[EndpointTag("d/a")].stats
    assert {tag for tag, _ in tally.shadows} <= {SHADOW}
    return {outcome.value: count for (_, outcome), count in tally.shadows.items()}


async def ask_with_copy(world: World, body: bytes = b"", **options):
    """Ask, and answer the real request; the reply subject of its copy."""
    task = await world.ask(body, **options)
    replica, reply, _, _ = world.take(RequestHead)
    assert replica == "0", "the real request goes first"
    world.ok(reply)
    _, answer = await task
    assert bytes(answer.body) == b"ok"
    replica, reply, head, copied = world.take(RequestHead)
    assert (replica, copied, head.request_id, head.endpoint_tag) == ("5", body, "id", "d/a")
    return reply


async def settled(world: World) -> None:
    """Let those who follow copies go on."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_proportion_of_requests_is_copied_by_draw(world: World) -> None:
    reply = await ask_with_copy(world, b"body")
    world.ok(reply, b"another answer")
    await settled(world)
    assert outcomes(world) == {"answered": 1}
    world.chance = 0.5
    await world.served_by()
    assert not world.bus.sent
    assert outcomes(world) == {"answered": 1}


@pytest.mark.parametrize(
    ("frame", "outcome"),
    [
        (ResponseHead(404, [], True, 0), "answered"),
        (ResponseHead(503, [], True, 0), "error"),
        (ErrorHead("user_code_raised", 500, "ValueError", 0), "error"),
        (RefusedHead("unknown", 0), "failed"),
    ],
)
async def test_what_becomes_of_a_copy_is_counted_and_it_is_never_sent_again(
    world: World, frame, outcome: str
) -> None:
    world.answer(await ask_with_copy(world), frame)
    await settled(world)
    assert outcomes(world) == {outcome: 1}
    assert not world.bus.sent


async def test_a_streamed_answer_is_read_and_dropped(world: World) -> None:
    reply = await ask_with_copy(world)
    world.answer(reply, ResponseHead(200, [], False, 0), b"0")
    for at in range(1, CREDIT_FRAMES):
        world.answer(reply, BodyHead(at, False), b"1")
    await settled(world)
    assert world.take(CreditHead)[1] == reply
    world.answer(reply, BodyHead(CREDIT_FRAMES, True), b"1")
    await settled(world)
    assert outcomes(world) == {"answered": 1}


async def test_a_copy_that_takes_too_long_is_given_up(world: World) -> None:
    reply = await ask_with_copy(world)
    world.look(TIMEOUT_S)
    await settled(world)
    assert world.take(CancelHead)[1] == reply
    assert outcomes(world) == {"failed": 1}


async def test_a_failing_request_and_its_copy_have_nothing_to_do_with_each_other(world: World) -> None:
    task = await world.ask(repeatable=False)
    _, reply, _, _ = world.take(RequestHead)
    copy = world.take(RequestHead)[1]
    world.answer(copy, ErrorHead("user_code_raised", 500, "ValueError", 0))
    await settled(world)
    assert not task.done()
    world.ok(reply)
    await task
    assert outcomes(world) == {"error": 1}


async def test_a_client_that_leaves_does_not_end_the_copy(world: World) -> None:
    task = await world.ask()
    world.bus.sent.pop(0)
    copy = world.take(RequestHead)[1]
    task.cancel()
    await asyncio.wait([task])
    world.bus.sent.clear()
    world.ok(copy)
    await settled(world)
    assert outcomes(world) == {"answered": 1}


async def test_a_copy_waits_behind_every_real_request_and_takes_no_place_in_the_queue(world: World) -> None:
    world.limit, world.queue = 1, 1
    world.put(S5, backend=SHADOW)
    first = await ask_with_copy(world)
    tasks = [await world.ask() for _ in range(2)]  # their copies wait
    for _ in tasks:
        assert world.serve() == "0"
    await asyncio.gather(*tasks)
    world.put_traffic({SHADOW: 1.0})
    real = await world.ask()
    assert world.routes.routers[SHADOW].queue_depth == 1
    assert isinstance(await failure(await world.ask()), NoReplicaAvailable)
    assert not world.bus.sent
    world.ok(first)
    world.serve(b"real")
    assert bytes((await real)[1].body) == b"real"
    for _ in tasks:
        world.serve()
    await settled(world)
    assert outcomes(world) == {"answered": 3}


async def test_a_refused_copy_tries_another_replica(world: World) -> None:
    world.put(S5, S6, backend=SHADOW)
    await world.served_by()
    replica, reply, _, _ = world.take(RequestHead)
    world.answer(reply, RefusedHead("busy", 1))
    other, reply, _, _ = world.take(RequestHead)
    assert {replica, other} == {"5", "6"}
    world.ok(reply)
    await settled(world)
    assert outcomes(world) == {"answered": 1}


async def test_copies_for_a_backend_that_is_unknown_or_gone_fail_quietly(world: World) -> None:
    world.drop_backend(SHADOW)
    await world.served_by()
    await settled(world)
    assert outcomes(world) == {"failed": 1}
    assert SHADOW not in world.routes.routers


async def test_copies_do_not_wait_for_a_bus_that_is_away(world: World) -> None:
    world.bus.is_connected = False
    task = await world.ask()
    await settled(world)
    assert outcomes(world) == {"failed": 1}
    world.bus.is_connected = True
    world.dispatcher.bus_reconnected()
    world.serve()
    await task
    assert not world.bus.sent


async def test_beyond_its_limits_copies_are_skipped_and_counted(world: World, monkeypatch) -> None:
    monkeypatch.setattr(shadows, "SHADOWS_PER_BACKEND_MAX", 3)
    monkeypatch.setattr(shadows, "SHADOW_BODY_BYTES_MAX", 10)
    copies = [await ask_with_copy(world, b"12345") for _ in range(2)]
    for body in (b"1", b""):
        await world.served_by(body)
        copies += [reply for _, reply, _, _ in world.bus.sent]
        world.bus.sent.clear()
    assert outcomes(world) == {"skipped": 1}  # the one whose body was too much; the empty one is the third
    await world.served_by()
    assert not world.bus.sent
    assert outcomes(world) == {"skipped": 2}
    for reply in copies:
        world.ok(reply)
    await settled(world)
    assert outcomes(world) == {"skipped": 2, "answered": 3}
    world.ok(await ask_with_copy(world, b"1234567890"))  # all room was given back
    await settled(world)


async def test_after_closing_nothing_is_copied(world: World) -> None:
    await ask_with_copy(world)
    await world.shadows.close(1)
    world.bus.sent.clear()
    await world.served_by()
    assert outcomes(world) == {"failed": 1, "skipped": 1}
    assert ShadowOutcome.SKIPPED.value == "skipped"


# Requests for a backend that was scaled to zero: held, told of, and served when it has woken.


@pytest.fixture
async def asleep():
    asleep = World(limit=100, queue=1000)
    asleep.put(can_wake=True)
    async with emptied(asleep):
        yield asleep


def counts(asleep: World) -> list[int]:
    assert all(wake.backend_tag == BACKEND for wake in asleep.bus.wakes)
    return [wake.waiting for wake in asleep.bus.wakes]


async def answer_all(asleep: World, tasks) -> None:
    for _ in tasks:
        asleep.serve()
    for task in tasks:
        assert (await task)[1].status == 200


async def test_the_first_request_wakes_at_once_and_all_are_sent_when_a_replica_comes(asleep: World) -> None:
    first = await asleep.ask()
    assert asleep.bus.wakes == [Wake(backend_tag=BACKEND, waiting=1)]
    tasks = [first, *[await asleep.ask() for _ in range(99)]]
    assert counts(asleep) == [1]
    asleep.look(0.03)
    asleep.look(0.06)
    assert counts(asleep) == [1, 100]
    for beat in range(40):
        asleep.look(0.06 + beat * 0.025)
    assert counts(asleep) == [1, 100, 100]
    assert not asleep.bus.sent
    asleep.put(R0)
    assert len(asleep.bus.sent) == 100
    asleep.look(5.0)
    assert counts(asleep) == [1, 100, 100]
    await answer_all(asleep, tasks)


async def test_a_backend_that_starts_its_first_replica_is_waited_for_in_silence(asleep: World) -> None:
    task = await asleep.ask()
    asleep.put()  # the controller has heard: it is no longer at zero
    asleep.look(3.0)
    assert counts(asleep) == [1]
    asleep.put(R0)
    await answer_all(asleep, [task])


@pytest.mark.parametrize("replicas", [(R0,), ()])
async def test_nothing_is_told_where_there_are_replicas_or_waking_is_not_wanted(
    asleep: World, replicas
) -> None:
    asleep.limit = 1
    asleep.put(*replicas, can_wake=bool(replicas))
    tasks = [await asleep.ask() for _ in range(3)]
    asleep.look(0.9)
    assert not counts(asleep)
    asleep.put(R0, R1, ReplicaTag("d/a#2"))
    await answer_all(asleep, tasks)


async def test_the_deadline_holds_while_it_wakes(asleep: World) -> None:
    task = await asleep.ask()
    asleep.look(TIMEOUT_S)
    error = await failure(task)
    assert type(error) is NoReplicaAvailable
    assert "scaled to zero" in str(error)


async def test_a_full_queue_refuses_and_a_backend_that_may_queue_nothing_wakes_all_the_same(
    asleep: World,
) -> None:
    asleep.queue = 0
    asleep.put(can_wake=True)
    assert type(await failure(await asleep.ask())) is BackPressureError
    assert type(await failure(await asleep.ask())) is BackPressureError
    assert counts(asleep) == [1]


async def test_what_opened_the_circuit_is_forgotten_when_the_replicas_have_gone_to_sleep(
    asleep: World,
) -> None:
    asleep.put(R0)
    router = asleep.routes.routers[BACKEND]
    router.circuit.fail(asleep.now, 20, 0)
    assert router.circuit.is_open
    asleep.put(can_wake=True)
    tasks = [await asleep.ask() for _ in range(3)]
    asleep.put(R0)
    await answer_all(asleep, tasks)


async def test_who_has_given_up_is_not_told_of(asleep: World) -> None:
    task = await asleep.ask()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    asleep.look(2.0)
    assert counts(asleep) == [1]


async def test_while_nats_is_away_nothing_is_told_and_then_it_is(asleep: World) -> None:
    tasks = [await asleep.ask()]
    asleep.bus.is_connected = False
    asleep.look(1.1)
    tasks.append(await asleep.ask())  # waits for NATS
    assert counts(asleep) == [1]
    asleep.bus.is_connected = True
    asleep.dispatcher.bus_reconnected()
    asleep.look(1.2)
    assert counts(asleep) == [1, 2]
    asleep.bus.is_full = True
    asleep.look(3.0)
    asleep.bus.is_full = False
    asleep.look(3.1)
    assert counts(asleep) == [1, 2, 2]
    asleep.put(R0)
    await answer_all(asleep, tasks)


async def test_a_request_that_waits_when_the_last_replica_goes_wakes_with_the_next_beat(
    asleep: World,
) -> None:
    asleep.limit = 1
    asleep.put(R0)
    served, waiting = await asleep.ask(), await asleep.ask()
    asleep.put(draining=[R0], can_wake=True)
    asleep.look(0.03)
    assert counts(asleep) == [1]
    await answer_all(asleep, [served])
    assert not asleep.bus.sent
    asleep.put(R1, draining=[R0])
    assert asleep.bus.sent[0][0].endswith(".1")
    await answer_all(asleep, [waiting])


@pytest.mark.parametrize("is_snapshot_first", [True, False])
async def test_a_request_that_meets_a_replica_on_its_way_out_is_held_and_wakes(
    asleep: World, is_snapshot_first: bool
) -> None:
    asleep.put(R0)
    task = await asleep.ask(repeatable=False)
    _, reply, _, _ = asleep.take(RequestHead)
    if is_snapshot_first:
        asleep.put(draining=[R0], can_wake=True)
    asleep.answer(reply, RefusedHead("draining", 0))
    if not is_snapshot_first:
        asleep.look(0.03)
        assert not counts(asleep)
        asleep.put(draining=[R0], can_wake=True)
    asleep.look(0.06)
    assert counts(asleep) == [1]
    asleep.put(can_wake=True)  # it has left for good
    asleep.put(R1)
    assert asleep.bus.sent[0][0].endswith(".1")
    await answer_all(asleep, [task])


async def test_a_replica_that_is_gone_without_a_word_is_waited_for_too(asleep: World) -> None:
    asleep.put(R0)
    task = await asleep.ask(repeatable=False)
    asleep.put(draining=[R0], can_wake=True)
    asleep.no_responders(asleep.take(RequestHead)[1])
    asleep.look(0.03)
    assert counts(asleep) == [1]
    asleep.put(R1)
    await answer_all(asleep, [task])


async def test_a_copy_is_skipped_rather_than_that_it_wakes(asleep: World) -> None:
    asleep.put(R0)
    asleep.put(backend=SHADOW, can_wake=True)
    asleep.put_traffic({BACKEND: 1.0}, {SHADOW: 0.5})
    await answer_all(asleep, [await asleep.ask()])
    asleep.look(2.0)
    assert not asleep.bus.wakes
    assert asleep.routes.endpoints[EndpointTag("d/a")].stats.shadows == {(SHADOW, ShadowOutcome.SKIPPED): 1}


async def test_an_upload_waits_with_what_fits_and_goes_on_by_credit(asleep: World) -> None:
    upload = RequestBody(b"begin", UploadMemory())
    task = await asleep.ask(upload=upload, repeatable=False)
    assert counts(asleep) == [1]
    upload.add(b"more")
    asleep.put(R0)
    _, reply, head, body = asleep.take(RequestHead)
    assert (head.body_bytes, body) == (-1, b"beginmore")
    upload.add(b"end")
    assert asleep.take(BodyHead)[3] == b"end"
    upload.end()
    assert asleep.take(BodyHead)[2].last
    asleep.ok(reply)
    assert (await task)[1].status == 200


async def test_a_websocket_waits_and_is_then_opened(asleep: World) -> None:
    task = await asleep.ask(kind=RequestKind.WEBSOCKET, repeatable=False)
    assert counts(asleep) == [1]
    asleep.put(R0)
    _, reply, head, _ = asleep.take(RequestHead)
    assert head.kind is RequestKind.WEBSOCKET
    asleep.answer(reply, ResponseHead(101, [], False, 0))
    routed, answer = await task
    assert answer.status == 101
    asleep.dispatcher.abandon(routed)
    asleep.bus.sent.clear()


async def test_a_handle_wakes_and_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = make_world(monkeypatch)
    asleep.deploy("default/a", replicas=0, can_wake=True)
    responses = [call(asleep.handle(), number) for number in range(3)]
    await asleep.settle()
    asleep.beat.tick(asyncio.get_running_loop().time() + 0.03)
    assert [wake.waiting for wake in asleep.wakes] == [1, 3]
    assert asleep.router.queues()[BackendTag("default/a")].depth == 3
    asleep.deploy("default/a")
    for _ in responses:
        request = await asleep.sent()
        request.answer(request.arguments[0][0])
    assert [await response for response in responses] == [0, 1, 2]
    queue = asleep.router.queues()[BackendTag("default/a")]
    assert queue.depth == 0
    assert queue.seconds > 0
    assert asleep.is_idle


async def test_handles_tell_of_the_backends_that_they_called_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = make_world(monkeypatch, "default/a", "default/b")
    response = call(asleep.handle())
    (await asleep.sent()).answer(1)
    assert await response == 1
    queues = asleep.router.queues()
    assert list(queues) == [BackendTag("default/a")]
    assert (queues[BackendTag("default/a")].seconds, queues[BackendTag("default/a")].depth) == (0.0, 0)
