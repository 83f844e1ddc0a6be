"""Requests without a future: who is told what, when, and that callbacks may begin and give up other requests."""

from __future__ import annotations

import asyncio

import pytest

from serve_common.dispatch.calls import Call, Response
from serve_common.dispatch.errors import HeadersTooLarge
from serve_common.errors import BusUnavailable, NoReplicaAvailable, ReplicaDied, ServeError
from serve_common.names import BackendTag, ReplicaTag
from serve_common.protocol.frames import (
    FRAME_BODY_BYTES_MAX,
    WINDOW_FRAMES,
    BodyHead,
    CancelHead,
    RequestHead,
    ResponseHead,
)
from tests.unit.proxy_world import BACKEND, R0, R1, TIMEOUT_S, World


@pytest.fixture
async def world():
    world = World()
    yield world
    world.assert_nothing_is_left()


class Told:
    """Remembers what the callbacks of one request were told."""

    def __init__(self, world: World, then=None, **fields) -> None:
        self.answers: list[Response] = []
        self.errors: list[ServeError] = []
        self.then = then
        self.call = world.dispatcher.begin(world.make_ask(**fields), self.on_answer, self.on_error)

    def on_answer(self, call: Call, answer: Response) -> None:
        assert call is self.call
        self.answers.append(answer)
        if self.then is not None:
            self.then()

    def on_error(self, _call: Call, error: ServeError) -> None:
        self.errors.append(error)
        if self.then is not None:
            self.then()


async def test_an_answer_is_told_at_once_when_the_slot_is_free_again(world: World) -> None:
    in_flight = []
    told = Told(world, lambda: in_flight.append(world.routes.routers[BACKEND].in_flight))
    world.ok(world.take(RequestHead)[1])
    assert (len(told.answers), told.errors, in_flight) == (1, [], [0])
    world.dispatcher.abandon(told.call)  # does nothing any more
    assert not world.bus.sent


async def test_who_is_told_may_send_the_next_request_within_the_same_slot(world: World) -> None:
    nexts: list[Told] = []
    Told(world, lambda: nexts.append(Told(world)))
    world.ok(world.take(RequestHead)[1])
    world.ok(world.take(RequestHead)[1])
    assert len(nexts[0].answers) == 1


async def test_a_request_that_cannot_wait_is_refused_before_begin_returns(world: World) -> None:
    world.queue = 0
    world.put()
    told = Told(world)
    assert isinstance(told.errors[0], NoReplicaAvailable)
    assert told.call.key not in world.dispatcher.calls


async def test_after_abandon_nobody_is_told_anything(world: World) -> None:
    sent, waiting = Told(world), Told(world)
    reply = world.take(RequestHead)[1]
    world.dispatcher.abandon(waiting.call)
    world.dispatcher.abandon(sent.call)
    assert world.take(CancelHead)[1] == reply
    world.ok(reply)
    world.dispatcher.close()
    assert sent.answers == sent.errors == waiting.answers == waiting.errors == []


async def test_a_stream_is_told_once_and_its_end_to_its_reader(world: World) -> None:
    told = Told(world)
    reply = world.take(RequestHead)[1]
    world.answer(reply, ResponseHead(200, [], False, 0), b"0")
    (answer,) = told.answers
    assert answer.stream is not None
    assert await answer.stream.read() == b"0"
    world.answer(reply, BodyHead(2, False), b"lost one")
    with pytest.raises(ReplicaDied):
        await answer.stream.read()
    assert told.errors == []


async def test_a_callback_may_give_up_all_others_whatever_ends_its_request(world: World) -> None:
    async def end_by(end, *, replicas=(R0,), limit: int = 1, repeatable: bool = False) -> None:
        world.limit = limit
        world.put(*replicas)
        told: list[Told] = []

        def give_up_the_others() -> None:
            for other in told:
                if not other.errors:
                    world.dispatcher.abandon(other.call)

        told += [
            Told(world, give_up_the_others, repeatable=repeatable, timeout_s=TIMEOUT_S) for _ in range(4)
        ]
        end()
        assert sum(len(other.errors) for other in told) == 1
        world.assert_nothing_is_left()
        world.bus.sent.clear()

    await end_by(world.dispatcher.close)
    await end_by(lambda: world.look(TIMEOUT_S), replicas=())  # all expire in the queue
    await end_by(lambda: world.look(TIMEOUT_S), limit=4)  # all time out
    await end_by(lambda: world.put(R1), limit=4)  # all are lost at once
    await end_by(lambda: world.put_endpoint(None), replicas=())
    world.put_endpoint()
    await end_by(world.drop_backend, limit=2)
    world.put(R0)
    await end_by(lambda: world.put_traffic({BACKEND: 0.0}), replicas=())


async def test_a_parked_request_may_be_given_up_by_another_ones_callback(world: World) -> None:
    world.bus.is_connected = False
    parked = Told(world)
    other = Told(world, lambda: world.dispatcher.abandon(parked.call))
    world.queue = 0
    world.put()
    world.bus.is_connected = True
    world.dispatcher.abandon(parked.call)
    world.dispatcher.bus_reconnected()
    assert isinstance(other.errors[0], NoReplicaAvailable)
    assert parked.errors == []


async def test_a_task_that_is_cancelled_in_the_moment_of_its_answer_leaves_nothing(world: World) -> None:
    task = await world.ask()
    reply = world.take(RequestHead)[1]
    task.cancel()
    world.answer(reply, ResponseHead(200, [], False, 0), b"a stream that nobody will read")
    await asyncio.wait([task])
    assert task.cancelled()
    assert world.take(CancelHead)[1] == reply


async def test_closing_tells_those_that_have_no_answer_yet(world: World) -> None:
    sent, waiting = Told(world), Told(world)
    world.dispatcher.close()
    assert [type(error) for error in sent.errors + waiting.errors] == [BusUnavailable, BusUnavailable]


UNSENDABLE = {"headers": [(b"a", b"b" * 70_000)]}
"""Ends with an error when it is given a slot."""


async def test_who_is_given_up_while_its_dead_replica_is_mourned_is_not_sent_again(world: World) -> None:
    world.limit = 2
    world.put(R0)
    told: list[Told] = []
    told.append(Told(world, lambda: world.dispatcher.abandon(told[1].call), repeatable=False))
    told.append(Told(world, repeatable=True))
    world.bus.sent.clear()
    world.put(R1)
    assert [type(error) for error in told[0].errors] == [ReplicaDied]
    assert {type(frame[2]) for frame in world.bus.sent} == {CancelHead}
    world.assert_nothing_is_left()


async def test_who_is_given_up_while_its_backend_goes_away_is_not_sent_to_another(world: World) -> None:
    world.put()
    told: list[Told] = []
    told.append(Told(world, lambda: world.dispatcher.abandon(told[1].call), **UNSENDABLE))
    told.append(Told(world))
    new = BackendTag("d/new")
    world.put(ReplicaTag("d/new#7"), backend=new)
    world.put_traffic({BACKEND: 0.5, new: 0.5})
    world.drop_backend()
    assert [type(error) for error in told[0].errors] == [HeadersTooLarge]
    assert not world.bus.sent
    world.assert_nothing_is_left()


async def test_who_is_given_up_while_its_slot_is_given_back_is_not_sent_again(world: World) -> None:
    told: list[Told] = []
    unsent = bytes((WINDOW_FRAMES + 2) * FRAME_BODY_BYTES_MAX)
    told.append(Told(world, body=unsent))  # not sent whole, so it begins anew
    told.append(Told(world, lambda: world.dispatcher.abandon(told[0].call), **UNSENDABLE))
    world.bus.sent.clear()
    world.dispatcher.bus_reconnected()
    assert [type(error) for error in told[1].errors] == [HeadersTooLarge]
    assert {type(frame[2]) for frame in world.bus.sent} == {CancelHead}
    world.assert_nothing_is_left()
