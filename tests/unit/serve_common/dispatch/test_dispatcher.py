"""The dispatcher against a bus made of lists: every way a request can end, and that nothing is left behind."""

from __future__ import annotations

import asyncio

import pytest

from serve_common.dispatch.admission import CERTAIN_DEATH_S, CONFIRM_DEATH_S
from serve_common.dispatch.calls import Call, Response
from serve_common.dispatch.errors import HeadersTooLarge, ResponseUnusable
from serve_common.dispatch.request_body import RequestBody, UploadMemory
from serve_common.dispatch.timers import PROBE_AFTER_S
from serve_common.errors import (
    BusUnavailable,
    NoReplicaAvailable,
    NotFound,
    ReplicaDied,
    ServeError,
)
from serve_common.names import BackendTag, ReplicaTag
from serve_common.nats.options import NotConnected
from serve_common.protocol.frames import (
    CREDIT_FRAMES,
    FRAME_BODY_BYTES_MAX,
    LARGE_WINDOW_FRAMES,
    WINDOW_FRAMES,
    AliveHead,
    BodyHead,
    CancelHead,
    CreditHead,
    ErrorHead,
    ProbeHead,
    RefusedHead,
    RequestHead,
    ResponseHead,
)
from serve_common.protocol.streams import FRAMES_OVER_MAX, RECEIVED_EVERY_BYTES
from serve_common.routing.router import Router
from tests.support.proxy_world import BACKEND, R0, R1, TIMEOUT_S, World, emptied, failure

R2 = ReplicaTag("d/a#2")


@pytest.fixture
async def world():
    async with emptied(World()) as world:
        yield world


async def test_an_answer_comes_back_and_the_slot_is_free_again(world: World) -> None:
    first, second = await world.ask(b"body"), await world.ask()
    replica, reply, head, body = world.take(RequestHead)
    assert (replica, body, head.route, head.body_bytes) == ("0", b"body", "/a", 4)
    assert 0 < head.timeout_s < TIMEOUT_S + 1e-6  # a difference of two times
    assert not world.bus.sent  # the second waits
    world.ok(reply)
    _, answer = await first
    assert (answer.status, bytes(answer.body)) == (200, b"ok")
    world.serve()
    await second


async def test_a_refused_request_goes_elsewhere(world: World) -> None:
    world.put(R0, R1)
    task = await world.ask(repeatable=False)
    replica, reply, _, _ = world.take(RequestHead)
    world.answer(reply, RefusedHead("busy", 1))
    other, reply, _, _ = world.take(RequestHead)
    assert {replica, other} == {"0", "1"}
    world.answer(reply, RefusedHead("draining", 1))
    assert not world.bus.sent
    world.look(0.03)  # the busy one's pause is over
    again, reply, _, _ = world.take(RequestHead)
    assert again == replica
    world.ok(reply)
    await task


async def test_no_responders_at_first_means_that_nothing_began(world: World) -> None:
    world.put(R0, R1)
    task = await world.ask(repeatable=False)
    replica, reply, _, _ = world.take(RequestHead)
    world.no_responders(reply)
    other, reply, _, _ = world.take(RequestHead)
    assert other != replica
    world.ok(reply)
    await task


async def test_a_request_that_was_probed_before_it_was_known_that_it_had_no_responders_never_began(
    world: World,
) -> None:
    """As when this process or the server stood still for a second, while the replica left."""
    world.put(R0, R1)
    task = await world.ask(repeatable=False)
    replica, reply, _, _ = world.take(RequestHead)
    world.look(PROBE_AFTER_S + 0.5)
    assert world.take(ProbeHead)[1] == reply
    world.no_responders(reply)
    assert not world.bus.sent, "that may be of the probe"
    world.no_responders(reply)
    other, reply, _, _ = world.take(RequestHead)
    assert other != replica
    world.ok(reply)
    await task


async def test_a_request_whose_replica_was_alive_once_has_arrived_though_it_has_no_responders_since(
    world: World,
) -> None:
    world.put(R0, R1)
    task = await world.ask(repeatable=False)
    reply = world.take(RequestHead)[1]
    world.look(PROBE_AFTER_S + 0.5)
    world.take(ProbeHead)
    world.answer(reply, AliveHead())
    for _ in range(3):
        world.no_responders(reply)
    assert not world.bus.sent
    world.put(R1)
    assert isinstance(await failure(task), ReplicaDied)


async def test_without_any_replica_a_request_waits_for_one(world: World) -> None:
    task = await world.ask(repeatable=False)
    world.no_responders(world.take(RequestHead)[1])
    world.look(0.1)
    assert not world.bus.sent
    world.put(R1)
    assert world.serve() == "1"
    await task


async def test_who_waits_too_long_is_told_that_nobody_had_room(world: World) -> None:
    held, waiting = await world.ask(timeout_s=100), await world.ask()
    world.look(TIMEOUT_S - 0.1)
    assert not waiting.done()
    world.look(TIMEOUT_S)
    assert isinstance(await failure(waiting), NoReplicaAvailable)
    world.serve()
    await held


async def test_a_client_that_goes_away_gives_its_slot_to_the_next(world: World) -> None:
    gone, queued, gone_too, last = [await world.ask() for _ in range(4)]
    reply = world.take(RequestHead)[1]
    gone_too.cancel()
    gone.cancel()
    await asyncio.sleep(0)
    assert world.take(CancelHead)[1] == reply
    world.serve()
    await queued
    world.serve()
    await last
    await asyncio.wait([gone, gone_too])


async def test_a_silent_request_is_probed_and_unknown_means_lost(world: World) -> None:
    once, twice = await world.ask(repeatable=False), None
    reply = world.take(RequestHead)[1]
    world.look(PROBE_AFTER_S - 0.1)
    assert not world.bus.sent
    world.look(PROBE_AFTER_S + 0.5)
    assert world.take(ProbeHead)[1] == reply
    world.answer(reply, RefusedHead("unknown", 0))
    assert isinstance(await failure(once), ReplicaDied)

    twice = await world.ask(repeatable=True)
    first = world.take(RequestHead)[1]
    world.answer(first, RefusedHead("unknown", 0))
    second = world.take(RequestHead)[1]
    assert second != first
    world.ok(second)
    await twice


async def test_a_request_that_keeps_getting_lost_is_given_up(world: World) -> None:
    task = await world.ask()
    for _ in range(10):
        world.answer(world.take(RequestHead)[1], RefusedHead("unknown", 0))
    assert isinstance(await failure(task), ReplicaDied)


async def test_a_dead_replicas_requests_fail_over_all_at_once(world: World, monkeypatch) -> None:
    world.limit = 3
    world.put(R0)
    repeatable, also, fragile = await world.ask(), await world.ask(), await world.ask(repeatable=False)
    replies = [world.take(RequestHead)[1] for _ in range(3)]
    world.put(R0, R1, R2)
    world.look(1.5)
    assert [world.take(ProbeHead)[1] for _ in range(3)] == replies
    clock = [world.now + 1.5]
    monkeypatch.setattr(world.dispatcher._loop, "time", lambda: clock[0])
    world.no_responders(replies[0])
    assert not fragile.done()
    clock[0] += 0.2
    world.look(clock[0] - world.now)
    assert world.take(ProbeHead)[1] in replies  # asked again before it is believed
    clock[0] += CONFIRM_DEATH_S
    world.no_responders(replies[1])
    sent = [frame for frame in world.bus.sent if type(frame[2]) is RequestHead]
    assert sorted(subject.rpartition(".")[2] for subject, *_ in sent) == ["1", "2"]
    assert not fragile.done()
    clock[0] += CERTAIN_DEATH_S - CONFIRM_DEATH_S
    world.no_responders(replies[2])
    assert isinstance(await failure(fragile), ReplicaDied)
    for _, reply, _, _ in sent:
        world.ok(reply)
    await asyncio.gather(repeatable, also)


async def test_a_replica_that_leaves_the_snapshot_loses_its_requests(world: World) -> None:
    task = await world.ask()
    world.take(RequestHead)
    world.put(R1)
    world.take(CancelHead)
    assert world.serve() == "1"
    await task


async def test_a_draining_replica_still_answers(world: World) -> None:
    task = await world.ask(repeatable=False)
    reply = world.take(RequestHead)[1]
    world.put(R1, draining=(R0,))
    world.ok(reply)
    await task


async def test_who_waits_for_an_endpoint_that_vanishes_is_told_at_once(world: World) -> None:
    held, waiting = await world.ask(repeatable=False), await world.ask()
    world.put_endpoint(None)
    assert isinstance(await failure(waiting), NotFound)
    world.serve()
    await held


async def test_who_waits_for_a_backend_that_vanishes_is_told_at_once(world: World) -> None:
    held, waiting = await world.ask(repeatable=False), await world.ask()
    world.take(RequestHead)
    world.drop_backend()
    assert isinstance(await failure(waiting), NoReplicaAvailable)
    assert isinstance(await failure(held), ReplicaDied)


async def test_without_the_bus_requests_wait_for_a_bounded_time(world: World) -> None:
    world.bus.is_connected = False
    early = await world.ask()
    world.look(4.9)
    assert not early.done()
    world.look(5.1)
    assert isinstance(await failure(early), BusUnavailable)
    late = await world.ask()
    world.bus.is_connected = True
    world.dispatcher.bus_reconnected()
    world.serve()
    await late


async def test_a_bus_that_goes_away_before_it_is_noticed_parks_the_request_and_frees_its_slot(
    world: World, monkeypatch
) -> None:
    def fail(*_args, **_kwargs):
        raise NotConnected("away")

    with monkeypatch.context() as patch:
        patch.setattr(world.bus, "publish", fail)
        task = await world.ask()
        assert world.routes.routers[BACKEND].in_flight == 0
    world.dispatcher.bus_reconnected()
    world.serve()
    await task


async def test_after_a_reconnect_everything_under_way_is_probed_at_once(world: World) -> None:
    task = await world.ask(repeatable=False)
    reply = world.take(RequestHead)[1]
    world.dispatcher.bus_reconnected()
    assert world.take(ProbeHead)[1] == reply
    world.no_responders(reply)  # the replica reconnects too: that is no death
    world.ok(reply)
    await task


async def test_a_probe_in_the_very_moment_of_the_request_still_bears_an_age(world: World) -> None:
    """Without one, a replica cannot tell that the request has not begun: that would be a 502."""
    task = await world.ask(repeatable=False)
    reply = world.take(RequestHead)[1]
    (call,) = world.dispatcher.calls.values()
    assert call.attempt is not None
    sent_at = call.attempt.sent_at
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            asyncio.get_running_loop(), "time", lambda: sent_at
        )  # uvloop's stands still for a millisecond
        world.dispatcher.bus_reconnected()
    assert world.take(ProbeHead)[2].age_s > 0
    world.ok(reply)
    await task


async def test_a_bus_that_takes_no_more_is_an_error_and_frees_the_slot(world: World) -> None:
    world.bus.is_full = True
    assert isinstance(await failure(await world.ask()), ServeError)


async def test_headers_that_do_not_fit_into_a_frame_are_refused(world: World) -> None:
    assert isinstance(await failure(await world.ask(headers=[("a", "b" * 70_000)])), HeadersTooLarge)


async def test_a_large_body_is_sent_as_far_as_there_is_credit(world: World) -> None:
    body = bytes((LARGE_WINDOW_FRAMES + 3) * FRAME_BODY_BYTES_MAX + 1)
    task = await world.ask(body)
    _, reply, head, first = world.take(RequestHead)
    assert head.body_bytes == len(body)
    received = first + b"".join(world.take(BodyHead)[3] for _ in range(LARGE_WINDOW_FRAMES - 1))
    assert not world.bus.sent
    world.answer(reply, CreditHead(2))
    sequences = [world.bus.sent[0][2], world.bus.sent[1][2]]
    assert sequences == [BodyHead(LARGE_WINDOW_FRAMES, False), BodyHead(LARGE_WINDOW_FRAMES + 1, False)]
    received += b"".join(world.take(BodyHead)[3] for _ in range(2))
    assert not world.bus.sent
    world.answer(reply, CreditHead(9))
    received += world.take(BodyHead)[3]
    _, _, last, piece = world.take(BodyHead)
    assert last == BodyHead(LARGE_WINDOW_FRAMES + 3, True)
    assert received + piece == body
    world.ok(reply)
    await task


@pytest.mark.parametrize("is_repeatable", [True, False])
async def test_an_upload_that_a_reconnect_interrupts_goes_on_where_its_replica_says(
    world: World, *, is_repeatable: bool
) -> None:
    body = bytes(range(256)) * (FRAME_BODY_BYTES_MAX // 256) * (LARGE_WINDOW_FRAMES + 2)
    task = await world.ask(body, repeatable=is_repeatable)
    _, reply, _, received = world.take(RequestHead)
    received += world.take(BodyHead)[3]
    world.bus.sent.clear()  # the others are lost
    world.dispatcher.bus_reconnected()
    assert world.take(ProbeHead)[1:3] == (reply, ProbeHead(0.001, 0, has_lost=True))
    world.answer(reply, AliveHead(2, WINDOW_FRAMES + 2))
    sequences = []
    while world.bus.sent:
        _, _, head, piece = world.take(BodyHead)
        sequences.append(head.sequence)
        received += piece
    assert sequences == list(range(2, LARGE_WINDOW_FRAMES + 2))
    assert received == body
    world.answer(reply, AliveHead(LARGE_WINDOW_FRAMES + 2, WINDOW_FRAMES + LARGE_WINDOW_FRAMES + 2))
    assert not world.bus.sent
    world.ok(reply)
    await task


async def test_what_was_sent_after_a_probe_is_not_sent_again_for_its_answer(world: World) -> None:
    task = await world.ask(bytes((LARGE_WINDOW_FRAMES + 4) * FRAME_BODY_BYTES_MAX))
    reply = world.take(RequestHead)[1]
    world.bus.sent.clear()
    world.look(PROBE_AFTER_S)
    world.take(ProbeHead)
    at, limit = LARGE_WINDOW_FRAMES, WINDOW_FRAMES
    world.answer(reply, CreditHead(2, limit + 2, limit + 2))
    assert [world.take(BodyHead)[2].sequence for _ in range(2)] == [at, at + 1]
    world.answer(reply, AliveHead(at, limit + 4))
    assert [world.take(BodyHead)[2].sequence for _ in range(2)] == [at + 2, at + 3]
    world.answer(reply, AliveHead(at + 2, limit + 4, has_gap=True))
    assert [world.take(BodyHead)[2].sequence for _ in range(2)] == [at + 2, at + 3]
    world.ok(reply)
    await task


async def test_an_upload_goes_on_when_its_replica_is_back_and_lacks_nothing(world: World) -> None:
    """As where the replica's connection was cut when a probe came, and everything sent before had arrived."""
    task = await world.ask(bytes((LARGE_WINDOW_FRAMES + 3) * FRAME_BODY_BYTES_MAX))
    reply = world.take(RequestHead)[1]
    world.bus.sent.clear()
    world.answer(reply, AliveHead(LARGE_WINDOW_FRAMES))
    world.look(PROBE_AFTER_S)
    world.take(ProbeHead)
    world.no_responders(reply)
    world.look(PROBE_AFTER_S)
    world.bus.sent.clear()  # probes
    at, limit = LARGE_WINDOW_FRAMES, WINDOW_FRAMES + LARGE_WINDOW_FRAMES
    world.answer(reply, AliveHead(at, limit))
    assert [world.take(BodyHead)[2].sequence for _ in range(3)] == [at, at + 1, at + 2]
    world.ok(reply)
    await task


async def test_a_streamed_answer_is_read_piece_by_piece_and_gives_credit(world: World) -> None:
    reply, _, answer = await world.stream()
    assert answer.stream is not None
    for at in range(1, CREDIT_FRAMES):
        assert await answer.stream.read() == b"0"
        world.answer(reply, BodyHead(at, False), b"0")
    assert await answer.stream.read() == b"0"
    assert not world.bus.sent
    reading = asyncio.get_running_loop().create_task(answer.stream.read())
    await asyncio.sleep(0)
    limit = WINDOW_FRAMES + CREDIT_FRAMES
    assert world.take(CreditHead)[2] == CreditHead(CREDIT_FRAMES, limit, limit)
    world.answer(reply, BodyHead(CREDIT_FRAMES, False), b"1")
    assert await reading == b"1"
    world.answer(reply, BodyHead(CREDIT_FRAMES + 1, True), b"2")
    assert world.take(CreditHead)[2].limit == WINDOW_FRAMES + CREDIT_FRAMES + 2, "everything has arrived"
    assert world.routes.routers[BACKEND].in_flight == 0  # the replica is done with it
    assert await answer.stream.read() == b"2"
    assert await answer.stream.read() is None
    assert not world.bus.sent


async def test_a_stream_that_breaks_off_says_so_after_what_came(world: World) -> None:
    reply, _, answer = await world.stream(repeatable=True)
    world.answer(reply, RefusedHead("unknown", 0))
    assert await answer.stream.read() == b"0"
    with pytest.raises(ReplicaDied):
        await answer.stream.read()
    assert not world.bus.sent  # a part was seen, so it is not sent again


async def read_all(stream) -> None:
    while await stream.read() is not None:
        pass


async def test_an_unasked_piece_ends_the_stream(world: World) -> None:
    reply, _, answer = await world.stream()
    for number in range(1, WINDOW_FRAMES + FRAMES_OVER_MAX + 1):
        world.answer(reply, BodyHead(number, False), b"x")
    with pytest.raises(ResponseUnusable):
        await read_all(answer.stream)
    assert world.take(CancelHead)[1] == reply
    world.bus.sent.clear()


async def test_the_replica_learns_how_much_has_come_over_the_bus_in_all_its_responses(world: World) -> None:
    large = bytes(RECEIVED_EVERY_BYTES // 4)
    for total in (1, 2):
        reply, _, answer = await world.stream()
        for number in range(1, 4):
            world.answer(reply, BodyHead(number, False), large)
            assert not world.bus.sent
        world.answer(reply, BodyHead(4, True), large)
        _, to, head, _ = world.bus.sent.pop(0)
        assert to == reply
        assert total <= head.total_bytes / RECEIVED_EVERY_BYTES < total + 0.1
        world.take(CreditHead)
        await read_all(answer.stream)
        assert not world.bus.sent


async def test_a_lost_piece_is_asked_for_once_and_what_comes_twice_is_dropped(world: World) -> None:
    reply, _, answer = await world.stream()
    for number in (2, 3):
        world.answer(reply, BodyHead(number, False), b"x")
    assert world.take(ProbeHead)[2] == ProbeHead(0.001, 1, WINDOW_FRAMES, has_lost=True)
    assert not world.bus.sent
    world.answer(reply, ResponseHead(200, [], False, 0), b"0")
    for number in (1, 2, 1, 2, 3):
        world.answer(reply, BodyHead(number, number == 3), b"%d" % number)
    world.take(CreditHead)
    pieces = [await answer.stream.read() for _ in range(5)]
    assert pieces == [b"0", b"1", b"2", b"3", None]


async def test_a_response_whose_head_was_lost_is_asked_for_as_a_whole(world: World) -> None:
    task = await world.ask()
    reply = world.take(RequestHead)[1]
    world.answer(reply, BodyHead(1, False), b"1")
    world.answer(reply, BodyHead(2, True), b"2")
    assert world.take(ProbeHead)[2].received == 0
    assert not world.bus.sent
    world.answer(reply, ResponseHead(200, [], False, 0), b"0")
    world.answer(reply, BodyHead(1, False), b"1")
    world.answer(reply, BodyHead(2, True), b"2")
    world.take(CreditHead)
    _, answer = await task
    assert [await answer.stream.read() for _ in range(4)] == [b"0", b"1", b"2", None]


async def test_credit_that_is_lost_is_part_of_the_next_probe(world: World) -> None:
    reply, _, answer = await world.stream()
    for at in range(1, CREDIT_FRAMES + 1):
        await answer.stream.read()
        world.answer(reply, BodyHead(at, False), b"x")
    await answer.stream.read()
    world.bus.sent.clear()
    world.look(PROBE_AFTER_S)
    probe = world.take(ProbeHead)[2]
    assert (probe.received, probe.limit) == (CREDIT_FRAMES + 1, WINDOW_FRAMES + CREDIT_FRAMES)
    world.answer(reply, BodyHead(CREDIT_FRAMES + 1, True), b"x")
    world.take(CreditHead)
    await read_all(answer.stream)


async def test_what_a_replica_has_sent_before_it_answers_a_probe_and_is_not_here_was_lost(
    world: World,
) -> None:
    task = await world.ask()
    reply = world.take(RequestHead)[1]
    world.look(PROBE_AFTER_S)
    assert not world.take(ProbeHead)[2].has_lost
    world.answer(reply, AliveHead(sent=1))  # its head
    assert world.take(ProbeHead)[2].has_lost
    world.answer(reply, ResponseHead(200, [], False, 0), b"0")
    _, answer = await task
    world.answer(reply, AliveHead(sent=1))
    assert not world.bus.sent
    world.answer(reply, AliveHead(sent=2))
    probe = world.take(ProbeHead)[2]
    assert (probe.received, probe.has_lost) == (1, True)
    world.answer(reply, BodyHead(1, True), b"1")
    world.take(CreditHead)
    assert [await answer.stream.read() for _ in range(3)] == [b"0", b"1", None]


async def test_abandoning_a_stream_cancels_it_at_the_replica(world: World) -> None:
    reply, call, _ = await world.stream()
    world.dispatcher.abandon(call)
    world.dispatcher.abandon(call)
    assert world.take(CancelHead)[1] == reply
    assert not world.bus.sent


async def test_rubbish_from_a_replica_is_an_error_of_that_request_only(world: World) -> None:
    task = await world.ask()
    reply = world.take(RequestHead)[1]
    world.bus.receivers[b"1"][0](b"\xff\xff\xff", b"", None)
    assert isinstance(await failure(task), ResponseUnusable)
    assert world.take(CancelHead)[1] == reply


async def test_closing_ends_everything(world: World) -> None:
    tasks = [await world.ask() for _ in range(3)]
    world.dispatcher.close()
    for task in tasks:
        assert isinstance(await failure(task), BusUnavailable)


# Requests without a future: who is told what, when, and that callbacks may begin and give up other requests.


class Told:
    """Remembers what the callbacks of one request were told."""

    def __init__(self, world: World, then=None, **fields) -> None:
        self.answers: list[Response] = []
        self.errors: list[ServeError] = []
        self.then = then
        self.call = world.dispatcher.start(world.make_ask(**fields), self.on_response, self.on_error)

    def on_response(self, call: Call, answer: Response) -> None:
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
    world.serve()
    assert (len(told.answers), told.errors, in_flight) == (1, [], [0])
    world.dispatcher.abandon(told.call)  # does nothing any more
    assert not world.bus.sent


async def test_who_is_told_may_send_the_next_request_within_the_same_slot(world: World) -> None:
    nexts: list[Told] = []
    Told(world, lambda: nexts.append(Told(world)))
    world.serve()
    world.serve()
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


async def test_a_request_that_outlives_its_client_runs_to_its_end_and_nobody_is_told(world: World) -> None:
    told = Told(world, outlives_client=True)
    reply = world.take(RequestHead)[1]
    world.dispatcher.abandon(told.call)
    assert not world.bus.sent
    world.ok(reply)
    assert told.call.key not in world.dispatcher.calls
    streamed, failed = Told(world, outlives_client=True), await world.ask(outlives_client=True)
    reply = world.take(RequestHead)[1]
    world.dispatcher.abandon(streamed.call)
    world.answer(reply, ResponseHead(200, [], False, 0), b"0")
    assert world.take(CancelHead)[1] == reply, "nobody would read it"
    reply = world.take(RequestHead)[1]
    failed.cancel()
    await asyncio.sleep(0)
    assert not world.bus.sent
    world.answer(reply, ErrorHead("user_code_raised", 500, "no", 0))
    assert not world.dispatcher.calls
    assert told.answers == told.errors == streamed.answers == streamed.errors == []
    whole = Told(world, upload=RequestBody(b"part", UploadMemory(1000, 1000)), outlives_client=True)
    world.take(RequestHead)
    world.dispatcher.abandon(whole.call)
    assert not world.dispatcher.calls, "its client had not sent all of it"


async def test_a_stream_is_told_once_and_its_end_to_its_reader(world: World) -> None:
    told = Told(world)
    reply = world.take(RequestHead)[1]
    world.answer(reply, ResponseHead(200, [], False, 0), b"0")
    (answer,) = told.answers
    assert answer.stream is not None
    assert await answer.stream.read() == b"0"
    world.answer(reply, RefusedHead("unknown", 0))
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
    told.append(Told(world))
    told.append(Told(world, lambda: world.dispatcher.abandon(told[0].call), **UNSENDABLE))
    reply = world.take(RequestHead)[1]
    world.answer(reply, RefusedHead("never_begun", 0))  # so it is sent again, and its slot is free meanwhile
    assert [type(error) for error in told[1].errors] == [HeadersTooLarge]
    assert not world.bus.sent
    world.assert_nothing_is_left()


# Requests and their endpoint's traffic policy: several backends, and what waits while the policy changes.


NEW = BackendTag("d/new")
N0 = ReplicaTag("d/new#7")


async def test_each_request_goes_by_its_own_draw(world: World) -> None:
    world.put(N0, backend=NEW)
    world.put_traffic({BACKEND: 0.75, NEW: 0.25})
    for chance, ordinal in ((0.0, "0"), (0.74, "0"), (0.76, "7"), (0.99, "7")):
        world.chance = chance
        assert await world.served_by() == ordinal


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
    assert world.serve() == "7"
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
        world.serve()
    world.ok(reply)
    await asyncio.gather(held, *waiting)


async def test_what_waits_stays_while_its_backend_keeps_a_share(world: World) -> None:
    held, waiting = await world.ask(), await world.ask()
    reply = world.take(RequestHead)[1]
    world.put(N0, backend=NEW)
    world.put_traffic({BACKEND: 0.01, NEW: 0.99})
    assert not world.bus.sent
    world.ok(reply)
    world.serve()
    await asyncio.gather(held, waiting)


async def test_a_backend_without_replicas_keeps_its_share_waiting_until_one_comes(world: World) -> None:
    world.put(backend=NEW)
    world.put_traffic({BACKEND: 0.5, NEW: 0.5})
    world.chance = 0.9
    waiting = await world.ask()
    assert not world.bus.sent
    world.chance = 0.1
    await world.served_by()
    world.put(N0, backend=NEW)
    world.serve()
    await waiting


async def test_a_backend_that_was_not_heard_of_yet_keeps_its_share_waiting(world: World) -> None:
    world.put_traffic({NEW: 1.0})
    waiting = await world.ask()
    world.look(0.1)
    assert not waiting.done()
    world.put(N0, backend=NEW)
    world.serve()
    await waiting


async def test_a_backend_that_is_gone_leaves_its_share_to_the_others(world: World) -> None:
    world.put(N0, backend=NEW)
    world.put_traffic({BACKEND: 0.5, NEW: 0.5})
    held, waiting = await world.ask(), await world.ask()
    world.serve()
    world.serve()
    await asyncio.gather(held, waiting)
    world.drop_backend()
    for chance in (0.0, 0.9):
        world.chance = chance
        assert await world.served_by() == "7"
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
        assert world.serve() == "7"
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
    world.serve()
    await waiting
