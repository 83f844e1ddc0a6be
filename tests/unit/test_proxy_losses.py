"""Requests that end their replicas, replicas that fall silent, and user code that hangs: what each costs the others."""

from __future__ import annotations

import random

import pytest

from serve_common.config.backend import CircuitBreaker, OutlierEjection
from serve_common.dispatch.errors import BackendStopped, LostTwice
from serve_common.dispatch.timers import PATIENCE_S
from serve_common.errors import DeadlineExceeded, ReplicaDied
from serve_common.names import BackendTag, ReplicaTag
from serve_common.protocol.frames import (
    AliveHead,
    CancelHead,
    ErrorHead,
    ProbeHead,
    RefusedHead,
    RequestHead,
    ResponseHead,
)
from tests.unit.proxy_world import BACKEND, TIMEOUT_S, World, failure

R = [ReplicaTag(f"d/a#{i}") for i in range(9)]


@pytest.fixture
async def world():
    world = World(limit=100)
    yield world
    for task in world.tasks:
        assert task.done(), "a handler still waits"
    world.assert_nothing_is_left()


def sent(world: World) -> list[tuple[ReplicaTag, bytes]]:
    """Requests that were sent since the last look, each with its reply subject."""
    requests = [
        (ReplicaTag(f"d/a#{subject.rpartition('.')[2]}"), reply)
        for subject, reply, head, _ in world.bus.sent
        if type(head) is RequestHead
    ]
    world.bus.sent.clear()
    return requests


def die_unheard(world: World, reply: bytes) -> None:
    """The replica of a request dies, and nobody but its router notices."""
    world.now += 1.1
    world.beat.look(world.now)
    world.no_responders(reply)
    world.now += 0.4
    world.no_responders(reply)


@pytest.mark.parametrize("is_told", [True, False])
async def test_a_query_of_death_takes_two_replicas_and_is_told_so(world: World, *, is_told: bool) -> None:
    alive = R[:6]
    world.put(*alive)
    task = await world.ask()
    killed = []
    while requests := sent(world):
        ((replica, reply),) = requests
        if replica in killed:  # it is still in the snapshot, and may only have been cut off
            world.no_responders(reply)
            continue
        killed.append(replica)
        alive = [tag for tag in alive if tag != replica]
        if is_told:
            world.put(*alive)
        else:
            die_unheard(world, reply)
    error = await failure(task)
    assert len(killed) == 2
    assert isinstance(error, LostTwice)
    assert (error.error_code, error.status_hint) == ("lost_twice", 502)
    assert all(replica in str(error) for replica in killed)
    world.put(*alive[:4])
    bystander = await world.ask()
    ((_, reply),) = sent(world)
    world.ok(reply)
    await bystander


async def test_drains_do_not_count_as_deaths(world: World) -> None:
    world.put(*R[:6])
    task = await world.ask()
    for _ in range(4):
        ((replica, _),) = sent(world)
        others = [tag for tag in R[:6] if tag != replica]
        world.put(*others, draining=[replica])
        world.put(*others)
    ((_, reply),) = sent(world)
    world.ok(reply)
    await task


async def test_a_replica_that_was_only_cut_off_does_not_count_as_dead(world: World) -> None:
    world.put(*R[:6])
    task = await world.ask()
    (first,) = sent(world)
    for _ in range(4):
        replica, reply = first
        die_unheard(world, reply)
        (first,) = sent(world)
        world.look(6.0)  # who was put aside is tried again
        for key in range(200):
            other = await world.ask(shard_key=str(key))
            ((taken, other_reply),) = sent(world)
            world.ok(other_reply)
            await other
            if taken == replica:
                break
        else:
            raise AssertionError(f"{replica} was never tried again")
    world.ok(first[1])
    await task


async def test_a_suspect_never_gets_the_last_healthy_replica_and_holds_up_nobody(world: World) -> None:
    world.put(*R[:2])
    task = await world.ask()
    ((replica, _),) = sent(world)
    (other,) = {*R[:2]} - {replica}
    world.put(other)
    assert not sent(world), "the last healthy replica is spared"
    assert world.routes.routers[BACKEND].queue_depth == 1
    bystander = await world.ask()
    ((taken, reply),) = sent(world)
    assert taken == other
    world.ok(reply)
    await bystander
    world.put(other, R[5])
    ((_, reply),) = sent(world)
    world.ok(reply)
    await task


async def test_a_suspect_that_finds_no_other_replica_is_told_why(world: World) -> None:
    world.put(*R[:2])
    task = await world.ask()
    ((replica, _),) = sent(world)
    world.put(*({*R[:2]} - {replica}))
    world.now += TIMEOUT_S
    world.beat.look(world.now)
    error = await failure(task)
    assert type(error) is ReplicaDied
    assert "not sent to the last healthy one" in str(error)
    assert not sent(world)


async def test_where_nobody_was_left_the_replacement_gets_it_once(world: World) -> None:
    world.put(R[0])
    task = await world.ask()
    for replica in (R[0], R[1]):
        ((taken, _),) = sent(world)
        assert taken == replica
        world.put()
        if replica == R[0]:
            world.put(R[1])
    assert isinstance(await failure(task), LostTwice)


async def test_a_suspect_stays_with_the_backend_that_lost_a_replica(world: World) -> None:
    canary = BackendTag("d/new")
    world.put(*R[:3])
    world.put(ReplicaTag("d/new#7"), backend=canary)
    world.put_traffic({BACKEND: 0.5, canary: 0.5})
    task = await world.ask()
    ((replica, _),) = sent(world)
    assert replica in R
    world.chance = 0.99  # the next choice falls on the other backend
    world.put(*({*R[:3]} - {replica}))
    ((second, reply),) = sent(world)
    assert second in R
    world.ok(reply)
    await task


# -- who hangs, and who is silent --

FRAGILE = {
    "circuit_breaker": CircuitBreaker(requests_min=20, failure_percent=50),
    "outlier_ejection": OutlierEjection(consecutive_failures=5),
}


@pytest.mark.parametrize("timeout_s", [0.3, 0.6, 2.0, 9.0])
async def test_twenty_requests_that_hang_do_not_shut_out_the_others(world: World, timeout_s: float) -> None:
    world.put(*R[:4], **FRAGILE)
    tasks = [await world.ask(timeout_s=timeout_s) for _ in range(20)]
    end = world.now + timeout_s
    while world.now < end:
        world.now += 0.025
        world.beat.look(world.now)
        for _, reply, head, _ in world.bus.sent:
            if type(head) is ProbeHead:
                assert head.wants_sign
                world.answer(reply, AliveHead())
        world.bus.sent.clear()
    for task in tasks:
        assert isinstance(await failure(task), DeadlineExceeded)
    router = world.routes.routers[BACKEND]
    assert (router.circuit.is_open, router.circuit.failures, router.ejections) == (False, 0, 0)
    bystander = await world.ask()
    ((_, reply),) = sent(world)
    world.ok(reply)
    await bystander


async def test_what_the_replica_itself_says_to_have_taken_too_long_shuts_out_nobody(world: World) -> None:
    world.put(*R[:4], **FRAGILE)
    tasks = [await world.ask(timeout_s=5.0) for _ in range(20)]
    world.now += 5.0
    for _, reply in sent(world):
        world.answer(reply, ErrorHead("deadline_exceeded", 504, "no answer", 0))
    for task in tasks:
        await failure(task)
    router = world.routes.routers[BACKEND]
    assert (router.circuit.is_open, router.circuit.failures, router.ejections) == (False, 0, 0)


@pytest.mark.parametrize("timeout_s", [0.6, 2.0, 9.0])
async def test_replicas_that_give_no_sign_of_life_open_the_circuit(world: World, timeout_s: float) -> None:
    world.put(*R[:4], **FRAGILE)
    tasks = [await world.ask(timeout_s=timeout_s) for _ in range(20)]
    end = world.now + timeout_s
    while world.now < end:
        world.now += 0.025
        world.beat.look(world.now)
    for task in tasks:
        assert isinstance(await failure(task), DeadlineExceeded)
    router = world.routes.routers[BACKEND]
    assert router.circuit.is_open
    assert router.ejections == 2, "never more than half"
    world.bus.sent.clear()


async def test_a_deadline_that_passes_while_the_bus_is_away_says_nothing_of_the_replica(world: World) -> None:
    world.put(*R[:4], **FRAGILE)
    tasks = [await world.ask(timeout_s=3.0) for _ in range(20)]
    world.bus.is_connected = False
    for _ in range(121):
        world.now += 0.025
        world.beat.look(world.now)
    for task in tasks:
        await failure(task)
    assert not world.routes.routers[BACKEND].circuit.is_open
    world.bus.is_connected = True
    world.bus.sent.clear()


async def test_a_sign_of_life_closes_an_open_circuit(world: World) -> None:
    world.put(R[0], circuit_breaker=CircuitBreaker(requests_min=1, open_time_s=5.0))
    task = await world.ask(repeatable=False)
    world.answer(world.take(RequestHead)[1], RefusedHead("unknown", 0))
    assert isinstance(await failure(task), ReplicaDied)
    circuit = world.routes.routers[BACKEND].circuit
    assert circuit.is_open
    world.now += 5.0
    trial = await world.ask()
    reply = world.take(RequestHead)[1]
    world.now += 1.1
    world.beat.look(world.now)
    world.take(ProbeHead)
    world.answer(reply, AliveHead())
    assert not circuit.is_open
    world.answer(reply, ResponseHead(200, [], True, 0))
    await trial


async def test_a_client_that_waits_for_less_than_our_patience_says_nothing_of_the_replica(
    world: World,
) -> None:
    world.put(*R[:4], **FRAGILE)
    for _ in range(20):
        task = await world.ask(timeout_s=PATIENCE_S / 2)
        world.now += PATIENCE_S / 2
        world.beat.look(world.now)
        await failure(task)
    assert world.routes.routers[BACKEND].circuit.failures == 0
    world.bus.sent.clear()


# -- no replicas, by a user's wish --


def stop(world: World, *, draining: tuple[ReplicaTag, ...] = ()) -> None:
    world.put(draining=draining, is_stopped=True)


async def test_a_backend_that_was_set_to_no_replicas_answers_at_once(world: World) -> None:
    stop(world)
    error = await failure(await world.ask())
    assert isinstance(error, BackendStopped)
    assert (error.error_code, error.status_hint) == ("backend_stopped", 503)
    assert "'d/a'" in str(error)
    assert not world.bus.sent
    world.put()  # it is to have some again, which are on their way
    waiting = await world.ask()
    world.put(R[1])
    ((_, reply),) = sent(world)
    world.ok(reply)
    await waiting


async def test_what_waits_for_a_backend_that_is_set_to_no_replicas_is_told_with_the_next_beat(
    world: World,
) -> None:
    world.limit = 1
    world.put(R[0])
    held = await world.ask()
    ((_, reply),) = sent(world)
    waiting = await world.ask()
    stop(world, draining=(R[0],))
    world.look(0.0)
    assert isinstance(await failure(waiting), BackendStopped)
    world.ok(reply)
    await held


async def test_a_draining_replicas_refusal_is_told_at_once_where_nobody_follows(world: World) -> None:
    world.put(R[0])
    task = await world.ask()
    ((_, reply),) = sent(world)
    stop(world, draining=(R[0],))
    world.answer(reply, RefusedHead("draining", 0))
    world.look(0.0)
    assert isinstance(await failure(task), BackendStopped)
    assert not any(type(head) is CancelHead for _, _, head, _ in world.bus.sent)


# -- every order of deaths --


@pytest.mark.parametrize("seed", range(40))
async def test_whatever_dies_when_one_request_costs_two_replicas_at_most_and_never_the_last(
    world: World, seed: int
) -> None:
    """Replicas come, die by themselves, and die of the poison, heard of in either way; seeds are the test's name."""
    chance = random.Random(seed)
    world.routes._draw = chance.random
    alive = list(R[: chance.randrange(2, 7)])
    ordinal = len(alive)
    world.put(*alive)
    poison = await world.ask(timeout_s=TIMEOUT_S)
    bystanders = [await world.ask(timeout_s=TIMEOUT_S) for _ in range(chance.randrange(4))]
    (poison_key, *_) = world.dispatcher.calls
    by_poison: list[ReplicaTag] = []
    for _ in range(30):
        while requests := sent(world):
            for replica, reply in requests:
                held = world.dispatcher.calls.values()
                call = next((c for c in held if c.attempt is not None and c.attempt.reply == reply), None)
                if call is None:
                    continue
                if call.key != poison_key:
                    world.ok(reply)
                    continue
                assert replica in alive
                assert len(alive) > 1, "it was sent to the last healthy replica"
                by_poison.append(replica)
                alive.remove(replica)
                if chance.random() < 0.5:
                    die_unheard(world, reply)
                world.put(*alive)
        match chance.randrange(4):
            case 0 if len(alive) > 1:
                alive.remove(chance.choice(alive))
                world.put(*alive)
            case 1 if ordinal < len(R):
                alive.append(R[ordinal])
                ordinal += 1
                world.put(*alive)
            case _:
                world.now += chance.choice([0.05, 0.6, 1.2])
                world.beat.look(world.now)
    assert len(by_poison) <= 2
    assert alive
    world.dispatcher.close()
    error = await failure(poison)
    assert isinstance(error, LostTwice) == (len(by_poison) == 2)
    for task in bystanders:
        if task.done() and task.exception() is not None:
            continue
        await task
