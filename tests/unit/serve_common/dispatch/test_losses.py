"""Requests that end their replicas, replicas that fall silent, and user code that hangs: what each costs the others."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from serve_common.config.backend import BackpressureConfig, CircuitBreaker, EndpointOptions, OutlierEjection
from serve_common.dispatch.admission import CERTAIN_DEATH_S, CONFIRM_DEATH_S, PROBE_SILENT_S
from serve_common.dispatch.errors import (
    BackendStopped,
    BackPressureError,
    CircuitOpen,
    LostTwice,
    ReplicaError,
)
from serve_common.dispatch.routes import AGAIN_S, MODELS_BYTES_MAX, SILENT_S, ModelHolders
from serve_common.dispatch.timers import PATIENCE_S, PROBE_AFTER_S
from serve_common.errors import BadField, DeadlineExceeded, NoReplicaAvailable, ReplicaDied
from serve_common.names import BackendTag, EndpointTag, ReplicaTag
from serve_common.protocol.frames import (
    AliveHead,
    BodyHead,
    CallHead,
    CancelHead,
    CreditHead,
    ErrorHead,
    ProbeHead,
    RefusedHead,
    RequestHead,
    ResponseHead,
)
from serve_common.protocol.snapshots import EndpointSnapshot
from serve_common.protocol.subjects import Subjects
from serve_common.routing.replica_pool import LEAVING_S
from serve_common.routing.router import Router
from tests.support.proxy_world import BACKEND, R0, R1, TIMEOUT_S, World, emptied, failure

R = [ReplicaTag(f"d/a#{i}") for i in range(9)]


@pytest.fixture
async def world():
    async with emptied(World(limit=100)) as world:
        yield world


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
    world.beat.tick(world.now)
    world.no_responders(reply)
    world.now += CONFIRM_DEATH_S + 0.1
    world.beat.tick(world.now)
    world.no_responders(reply)


@pytest.mark.parametrize("is_notified", [True, False])
async def test_a_query_of_death_takes_two_replicas_and_is_told_so(world: World, *, is_notified: bool) -> None:
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
        if is_notified:
            world.put(*alive)
        else:
            die_unheard(world, reply)
    error = await failure(task)
    assert len(killed) == 2
    assert isinstance(error, LostTwice)
    assert (error.error_code, error.status_hint) == ("lost_twice", 502)
    assert all(replica in str(error) for replica in killed)
    world.put(*alive[:4])
    await world.served_by()


def stay_silent(world: World, seconds: float) -> None:
    """Let no probe find a subscriber for so long."""
    end = world.now + seconds
    while world.now < end:
        world.now += PROBE_SILENT_S + 0.01
        world.beat.tick(world.now)
        for _, reply, head, _ in list(world.bus.sent):
            if type(head) is ProbeHead:
                world.no_responders(reply)
        world.bus.sent[:] = [frame for frame in world.bus.sent if type(frame[2]) is RequestHead]


async def test_a_replica_that_is_slow_to_connect_again_loses_nothing_that_can_be_sent_once_only(
    world: World,
) -> None:
    """Its login may take some seconds on a machine that is full; that a request fails is for good."""
    world.put(R0)
    fragile, repeatable = await world.ask(repeatable=False), await world.ask()
    (_, reply), _ = sent(world)
    world.put(R0, R1, R[2])
    world.now += 1.1
    stay_silent(world, CONFIRM_DEATH_S + 1.0)
    assert not fragile.done()
    ((other, second),) = sent(world)
    assert other != R0, "what can be sent again is"
    world.ok(second)
    await repeatable
    stay_silent(world, CERTAIN_DEATH_S - CONFIRM_DEATH_S - 2.0)
    world.ok(reply)  # it is back
    await fragile


async def test_what_cannot_be_sent_again_is_given_up_once_the_death_is_certain(world: World) -> None:
    world.put(R0)
    fragile = await world.ask(repeatable=False)
    world.now += 1.1
    stay_silent(world, CERTAIN_DEATH_S + 1.0)
    assert isinstance(await failure(fragile), ReplicaDied)
    world.bus.sent.clear()


async def test_drains_do_not_count_as_deaths(world: World) -> None:
    world.put(*R[:6])
    task = await world.ask()
    for _ in range(4):
        ((replica, _),) = sent(world)
        others = [tag for tag in R[:6] if tag != replica]
        world.put(*others, draining=[replica])
        world.put(*others)
        world.now += LEAVING_S
        world.beat.tick(world.now)
        world.bus.sent[:] = [frame for frame in world.bus.sent if type(frame[2]) is RequestHead]
    ((_, reply),) = sent(world)
    world.ok(reply)
    await task


async def test_what_a_drained_replica_has_sent_counts_though_the_router_hears_first_that_it_left(
    world: World,
) -> None:
    """A late loop finds both in two sockets, in any order."""
    world.put(R0, R1)
    task = await world.ask(repeatable=False)
    ((replica, reply),) = sent(world)
    (other,) = {R0, R1} - {replica}
    world.put(other, draining=[replica])
    world.put(other)
    assert world.take(ProbeHead)[1] == reply
    world.put(other)
    assert not world.bus.sent, "it is asked once"
    world.ok(reply)
    await task
    world.put(other)
    assert world.routes.routers[BACKEND].pool.replicas.keys() == {other}


async def test_a_drained_replica_that_left_and_whose_process_has_ended_has_lost_its_request_at_once(
    world: World,
) -> None:
    world.put(R0, R1)
    task = await world.ask(repeatable=False)
    ((replica, reply),) = sent(world)
    (other,) = {R0, R1} - {replica}
    world.put(other, draining=[replica])
    world.put(other)
    world.no_responders(reply)
    world.now += CONFIRM_DEATH_S + 0.1
    world.beat.tick(world.now)
    world.no_responders(reply)
    assert isinstance(await failure(task), ReplicaDied)
    world.bus.sent.clear()
    world.now += LEAVING_S
    world.beat.tick(world.now)
    assert world.routes.routers[BACKEND].pool.replicas.keys() == {other}


async def test_a_replica_that_left_and_says_nothing_is_waited_for_some_seconds_or_until_it_is_back(
    world: World,
) -> None:
    world.put(R0, R1)
    task = await world.ask(repeatable=False)
    ((replica, _),) = sent(world)
    (other,) = {R0, R1} - {replica}
    for _ in range(2):
        world.put(other, draining=[replica])
        world.put(other)
        world.now += LEAVING_S - 1
        world.beat.tick(world.now)
        assert not task.done()
    world.now += 1
    world.beat.tick(world.now)
    assert isinstance(await failure(task), ReplicaDied)
    world.bus.sent.clear()


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
    world.serve()
    await task


async def test_a_suspect_that_finds_no_other_replica_is_told_why(world: World) -> None:
    world.put(*R[:2])
    task = await world.ask()
    ((replica, _),) = sent(world)
    world.put(*({*R[:2]} - {replica}))
    world.now += TIMEOUT_S
    world.beat.tick(world.now)
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


async def time_out(world: World, timeout_s: float, *, lives: bool) -> Router:
    """Let twenty requests reach their deadline without a response; replicas that live answer probes."""
    world.put(*R[:4], **FRAGILE)
    tasks = [await world.ask(timeout_s=timeout_s) for _ in range(20)]
    end = world.now + timeout_s
    while world.now < end:
        world.now += 0.025
        world.beat.tick(world.now)
        for _, reply, head, _ in world.bus.sent:
            if lives and type(head) is ProbeHead:
                world.answer(reply, AliveHead())
        world.bus.sent.clear()
    for task in tasks:
        assert isinstance(await failure(task), DeadlineExceeded)
    return world.routes.routers[BACKEND]


@pytest.mark.parametrize("timeout_s", [0.3, 0.6, 2.0, 9.0])
async def test_twenty_requests_that_hang_do_not_shut_out_the_others(world: World, timeout_s: float) -> None:
    router = await time_out(world, timeout_s, lives=True)
    assert (router.circuit.is_open, router.circuit.failures, router.ejections) == (False, 0, 0)
    await world.served_by()


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
    router = await time_out(world, timeout_s, lives=False)
    assert router.circuit.is_open
    assert router.ejections == 2, "never more than half"


async def test_a_deadline_that_passes_while_the_bus_is_away_says_nothing_of_the_replica(world: World) -> None:
    world.put(*R[:4], **FRAGILE)
    tasks = [await world.ask(timeout_s=3.0) for _ in range(20)]
    world.bus.is_connected = False
    for _ in range(121):
        world.now += 0.025
        world.beat.tick(world.now)
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
    world.beat.tick(world.now)
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
        world.beat.tick(world.now)
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
    world.serve()
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
    world.routes._rng = chance.random
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
                world.beat.tick(world.now)
    assert len(by_poison) <= 2
    assert alive
    world.dispatcher.close()
    error = await failure(poison)
    assert isinstance(error, LostTwice) == (len(by_poison) == 2)
    for task in bystanders:
        if task.done() and task.exception() is not None:
            continue
        await task


# What the dispatcher makes of wishes, protection and deadlines: who is sent what, and what callers are told.


NEW = BackendTag("d/new")
N0 = ReplicaTag("d/new#7")
EJECTION = OutlierEjection(consecutive_failures=2)


# -- which replica --


async def test_a_shard_key_pins_backend_and_replica(world: World) -> None:
    world.put(R0, R1)
    world.put(N0, backend=NEW)
    world.put_traffic({BACKEND: 0.5, NEW: 0.5})
    homes = {}
    for key in range(40):
        taken = set()
        for chance in (0.0, 0.4, 0.9):
            world.chance = chance
            taken.add(await world.served_by(shard_key=f"user-{key}"))
        (homes[key],) = taken
    assert set(homes.values()) == {"0", "1", "7"}
    world.drop_backend(NEW)
    for key, home in homes.items():
        moved = await world.served_by(shard_key=f"user-{key}")
        assert moved == home or home == "7"


async def test_a_backend_that_is_asked_for_by_name_may_have_no_weight(world: World) -> None:
    world.put(N0, backend=NEW)
    world.put_traffic({BACKEND: 1.0, NEW: 0.0})
    endpoint = world.routes.endpoints[EndpointTag("d/a")]
    assert await world.served_by(backend_tag=endpoint.select_backend(b"d/new")) == "7"
    assert await world.served_by() == "0"
    for value in (b"d/other", b"new", b"default/new"):
        with pytest.raises(BadField, match="is no backend of endpoint 'd/a'"):
            endpoint.select_backend(value)


async def test_the_error_of_an_unknown_backend_names_the_header(world: World) -> None:
    world.put_endpoint(
        EndpointSnapshot(
            endpoint_tag=EndpointTag("d/a"),
            route="/a",
            methods=["GET"],
            traffic={BackendTag("default/b"): 1.0},
            options=EndpointOptions(backend_header="X-Backend"),
        )
    )
    endpoint = world.routes.endpoints[EndpointTag("d/a")]
    assert endpoint.select_backend(b"b") == endpoint.select_backend(b"default/b") == "default/b"
    assert endpoint.select_backend(b"") is None
    with pytest.raises(BadField) as caught:
        endpoint.select_backend(b"c")
    assert caught.value.field == "X-Backend"


async def test_who_waits_for_a_named_backend_stays_with_it_as_long_as_the_endpoint_has_it(
    world: World,
) -> None:
    world.put(backend=NEW)
    world.put_traffic({BACKEND: 1.0, NEW: 0.0})
    waiting = await world.ask(backend_tag=NEW)
    world.put_traffic({BACKEND: 0.9, NEW: 0.1})
    world.put_traffic({BACKEND: 1.0, NEW: 0.0})
    assert not waiting.done()
    assert not world.bus.sent
    world.put_traffic({BACKEND: 1.0})
    assert "'d/new'" in str(await failure(waiting))


async def test_requests_keep_to_the_replicas_of_their_version(world: World) -> None:
    world.put(R0, R1, versions={R0: 1, R1: 2})
    for chance in (0.0, 0.9):
        world.chance = chance
        assert await world.served_by(code_versions={BACKEND: 2, NEW: 1}) == "1"
        assert await world.served_by(code_versions={BACKEND: 1}) == "0"
        assert await world.served_by(code_versions={NEW: 1}) == ("0" if not chance else "1")


async def test_models_are_asked_for_where_they_are_held(world: World) -> None:
    now = [100.0]
    holders = ModelHolders(world.routes, Subjects(), lambda: now[0])
    world.put(R0, R1)

    def say(replica: str, models: object) -> None:
        subject = Subjects().models(ReplicaTag(replica)).encode()
        holders.take(subject, b"", msgspec.msgpack.encode(models), None)

    async def place(model: str) -> str:
        (taken,) = {await world.served_by(call=CallHead(model_id=model)) for _ in range(4)}
        return taken

    homes = {f"m{number}": await place(f"m{number}") for number in range(20)}
    assert set(homes.values()) == {"0", "1"}  # nobody holds any yet
    there = [model for model, home in homes.items() if home == "1"]
    say(R0, there)
    assert {await place(model) for model in there} == {"0"}
    say(R0, [])
    say(R0, there[1:])
    assert {await place(model) for model in there} == {"0"}, "what is said at once again waits"
    now[0] += 2 * AGAIN_S
    holders.sweep(now[0])
    assert await place(there[0]) == "1"
    now[0] += SILENT_S - 1
    holders.sweep(now[0])
    assert len(holders) == 1
    now[0] += 2
    holders.sweep(now[0])
    assert len(holders) == 0
    assert {await place(model) for model in there} == {"1"}
    say("d/nobody#1", there)
    say(R0, {"not": "a list"})
    say(R1, ["m" * MODELS_BYTES_MAX])
    holders.take(b"\xff", b"", b"\xc1", None)
    say("d/a#77", there)
    assert len(holders) == 0


async def test_a_replica_that_says_something_new_all_the_time_costs_a_router_little(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, read = [100.0], [0]
    holders = ModelHolders(world.routes, Subjects(), lambda: now[0])
    world.put(R0, R1)
    hold = ModelHolders.hold

    def counted(self: ModelHolders, replica: ReplicaTag, held: list[str]) -> None:
        read[0] += 1
        hold(self, replica, held)

    monkeypatch.setattr(ModelHolders, "hold", counted)
    subject = Subjects().models(ReplicaTag(R0)).encode()
    for number in range(10_000):
        now[0] += 0.0001
        holders.take(subject, b"", msgspec.msgpack.encode([f"m{number}"]), None)
        holders.take(Subjects().models(ReplicaTag(f"d/x#{number}")).encode(), b"", b"\xa0", None)
        holders.sweep(now[0])
    assert read[0] <= 1.0 / AGAIN_S + 2
    now[0] += 1.0
    holders.sweep(now[0])
    assert await world.served_by(call=CallHead(model_id="m9999")) == "0", "the last word counts"
    holders.sweep(now[0] + 1.0)
    assert (len(holders._taken_at), len(holders._waiting)) == (0, 0)


# -- refusals --


async def test_a_full_queue_says_how_the_backend_wants_it_said(world: World) -> None:
    world.queue = 0
    world.put()
    error = await failure(await world.ask())
    assert isinstance(error, BackPressureError)
    assert (error.status, error.retry_after_s, error.error_code) == (503, None, "queue_full")
    world.put(backpressure_config=BackpressureConfig(status_code=429, retry_after_s=7.5))
    error = await failure(await world.ask())
    assert isinstance(error, BackPressureError)
    assert (error.status, error.retry_after_s) == (429, 7.5)
    assert world.routes.routers[BACKEND].queue_refusals == 2


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_replica_that_answers_500_again_and_again_is_left_out(world: World, *, is_streamed) -> None:
    world.put(R0, R1, outlier_ejection=EJECTION)
    for _ in range(2):
        task = await world.ask()
        replica, reply, _, _ = world.take(RequestHead)
        assert replica == "0"
        world.answer(reply, ResponseHead(500, [], not is_streamed, 0))
        if is_streamed:
            world.answer(reply, BodyHead(1, True))
            world.take(CreditHead)
        await task
    assert await world.served_by() == "1"
    assert world.routes.routers[BACKEND].ejections == 1


@pytest.mark.parametrize(("status", "taken"), [(500, "1"), (422, "0")])
async def test_errors_of_user_code_count_by_their_status(world: World, status: int, taken: str) -> None:
    world.put(
        R0, R1, outlier_ejection=EJECTION, circuit_breaker=CircuitBreaker(requests_min=1, failure_percent=1)
    )
    for _ in range(2):
        task = await world.ask()
        world.answer(world.take(RequestHead)[1], ErrorHead("user_code_raised", status, "why", 0))
        error = await failure(task)
        assert isinstance(error, ReplicaError)
        assert error.status == status
    assert await world.served_by() == taken
    assert not world.routes.routers[BACKEND].circuit.is_open


@pytest.mark.parametrize("waited_s", [TIMEOUT_S / 2, TIMEOUT_S])
async def test_a_deadline_that_a_replica_tells_of_is_anothers_or_the_user_codes(
    world: World, waited_s: float
) -> None:
    world.put(R0, circuit_breaker=CircuitBreaker(requests_min=1, failure_percent=1))
    task = await world.ask(timeout_s=TIMEOUT_S)
    reply = world.take(RequestHead)[1]
    world.now += waited_s
    world.answer(reply, ErrorHead("deadline_exceeded", 504, "a call was late", 0))
    assert isinstance(await failure(task), ReplicaError)
    assert not world.routes.routers[BACKEND].circuit.is_open


async def test_silence_until_the_deadline_counts_but_not_a_client_that_cannot_wait(world: World) -> None:
    world.put(R0, R1, outlier_ejection=EJECTION)
    for timeout_s in (PATIENCE_S / 2, PATIENCE_S / 2, TIMEOUT_S, TIMEOUT_S):
        assert world.routes.routers[BACKEND].ejections == 0
        task = await world.ask(timeout_s=timeout_s)
        for _ in range(4):
            world.now += timeout_s / 4
            world.look(0.0)
        assert isinstance(await failure(task), DeadlineExceeded)
    assert world.routes.routers[BACKEND].ejections == 1
    world.bus.sent.clear()


async def test_what_is_lost_is_sent_again_only_within_the_budget(world: World) -> None:
    world.put(R0, R1, retry_budget_percent=0.0)
    tasks = [await world.ask() for _ in range(6)]
    for again in range(2):
        for reply in [reply for _, reply, head, _ in world.bus.sent if type(head) is RequestHead]:
            world.bus.sent.pop(0)
            world.answer(reply, RefusedHead("unknown", 0))
        assert len(world.bus.sent) == (6, 4)[again]
    await asyncio.sleep(0)
    refused = [task for task in tasks if task.done()]
    assert len(refused) == 2
    for task in refused:
        error = await failure(task)
        assert isinstance(error, ReplicaDied)
        assert "the backend's retry budget is used up" in str(error)
    for _ in range(4):
        world.serve()
    await asyncio.gather(*(task for task in tasks if task not in refused))
    retries = world.routes.routers[BACKEND].retries
    assert (retries.spent, retries.refused) == (10, 2)


async def test_a_backend_that_answers_nobody_is_left_alone_until_a_trial_succeeds(
    world: World, monkeypatch
) -> None:
    clock = [world.now]
    monkeypatch.setattr(world.dispatcher._loop, "time", lambda: clock[0])
    breaker = CircuitBreaker(requests_min=3, open_time_s=5.0)
    world.put(R0, circuit_breaker=breaker, outlier_ejection=OutlierEjection(consecutive_failures=0))
    for _ in range(3):
        task = await world.ask(repeatable=False)
        world.answer(world.take(RequestHead)[1], RefusedHead("unknown", 0))
        assert isinstance(await failure(task), ReplicaDied)
    clock[0] += 2.0
    error = await failure(await world.ask())
    assert isinstance(error, CircuitOpen)
    assert error.retry_after_s == pytest.approx(3.0)
    assert (error.status, error.error_code) == (503, "circuit_open")
    assert not world.bus.sent
    clock[0] += 3.0
    trial = await world.ask()
    reply = world.take(RequestHead)[1]
    assert isinstance(await failure(await world.ask()), CircuitOpen)
    world.ok(reply)
    await trial
    assert await world.served_by() == "0"
    circuit = world.routes.routers[BACKEND].circuit
    assert (circuit.opened, circuit.refused, circuit.is_open) == (1, 2, False)


async def test_a_trial_that_begins_a_stream_has_succeeded(world: World, monkeypatch) -> None:
    clock = [world.now]
    monkeypatch.setattr(world.dispatcher._loop, "time", lambda: clock[0])
    world.put(R0, circuit_breaker=CircuitBreaker(requests_min=1, open_time_s=5.0))
    task = await world.ask(repeatable=False)
    world.answer(world.take(RequestHead)[1], RefusedHead("unknown", 0))
    assert isinstance(await failure(task), ReplicaDied)
    clock[0] += 5.0
    trial = await world.ask()
    reply = world.take(RequestHead)[1]
    world.answer(reply, ResponseHead(200, [], False, 0))
    assert await world.served_by() == "0"
    world.answer(reply, BodyHead(1, True))
    await trial


async def test_a_request_that_was_lost_is_not_sent_again_into_an_open_circuit(world: World) -> None:
    world.put(R0, circuit_breaker=CircuitBreaker(requests_min=1))
    task = await world.ask()
    world.answer(world.take(RequestHead)[1], RefusedHead("unknown", 0))
    error = await failure(task)
    assert isinstance(error, ReplicaDied), "it may have run, which a 503 would deny"
    assert "may have run" in str(error)


# -- deadlines --


async def test_a_stream_goes_on_beyond_the_deadline_and_is_still_probed(world: World) -> None:
    reply, _, answer = await world.stream()
    world.look(TIMEOUT_S + PROBE_AFTER_S)
    assert world.take(ProbeHead)[1] == reply
    assert not world.bus.sent
    world.answer(reply, BodyHead(1, True), b"1")
    assert [bytes(await answer.stream.read()) for _ in range(2)] == [b"0", b"1"]


async def test_a_silent_stream_of_a_dead_replica_ends(world: World) -> None:
    _, _, answer = await world.stream()
    world.look(2 * TIMEOUT_S)
    world.answer(world.take(ProbeHead)[1], RefusedHead("unknown", 0))
    assert bytes(await answer.stream.read()) == b"0"
    with pytest.raises(ReplicaDied):
        await answer.stream.read()


async def test_a_request_whose_deadline_is_over_is_never_sent(world: World) -> None:
    error = await failure(await world.ask(timeout_s=-0.001))
    assert isinstance(error, NoReplicaAvailable)
    assert "deadline was over" in str(error)
    assert not world.bus.sent


async def test_a_slot_that_comes_too_late_goes_to_the_next_who_still_has_time(
    world: World, monkeypatch
) -> None:
    world.limit = 1
    world.put(R0)
    held, late, next_one = await world.ask(), await world.ask(timeout_s=1.0), await world.ask(timeout_s=2.0)
    reply = world.take(RequestHead)[1]
    monkeypatch.setattr(world.dispatcher._loop, "time", lambda: world.now + 1.0)
    world.ok(reply)  # before the beat has seen that the first one's time is over
    _, reply, _, _ = world.take(RequestHead)
    assert not world.bus.sent
    assert "deadline was over" in str(await failure(late))
    world.ok(reply)
    await asyncio.gather(held, next_one)


async def test_who_waits_is_not_ended_before_the_deadline_and_reaches_a_new_replica_at_once(
    world: World,
) -> None:
    world.put()
    waiting = await world.ask()
    for after_s in (1.0, 10.0, TIMEOUT_S - 0.1):
        world.look(after_s)
    assert not waiting.done()
    world.put(R1)
    assert world.serve() == "1"
    await waiting


async def test_a_timed_out_request_leaves_its_slot_to_the_next(world: World) -> None:
    world.limit = 1
    world.put(R0)
    hanging, waiting = await world.ask(timeout_s=1.0), await world.ask()
    reply = world.take(RequestHead)[1]
    world.look(1.0)
    assert isinstance(await failure(hanging), DeadlineExceeded)
    assert world.take(CancelHead)[1] == reply
    world.ok(reply)  # too late: nobody listens any more
    world.serve()
    await waiting


async def test_while_the_bus_hangs_nobody_is_blamed_for_what_does_not_come(world: World) -> None:
    world.put(R0, R1, outlier_ejection=EJECTION, circuit_breaker=CircuitBreaker(requests_min=1))
    world.bus.hangs = True
    tasks = [await world.ask(timeout_s=TIMEOUT_S) for _ in range(4)]
    world.look(2.0)
    assert not [head for _, _, head, _ in world.bus.sent if type(head) is ProbeHead], (
        "they would gather in it"
    )
    world.look(TIMEOUT_S)
    for task in tasks:
        assert isinstance(await failure(task), DeadlineExceeded)
    router = world.routes.routers[BACKEND]
    assert (router.ejections, router.circuit.failures, router.circuit.is_open) == (0, 0, False)
    world.bus.sent.clear()


async def test_what_was_concluded_before_the_hang_was_noticed_is_taken_back(world: World) -> None:
    started_at = world.now
    world.put(R0, outlier_ejection=EJECTION, circuit_breaker=CircuitBreaker(requests_min=2))
    tasks = [await world.ask(timeout_s=1.0, repeatable=False) for _ in range(2)]
    for _ in range(3):
        world.now += 0.5
        world.look(0.0)
    for task in tasks:
        assert isinstance(await failure(task), DeadlineExceeded)
    assert world.routes.routers[BACKEND].circuit.is_open
    assert isinstance(await failure(await world.ask()), CircuitOpen)
    world.bus.sent.clear()

    world.dispatcher.bus_responds_again(started_at)
    assert await world.served_by() == "0"
    held = await world.ask(repeatable=False)
    reply = world.take(RequestHead)[1]
    world.look(1.5)
    assert world.take(ProbeHead)[1] == reply
    for _ in range(3):
        world.no_responders(reply)  # its connection is being made anew
        world.look(1.5)
    world.ok(reply)
    await held
