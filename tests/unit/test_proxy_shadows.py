"""Copies of requests: sent after the real one, limited, dropped, counted."""

from __future__ import annotations

import asyncio

import pytest

from serve_common.dispatch import shadows
from serve_common.dispatch.admission import ShadowOutcome
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
    ResponseHead,
)
from tests.unit.proxy_world import BACKEND, TIMEOUT_S, World, failure

SHADOW = BackendTag("d/shadow")
S5, S6 = ReplicaTag("d/shadow#5"), ReplicaTag("d/shadow#6")


@pytest.fixture
async def world():
    world = World(limit=100)
    world.put(ReplicaTag("d/a#0"))
    world.put(S5, backend=SHADOW)
    world.put_traffic({BACKEND: 1.0}, {SHADOW: 0.5})
    yield world
    for task in world.tasks:
        assert task.done(), "a handler still waits"
    world.assert_nothing_is_left()


def outcomes(world: World) -> dict[str, int]:
    tally = world.routes.endpoints[EndpointTag("d/a")].tally
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
    task = await world.ask()
    world.ok(world.take(RequestHead)[1])
    await task
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
        replica, reply, _, _ = world.take(RequestHead)
        assert replica == "0"
        world.ok(reply)
    await asyncio.gather(*tasks)
    world.put_traffic({SHADOW: 1.0})
    real = await world.ask()
    assert world.routes.routers[SHADOW].queue_depth == 1
    assert isinstance(await failure(await world.ask()), NoReplicaAvailable)
    assert not world.bus.sent
    world.ok(first)
    replica, reply, _, _ = world.take(RequestHead)
    world.ok(reply, b"real")
    assert bytes((await real)[1].body) == b"real"
    for _ in tasks:
        world.ok(world.take(RequestHead)[1])
    await settled(world)
    assert outcomes(world) == {"answered": 3}


async def test_a_refused_copy_tries_another_replica(world: World) -> None:
    world.put(S5, S6, backend=SHADOW)
    task = await world.ask()
    world.ok(world.take(RequestHead)[1])
    await task
    replica, reply, _, _ = world.take(RequestHead)
    world.answer(reply, RefusedHead("busy", 1))
    other, reply, _, _ = world.take(RequestHead)
    assert {replica, other} == {"5", "6"}
    world.ok(reply)
    await settled(world)
    assert outcomes(world) == {"answered": 1}


async def test_copies_for_a_backend_that_is_unknown_or_gone_fail_quietly(world: World) -> None:
    world.drop_backend(SHADOW)
    task = await world.ask()
    world.ok(world.take(RequestHead)[1])
    await task
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
    world.ok(world.take(RequestHead)[1])
    await task
    assert not world.bus.sent


async def test_beyond_its_limits_copies_are_skipped_and_counted(world: World, monkeypatch) -> None:
    monkeypatch.setattr(shadows, "SHADOWS_PER_BACKEND_MAX", 3)
    monkeypatch.setattr(shadows, "SHADOW_BODY_BYTES_MAX", 10)
    copies = [await ask_with_copy(world, b"12345") for _ in range(2)]
    for body in (b"1", b""):
        task = await world.ask(body)
        world.ok(world.take(RequestHead)[1])
        await task
        copies += [reply for _, reply, _, _ in world.bus.sent]
        world.bus.sent.clear()
    assert outcomes(world) == {"skipped": 1}  # the one whose body was too much; the empty one is the third
    task = await world.ask()
    world.ok(world.take(RequestHead)[1])
    await task
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
    task = await world.ask()
    world.ok(world.take(RequestHead)[1])
    await task
    assert outcomes(world) == {"failed": 1, "skipped": 1}
    assert ShadowOutcome.SKIPPED.value == "skipped"
