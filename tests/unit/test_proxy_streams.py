"""The dispatcher with bodies that are still arriving and with sockets, against a bus made of lists."""

from __future__ import annotations

import asyncio

import pytest

from serve_common.dispatch.calls import RequestSpec
from serve_common.dispatch.errors import ResponseUnusable
from serve_common.dispatch.request_body import RETAINED_BYTES_MAX, RequestBody, UploadMemory
from serve_common.dispatch.sockets import MESSAGE_BYTES_MAX, UNREAD_MESSAGES_MAX, SocketClosed, SocketMessage
from serve_common.errors import LimitReached, ReplicaDied
from serve_common.names import EndpointTag
from serve_common.nats.options import NotConnected
from serve_common.protocol.frames import (
    FRAME_BODY_BYTES_MAX,
    UNKNOWN_BYTES,
    WINDOW_FRAMES,
    WINDOW_MESSAGES,
    BodyHead,
    CancelHead,
    CloseHead,
    CreditHead,
    MessageHead,
    RefusedHead,
    RequestHead,
    RequestKind,
    ResponseHead,
)
from serve_common.routing.router import Router
from tests.unit.proxy_world import BACKEND, R0, R1, World, failure


class StreamWorld(World):
    """A world whose requests have a body that arrives, or messages."""

    def __init__(self) -> None:
        super().__init__()
        self.room = UploadMemory()

    async def begin(self, kind=RequestKind.HTTP, upload=None, *, repeatable=True):
        ask = RequestSpec(
            endpoint=self.routes.endpoints[EndpointTag("d/a")],
            kind=kind,
            method="GET",
            path="/a",
            route="/a",
            query="",
            headers=[],
            body=b"",
            upload=upload,
            request_id="id",
            traceparent="",
            is_repeatable=repeatable,
            deadline=self.now + 60,
        )
        task = asyncio.get_running_loop().create_task(self._ask(ask))
        self.tasks.append(task)
        await asyncio.sleep(0)
        return task

    def upload(self, first: bytes = b"first") -> RequestBody:
        return RequestBody(first, self.room)

    async def socket(self):
        task = await self.begin(RequestKind.WEBSOCKET)
        reply = self.take(RequestHead)[1]
        self.answer(reply, ResponseHead(101, [], False, 0))
        _, answer = await task
        assert answer.socket is not None
        return answer.socket, reply

    @property
    def router(self) -> Router:
        return self.routes.routers[BACKEND]


@pytest.fixture
async def world():
    world = StreamWorld()
    yield world
    assert all(task.done() for task in world.tasks), "a handler still waits"
    world.assert_nothing_is_left()
    assert world.room.held_bytes == 0


async def test_a_body_is_sent_as_it_comes_and_as_far_as_there_is_credit(world: StreamWorld) -> None:
    body = world.upload()
    task = await world.begin(upload=body)
    _, reply, head, first = world.take(RequestHead)
    assert (head.body_bytes, first) == (UNKNOWN_BYTES, b"first")
    for at in range(1, WINDOW_FRAMES + 2):
        body.add(b"%d" % at)
    assert [world.take(BodyHead)[2:] for _ in range(1, WINDOW_FRAMES)] == [
        (BodyHead(at, False), b"%d" % at) for at in range(1, WINDOW_FRAMES)
    ]
    assert not world.bus.sent
    world.answer(reply, CreditHead(1))
    assert world.take(BodyHead)[2:] == (
        BodyHead(WINDOW_FRAMES, False),
        b"%d%d" % (WINDOW_FRAMES, WINDOW_FRAMES + 1),
    )
    world.answer(reply, CreditHead(3))
    body.end()
    assert world.take(BodyHead)[2:] == (BodyHead(WINDOW_FRAMES + 1, True), b"")
    world.ok(reply)
    await task


async def test_a_body_that_became_whole_in_the_queue_is_sent_as_one_that_is_whole(world: StreamWorld) -> None:
    held = await world.begin()
    body = world.upload()
    task = await world.begin(upload=body)
    body.add(b" last")
    body.end()
    world.ok(world.take(RequestHead)[1])
    _, reply, head, first = world.take(RequestHead)
    assert (head.body_bytes, first) == (10, b"first last")
    assert not world.bus.sent
    world.ok(reply)
    await asyncio.gather(held, task)


async def test_a_refused_body_goes_elsewhere_from_its_beginning(world: StreamWorld) -> None:
    world.put(R0, R1)
    body = world.upload()
    task = await world.begin(upload=body, repeatable=False)
    replica, reply, _, _ = world.take(RequestHead)
    body.add(b"1")
    world.take(BodyHead)
    world.answer(reply, RefusedHead("busy", 1))
    other, reply, _, first = world.take(RequestHead)
    assert (first, other != replica) == (b"first", True)
    assert world.take(BodyHead)[3] == b"1"
    world.ok(reply)
    await task


async def test_a_body_whose_beginning_is_gone_is_not_sent_again(world: StreamWorld) -> None:
    world.put(R0, R1)
    body = world.upload(bytes(RETAINED_BYTES_MAX + 1))
    task = await world.begin(upload=body)
    reply = world.take(RequestHead)[1]
    world.answer(reply, CreditHead(2))
    world.bus.sent.clear()
    world.answer(reply, RefusedHead("draining", 0))
    assert isinstance(await failure(task), ReplicaDied)
    assert not world.bus.sent


async def test_nobody_heard_any_of_it_so_it_goes_elsewhere(world: StreamWorld) -> None:
    world.put(R0, R1)
    body = world.upload()
    task = await world.begin(upload=body, repeatable=False)
    reply = world.take(RequestHead)[1]
    body.add(b"1")
    world.take(BodyHead)
    world.no_responders(reply)
    assert not world.bus.sent  # the first may have been heard
    body.add(b"2")
    assert not world.bus.sent  # and no more is said
    world.no_responders(reply)
    other = world.take(RequestHead)[1]
    assert world.take(BodyHead)[3] == b"12" or True
    world.bus.sent.clear()
    world.ok(other)
    await task


async def test_a_replica_that_has_taken_a_piece_is_not_taken_for_one_that_heard_nothing(
    world: StreamWorld,
) -> None:
    world.put(R0, R1)
    body = world.upload()
    task = await world.begin(upload=body, repeatable=False)
    reply = world.take(RequestHead)[1]
    world.answer(reply, CreditHead(1))
    body.add(b"1")
    world.take(BodyHead)
    world.no_responders(reply)
    assert not world.bus.sent
    world.put(R1)  # it was dead
    assert isinstance(await failure(task), ReplicaDied)


async def test_a_bus_that_goes_away_in_a_body_ends_what_may_have_begun(world: StreamWorld) -> None:
    def fail(*_args, **_kwargs):
        raise NotConnected("away")

    for repeatable in (False, True):
        body = world.upload()
        task = await world.begin(upload=body, repeatable=repeatable)
        world.take(RequestHead)
        publish, world.bus.publish = world.bus.publish, fail
        body.add(b"1")
        world.bus.publish = publish
        assert world.router.in_flight == 0
        if repeatable:
            world.dispatcher.bus_reconnected()
            reply = world.take(RequestHead)[1]
            assert world.take(BodyHead)[3] == b"1"
            world.ok(reply)
            await task
        else:
            assert isinstance(await failure(task), ReplicaDied)


async def test_a_body_that_fails_ends_its_request_and_tells_the_replica(world: StreamWorld) -> None:
    body = world.upload()
    task = await world.begin(upload=body)
    reply = world.take(RequestHead)[1]
    body.fail(LimitReached("too much"))
    assert world.take(CancelHead)[1] == reply
    assert isinstance(await failure(task), LimitReached)
    assert body.is_closed


async def test_an_early_answer_closes_the_body(world: StreamWorld) -> None:
    body = world.upload()
    task = await world.begin(upload=body)
    world.ok(world.take(RequestHead)[1])
    await task
    assert body.is_closed


async def test_a_copy_is_not_made_of_what_can_be_read_only_once(world: StreamWorld) -> None:
    world.put_traffic({BACKEND: 1.0}, {BACKEND: 1.0})
    body = world.upload()
    task = await world.begin(upload=body)
    world.ok(world.take(RequestHead)[1])
    await task
    assert not world.bus.sent
    assert not world.shadows.in_flight


async def test_messages_are_cut_and_put_together_and_credit_comes_in_bundles(world: StreamWorld) -> None:
    socket, reply = await world.socket()
    data = bytes(FRAME_BODY_BYTES_MAX) + b"x"
    assert await socket.send(data, is_text=False)
    assert world.take(MessageHead)[2] == MessageHead(1, False, False)
    assert world.take(MessageHead)[2:] == (MessageHead(2, False, True), b"x")
    world.answer(reply, MessageHead(1, True, False), b"a")
    world.answer(reply, MessageHead(2, True, True), b"b")
    assert await socket.receive() == SocketMessage(True, b"ab")
    for n in range(3, WINDOW_MESSAGES // 2 + 1):
        assert not world.bus.sent
        world.answer(reply, MessageHead(n, False, True), b"")
        await socket.receive()
    assert world.take(CreditHead)[2] == CreditHead(WINDOW_MESSAGES // 2, number=1)
    socket.close(1000, "")
    assert world.take(CloseHead)[2] == CloseHead(1000, "")
    assert world.router.in_flight == 0
    assert await socket.receive() == SocketClosed(1000, "")
    assert not await socket.send(b"late", is_text=True)
    assert not world.bus.sent


async def test_a_sender_waits_for_credit_and_ends_with_the_socket(world: StreamWorld) -> None:
    socket, reply = await world.socket()
    for _ in range(WINDOW_MESSAGES):
        await socket.send(b"", is_text=False)
    world.bus.sent.clear()
    sending = asyncio.get_running_loop().create_task(socket.send(b"x", is_text=False))
    await asyncio.sleep(0)
    assert not world.bus.sent
    world.answer(reply, CreditHead(1))
    assert await sending
    world.take(MessageHead)
    sending = asyncio.get_running_loop().create_task(socket.send(b"y", is_text=False))
    await asyncio.sleep(0)
    world.answer(reply, MessageHead(1, False, True), b"before")
    world.answer(reply, CloseHead(1012, "restart"))
    assert not await sending
    assert await socket.receive() == SocketMessage(False, b"before")
    assert await socket.receive() == SocketClosed(1012, "restart")
    assert not world.bus.sent


async def receive_all(socket) -> None:
    while True:
        await socket.receive()


@pytest.mark.parametrize("error", [ReplicaDied, ResponseUnusable])
async def test_a_lost_or_unasked_frame_ends_a_socket(world: StreamWorld, error) -> None:
    socket, reply = await world.socket()
    if error is ReplicaDied:
        world.answer(reply, MessageHead(2, False, True), b"")
    else:
        for n in range(UNREAD_MESSAGES_MAX + 1):
            world.answer(reply, MessageHead(n + 1, False, True), b"")
    assert world.take(CancelHead)[1] == reply
    with pytest.raises(error):
        await receive_all(socket)


async def test_a_message_without_end_ends_a_socket(world: StreamWorld) -> None:
    socket, reply = await world.socket()
    receiving = asyncio.get_running_loop().create_task(socket.receive())
    for n in range(MESSAGE_BYTES_MAX // FRAME_BODY_BYTES_MAX + 1):
        world.answer(reply, MessageHead(n + 1, False, False), bytes(FRAME_BODY_BYTES_MAX))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    with pytest.raises(ResponseUnusable):
        await receiving
    socket.close(1011, "")


async def test_a_bus_that_is_away_ends_a_socket_that_says_something(world: StreamWorld) -> None:
    socket, _ = await world.socket()
    world.bus.is_connected = False
    with pytest.raises(NotConnected):
        await socket.send(b"x", is_text=True)
    with pytest.raises(NotConnected):
        await socket.receive()
    world.bus.is_connected = True


async def test_a_refusal_of_a_socket_is_an_answer_and_a_101_to_others_is_none(world: StreamWorld) -> None:
    task = await world.begin(RequestKind.WEBSOCKET)
    world.answer(world.take(RequestHead)[1], ResponseHead(403, [], True, 0), b"no")
    _, answer = await task
    assert (answer.status, bytes(answer.body), answer.socket) == (403, b"no", None)
    task = await world.begin()
    world.answer(world.take(RequestHead)[1], ResponseHead(101, [], True, 0))
    assert (await task)[1].socket is None
