"""The dispatcher against a bus made of lists: every way a request can end, and that nothing is left behind."""

from __future__ import annotations

import asyncio

import pytest

from serve_common.dispatch.errors import HeadersTooLarge, ReplicaError, ResponseUnusable
from serve_common.dispatch.timers import PROBE_AFTER_S
from serve_common.errors import (
    BusUnavailable,
    DeadlineExceeded,
    NoReplicaAvailable,
    NotFound,
    ReplicaDied,
    ServeError,
)
from serve_common.names import ReplicaTag
from serve_common.nats.options import NotConnected
from serve_common.protocol.frames import (
    CREDIT_FRAMES,
    FRAME_BODY_BYTES_MAX,
    WINDOW_FRAMES,
    BodyHead,
    CancelHead,
    CreditHead,
    ErrorHead,
    ProbeHead,
    RefusedHead,
    RequestHead,
    ResponseHead,
)
from tests.unit.proxy_world import BACKEND, R0, R1, TIMEOUT_S, World, failure

R2 = ReplicaTag("d/a#2")


@pytest.fixture
async def world():
    world = World()
    yield world
    for task in world.tasks:
        assert task.done(), "a handler still waits"
    world.assert_nothing_is_left()


async def test_an_answer_comes_back_and_the_slot_is_free_again(world: World) -> None:
    first, second = await world.ask(b"body"), await world.ask()
    replica, reply, head, body = world.take(RequestHead)
    assert (replica, body, head.route, head.body_bytes) == ("0", b"body", "/a", 4)
    assert 0 < head.timeout_s <= TIMEOUT_S
    assert not world.bus.sent  # the second waits
    world.ok(reply)
    _, answer = await first
    assert (answer.status, bytes(answer.body)) == (200, b"ok")
    world.ok(world.take(RequestHead)[1])
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


async def test_without_any_replica_a_request_waits_for_one(world: World) -> None:
    task = await world.ask(repeatable=False)
    world.no_responders(world.take(RequestHead)[1])
    world.look(0.1)
    assert not world.bus.sent
    world.put(R1)
    replica, reply, _, _ = world.take(RequestHead)
    assert replica == "1"
    world.ok(reply)
    await task


async def test_a_full_queue_is_refused_at_once(world: World) -> None:
    world.queue = 0
    world.put(R0)
    held = await world.ask()
    assert isinstance(await failure(await world.ask()), NoReplicaAvailable)
    world.ok(world.take(RequestHead)[1])
    await held


async def test_who_waits_too_long_is_told_that_nobody_had_room(world: World) -> None:
    held, waiting = await world.ask(timeout_s=100), await world.ask()
    world.look(TIMEOUT_S - 0.1)
    assert not waiting.done()
    world.look(TIMEOUT_S)
    assert isinstance(await failure(waiting), NoReplicaAvailable)
    world.ok(world.take(RequestHead)[1])
    await held


async def test_a_late_answer_is_a_timeout_and_the_replica_is_told(world: World) -> None:
    task = await world.ask()
    reply = world.take(RequestHead)[1]
    world.look(TIMEOUT_S)
    assert isinstance(await failure(task), DeadlineExceeded)
    assert world.take(CancelHead)[1] == reply
    world.ok(reply)  # nobody listens any more


async def test_a_client_that_goes_away_gives_its_slot_to_the_next(world: World) -> None:
    gone, queued, gone_too, last = [await world.ask() for _ in range(4)]
    reply = world.take(RequestHead)[1]
    gone_too.cancel()
    gone.cancel()
    await asyncio.sleep(0)
    assert world.take(CancelHead)[1] == reply
    world.ok(world.take(RequestHead)[1])
    await queued
    world.ok(world.take(RequestHead)[1])
    await last
    await asyncio.wait([gone, gone_too])


async def test_user_errors_keep_their_status(world: World) -> None:
    task = await world.ask()
    world.answer(world.take(RequestHead)[1], ErrorHead("user_code_raised", 500, "ValueError", 0))
    error = await failure(task)
    assert isinstance(error, ReplicaError)
    assert error.status == 500


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
    clock[0] += 0.2
    world.no_responders(replies[1])
    sent = [frame for frame in world.bus.sent if type(frame[2]) is RequestHead]
    assert sorted(subject.rpartition(".")[2] for subject, *_ in sent) == ["1", "2"]
    assert isinstance(await failure(fragile), ReplicaDied)
    for _, reply, _, _ in sent:
        world.ok(reply)
    await asyncio.gather(repeatable, also)


async def test_a_replica_that_leaves_the_snapshot_loses_its_requests(world: World) -> None:
    task = await world.ask()
    world.take(RequestHead)
    world.put(R1)
    world.take(CancelHead)
    replica, reply, _, _ = world.take(RequestHead)
    assert replica == "1"
    world.ok(reply)
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
    world.ok(world.take(RequestHead)[1])
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
    world.ok(world.take(RequestHead)[1])
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
    world.ok(world.take(RequestHead)[1])
    await task


async def test_after_a_reconnect_everything_under_way_is_probed_at_once(world: World) -> None:
    task = await world.ask(repeatable=False)
    reply = world.take(RequestHead)[1]
    world.dispatcher.bus_reconnected()
    assert world.take(ProbeHead)[1] == reply
    world.no_responders(reply)  # the replica reconnects too: that is no death
    world.ok(reply)
    await task


async def test_a_bus_that_takes_no_more_is_an_error_and_frees_the_slot(world: World) -> None:
    world.bus.is_full = True
    assert isinstance(await failure(await world.ask()), ServeError)


async def test_headers_that_do_not_fit_into_a_frame_are_refused(world: World) -> None:
    assert isinstance(await failure(await world.ask(headers=[("a", "b" * 70_000)])), HeadersTooLarge)


async def test_a_large_body_is_sent_as_far_as_there_is_credit(world: World) -> None:
    body = bytes((WINDOW_FRAMES + 3) * FRAME_BODY_BYTES_MAX + 1)
    task = await world.ask(body)
    _, reply, head, first = world.take(RequestHead)
    assert head.body_bytes == len(body)
    received = first + b"".join(world.take(BodyHead)[3] for _ in range(WINDOW_FRAMES - 1))
    assert not world.bus.sent
    world.answer(reply, CreditHead(2))
    sequences = [world.bus.sent[0][2], world.bus.sent[1][2]]
    assert sequences == [BodyHead(WINDOW_FRAMES, False), BodyHead(WINDOW_FRAMES + 1, False)]
    received += b"".join(world.take(BodyHead)[3] for _ in range(2))
    assert not world.bus.sent
    world.answer(reply, CreditHead(9))
    received += world.take(BodyHead)[3]
    _, _, last, piece = world.take(BodyHead)
    assert last == BodyHead(WINDOW_FRAMES + 3, True)
    assert received + piece == body
    world.ok(reply)
    await task


async def test_an_upload_that_a_reconnect_interrupts_begins_anew(world: World) -> None:
    task = await world.ask(bytes((WINDOW_FRAMES + 2) * FRAME_BODY_BYTES_MAX))
    old = world.take(RequestHead)[1]
    world.bus.sent.clear()
    world.dispatcher.bus_reconnected()
    assert world.take(CancelHead)[1] == old
    new = world.take(RequestHead)[1]
    world.bus.sent.clear()
    world.answer(old, CreditHead(5))
    world.answer(new, CreditHead(5))
    assert {reply for _, reply, _, _ in world.bus.sent} == {new}
    world.ok(new)
    await task


async def test_an_upload_that_a_reconnect_interrupts_may_have_begun_and_runs_once_only(world: World) -> None:
    task = await world.ask(bytes((WINDOW_FRAMES + 2) * FRAME_BODY_BYTES_MAX), repeatable=False)
    world.bus.sent.clear()
    world.dispatcher.bus_reconnected()
    world.take(CancelHead)
    assert isinstance(await failure(task), ReplicaDied)
    assert not world.bus.sent


async def test_a_streamed_answer_is_read_piece_by_piece_and_gives_credit(world: World) -> None:
    task = await world.ask()
    reply = world.take(RequestHead)[1]
    world.answer(reply, ResponseHead(200, [], False, 0), b"0")
    _, answer = await task
    assert answer.stream is not None
    for at in range(1, CREDIT_FRAMES):
        assert await answer.stream.read() == b"0"
        world.answer(reply, BodyHead(at, False), b"0")
    assert await answer.stream.read() == b"0"
    assert not world.bus.sent
    reading = asyncio.get_running_loop().create_task(answer.stream.read())
    await asyncio.sleep(0)
    assert world.take(CreditHead)[2] == CreditHead(CREDIT_FRAMES, 1)
    world.answer(reply, BodyHead(CREDIT_FRAMES, False), b"1")
    assert await reading == b"1"
    world.answer(reply, BodyHead(CREDIT_FRAMES + 1, True), b"2")
    assert world.routes.routers[BACKEND].in_flight == 0  # the replica is done with it
    assert await answer.stream.read() == b"2"
    assert await answer.stream.read() is None
    assert not world.bus.sent


async def test_a_stream_that_breaks_off_says_so_after_what_came(world: World) -> None:
    task = await world.ask(repeatable=True)
    reply = world.take(RequestHead)[1]
    world.answer(reply, ResponseHead(200, [], False, 0), b"0")
    _, answer = await task
    world.answer(reply, RefusedHead("unknown", 0))
    assert await answer.stream.read() == b"0"
    with pytest.raises(ReplicaDied):
        await answer.stream.read()
    assert not world.bus.sent  # a part was seen, so it is not sent again


async def read_all(stream) -> None:
    while await stream.read() is not None:
        pass


async def test_a_lost_or_unasked_piece_ends_the_stream(world: World) -> None:
    for frames, error in (
        ([BodyHead(2, False)], ReplicaDied),
        ([BodyHead(i, False) for i in range(1, 2 * WINDOW_FRAMES)], ResponseUnusable),
        ([ResponseHead(200, [], False, 0)], ResponseUnusable),
    ):
        task = await world.ask()
        reply = world.take(RequestHead)[1]
        world.answer(reply, ResponseHead(200, [], False, 0), b"0")
        _, answer = await task
        for frame in frames:
            world.answer(reply, frame, b"x")
        with pytest.raises(error):
            await read_all(answer.stream)
        assert world.take(CancelHead)[1] == reply
        world.bus.sent.clear()


async def test_abandoning_a_stream_cancels_it_at_the_replica(world: World) -> None:
    task = await world.ask()
    reply = world.take(RequestHead)[1]
    world.answer(reply, ResponseHead(200, [], False, 0), b"0")
    call, _ = await task
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
