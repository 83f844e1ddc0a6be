"""A body on its way: what is sent, what is kept for a second sending, and how much all of them may hold."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Iterator

import pytest

from serve_common.direct.pipes import PipedBytes
from serve_common.dispatch.calls import RequestSpec
from serve_common.dispatch.errors import ResponseUnusable
from serve_common.dispatch.request_body import FAIR_BYTES, RETAINED_BYTES_MAX, RequestBody, UploadMemory
from serve_common.dispatch.sockets import MESSAGE_BYTES_MAX, SocketClosed, SocketMessage
from serve_common.errors import LimitReached, ReplicaDied
from serve_common.names import EndpointTag
from serve_common.nats.options import NotConnected
from serve_common.protocol.frames import (
    CREDIT_FRAMES,
    FRAME_BODY_BYTES_MAX,
    MESSAGE_PART_BYTES_MAX,
    UNKNOWN_BYTES,
    WINDOW_FRAMES,
    WINDOW_MESSAGES,
    AliveHead,
    BodyHead,
    CancelHead,
    CloseHead,
    CreditHead,
    MessageHead,
    ProbeHead,
    RefusedHead,
    RequestHead,
    RequestKind,
    ResponseHead,
)
from serve_common.protocol.streams import (
    CREDIT_PARTS,
    FRAMES_OVER_MAX,
    MessageQueue,
    OutgoingStream,
    RetainedBytes,
)
from serve_common.routing.router import Router
from tests.support.proxy_world import BACKEND, R0, R1, World, emptied, failure

KIB = 1024


def sent(body: RequestBody, start: int = 0) -> list[bytes]:
    pieces: list[bytes] = []
    while (piece := body.piece(start + len(pieces))) is not None:
        pieces.append(piece)
    return pieces


def test_small_pieces_that_wait_leave_together_and_large_ones_are_cut() -> None:
    body = RequestBody(b"a", UploadMemory())
    body.add(b"b")
    assert sent(body) == [b"ab"]
    body.add(bytes(FRAME_BODY_BYTES_MAX + 1))
    assert [len(piece) for piece in sent(body, 1)] == [FRAME_BODY_BYTES_MAX, 1]


def test_a_second_sending_is_cut_as_the_first_was() -> None:
    body = RequestBody(b"a", UploadMemory())
    first = sent(body)
    body.add(b"b")
    first += sent(body, 1)
    assert first == sent(body) == [b"a", b"b"]


def test_the_end_of_an_unknown_body_is_a_piece_of_its_own_when_all_was_sent() -> None:
    body = RequestBody(b"a", UploadMemory())
    assert sent(body) == [b"a"]
    assert not body.is_last(0)
    assert body.announced_bytes == UNKNOWN_BYTES
    body.end()
    assert sent(body, 1) == [b""]
    assert body.is_last(1)
    assert body.announced_bytes == 1


def test_an_announced_body_ends_with_its_last_byte_and_takes_no_more() -> None:
    body = RequestBody(b"a", UploadMemory(), 2)
    assert body.announced_bytes == 2
    body.add(b"b")
    body.add(b"c")
    assert sent(body) == [b"ab"]
    assert body.is_last(0)
    assert body.received_bytes == 2


def test_what_is_taken_is_kept_while_it_is_little() -> None:
    memory = UploadMemory()
    body = RequestBody(bytes(KIB), memory)
    sent(body)
    body.release(1)
    assert body.is_from_start
    assert memory.buffered_bytes == KIB
    body.add(bytes(RETAINED_BYTES_MAX))
    count = 1 + len(sent(body, 1))
    body.release(2)
    assert not body.is_from_start
    assert memory.buffered_bytes == RETAINED_BYTES_MAX - FRAME_BODY_BYTES_MAX
    body.release(count)
    assert memory.buffered_bytes == 0
    assert body.piece(count) is None


def test_nothing_is_kept_that_was_taken_when_all_uploads_together_hold_too_much() -> None:
    memory = UploadMemory(bytes_max=2 * KIB)
    body, other = RequestBody(bytes(KIB), memory), RequestBody(bytes(KIB), memory)
    sent(body)
    body.release(1)
    assert not body.is_from_start
    assert other.is_from_start
    assert memory.buffered_bytes == KIB


def test_closing_gives_everything_back_and_what_still_comes_is_dropped() -> None:
    memory = UploadMemory()
    body = RequestBody(b"abc", memory)
    body.on_more = body.on_failed = lambda *_: None
    sent(body)
    body.close()
    body.close()
    body.add(b"d")
    assert memory.buffered_bytes == 0
    assert body.is_closed
    assert body.on_more is None


async def waits(body: RequestBody) -> asyncio.Task[None]:
    task = asyncio.get_running_loop().create_task(body.wait_for_capacity())
    await asyncio.sleep(0)
    return task


async def test_the_producer_waits_while_a_whole_frame_was_not_sent_yet() -> None:
    body = RequestBody(bytes(FRAME_BODY_BYTES_MAX), UploadMemory())
    producer = await waits(body)
    assert not producer.done()
    sent(body)
    await producer


async def test_the_producer_waits_while_its_replica_takes_nothing() -> None:
    body = RequestBody(bytes(KIB), UploadMemory())
    for _ in range(WINDOW_FRAMES):
        body.add(bytes(FRAME_BODY_BYTES_MAX))
    sent(body)
    producer = await waits(body)
    assert not producer.done()
    body.release(2)
    await producer


async def test_each_may_hold_a_little_however_full_the_room_is_and_the_rest_waits() -> None:
    memory = UploadMemory(bytes_max=8 * FAIR_BYTES)
    large = RequestBody(bytes(8 * FAIR_BYTES - 1), memory)
    small = RequestBody(b"a", memory)
    await (await waits(small))
    small.add(bytes(FAIR_BYTES))
    waiting = [await waits(small), await waits(RequestBody(bytes(FAIR_BYTES), memory))]
    assert not any(task.done() for task in waiting)
    large.close()
    await asyncio.gather(*waiting)


async def test_a_producer_that_nobody_waits_for_any_more_does_not_wait_either() -> None:
    memory = UploadMemory(bytes_max=FRAME_BODY_BYTES_MAX)
    large = RequestBody(bytes(FRAME_BODY_BYTES_MAX), memory)
    gone, other = RequestBody(bytes(FAIR_BYTES), memory), RequestBody(bytes(FAIR_BYTES), memory)
    first, second = await waits(gone), await waits(other)
    gone.close()
    await first
    assert not second.done()
    large.close()
    await second


def test_bodies_are_let_in_while_there_is_room_and_one_always_is() -> None:
    memory = UploadMemory(admitted_bytes_max=100)
    assert memory.admit(1_000), "whatever it needs, an only body is let in"
    assert not memory.admit(1)
    memory.leave(1_000)
    assert memory.admit(60)
    assert memory.admit(40)
    assert not memory.admit(1)
    assert (memory.admitted_bytes, memory.refused) == (100, 2)


def test_an_upload_gets_on_to_its_replicas_credit_however_full_the_room_is() -> None:
    """A replica gives credit for `CREDIT_FRAMES` frames at once: who stops before that waits for ever."""
    memory = UploadMemory(bytes_max=1)
    body = RequestBody(bytes(FAIR_BYTES), memory)
    assert not body.has_space, "it has not been sent"
    at = 0
    while (piece := body.piece(at)) is not None:
        assert piece
        at += 1
        if body.has_space:
            body.add(bytes(FAIR_BYTES))
    assert at == CREDIT_FRAMES
    body.release(CREDIT_FRAMES)
    assert body.has_space


async def test_uploads_that_are_kept_for_a_second_sending_do_not_fill_the_room_for_ever() -> None:
    """Each has sent too little since its replica's last credit to get the next one, which would let go of the rest."""
    memory = UploadMemory(bytes_max=2 * (CREDIT_FRAMES + 1) * FAIR_BYTES)
    bodies = [RequestBody(bytes(FAIR_BYTES), memory) for _ in range(2)]
    for at in range(CREDIT_FRAMES + 1):
        for body in bodies:
            assert len(sent(body, at)) == 1
            if at < CREDIT_FRAMES:
                body.release(at + 1)
                body.add(bytes(FAIR_BYTES))
    assert memory.is_full
    waiting = [await waits(body) for body in bodies]
    async with asyncio.timeout(5):
        await asyncio.gather(*waiting)
    assert [body.piece(CREDIT_FRAMES) is None for body in bodies] == [False, False], (
        "what was not taken is kept"
    )


async def test_what_may_have_to_be_sent_again_from_its_beginning_is_kept_however_full_the_room_is() -> None:
    memory = UploadMemory(bytes_max=2 * FAIR_BYTES)
    body = RequestBody(bytes(FAIR_BYTES), memory)
    first = sent(body)
    body.release(1)
    body.restart()
    body.add(bytes(FAIR_BYTES))
    assert memory.is_full
    producer = await waits(body)
    assert not producer.done()
    assert body.is_from_start
    assert sent(body)[: len(first)] == first
    body.close()
    await producer


# The dispatcher with bodies that are still arriving and with sockets, against a bus made of lists.


class StreamWorld(World):
    """A world whose requests have a body that arrives, or messages."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = UploadMemory()

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
        task = asyncio.get_running_loop().create_task(self._query(ask))
        self.tasks.append(task)
        await asyncio.sleep(0)
        return task

    def upload(self, first: bytes = b"first") -> RequestBody:
        return RequestBody(first, self.memory)

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
    async with emptied(StreamWorld()) as world:
        yield world
    assert world.memory.buffered_bytes == 0


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
    world.serve()
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
    assert [world.take(BodyHead)[3] for _ in range(2)] == [b"1", b"2"]
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


async def test_a_bus_that_goes_away_in_a_body_only_delays_it(world: StreamWorld) -> None:
    def fail(*_args, **_kwargs):
        raise NotConnected("away")

    body = world.upload()
    task = await world.begin(upload=body, repeatable=False)
    reply = world.take(RequestHead)[1]
    publish, world.bus.publish = world.bus.publish, fail
    body.add(b"1")
    world.bus.publish = publish
    world.dispatcher.bus_reconnected()
    world.take(ProbeHead)
    world.answer(reply, AliveHead(1, WINDOW_FRAMES))
    assert world.take(BodyHead)[2:] == (BodyHead(1, False), b"1")
    world.ok(reply)
    await task


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
    world.serve()
    await task
    assert body.is_closed


async def test_a_copy_is_not_made_of_what_can_be_read_only_once(world: StreamWorld) -> None:
    world.put_traffic({BACKEND: 1.0}, {BACKEND: 1.0})
    body = world.upload()
    task = await world.begin(upload=body)
    world.serve()
    await task
    assert not world.bus.sent
    assert not world.shadows.in_flight


async def test_messages_are_cut_and_put_together_and_credit_comes_in_bundles(world: StreamWorld) -> None:
    socket, reply = await world.socket()
    data = bytes(MESSAGE_PART_BYTES_MAX) + b"x"
    assert await socket.send(data, is_text=False)
    assert world.take(MessageHead)[2] == MessageHead(1, False, False)
    assert world.take(MessageHead)[2:] == (MessageHead(2, False, True), b"x")
    world.answer(reply, MessageHead(1, True, False), b"a")
    world.answer(reply, MessageHead(2, True, True), b"b")
    assert await socket.receive() == SocketMessage(True, b"ab")
    bundle = WINDOW_MESSAGES // CREDIT_PARTS
    for n in range(3, bundle + 1):
        assert not world.bus.sent
        world.answer(reply, MessageHead(n, False, True), b"")
        await socket.receive()
    limit = WINDOW_MESSAGES + bundle + 1
    assert world.take(CreditHead)[2] == CreditHead(bundle, limit, limit)
    socket.close(1000, "")
    assert world.take(CloseHead)[2] == CloseHead(1000, "", 3)
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
    world.take(CreditHead)
    assert not world.bus.sent


async def test_a_replica_that_has_closed_learns_that_its_router_has_everything(world: StreamWorld) -> None:
    sender = OutgoingStream(MessageQueue(RetainedBytes()), WINDOW_MESSAGES, first=1)
    socket, reply = await world.socket()
    sender.source.add(b"a", is_text=True)
    sender.source.close_socket(1000, "bye")
    while (frame := sender.next_frame()) is not None:
        world.answer(reply, *frame)
    credit = world.take(CreditHead)[2]
    assert not sender.is_acknowledged
    sender.allow(credit.frames, credit.limit)
    assert sender.is_acknowledged, "else it would wait for a probe before it may end"
    assert await socket.receive() == SocketMessage(True, b"a")
    assert await socket.receive() == SocketClosed(1000, "bye")
    assert not world.bus.sent


async def receive_all(socket) -> None:
    while True:
        await socket.receive()


async def test_an_unasked_frame_ends_a_socket(world: StreamWorld) -> None:
    socket, reply = await world.socket()
    for n in range(WINDOW_MESSAGES + FRAMES_OVER_MAX + 2):
        world.answer(reply, MessageHead(n + 1, False, True), b"")
    assert world.take(CancelHead)[1] == reply
    with pytest.raises(ResponseUnusable):
        await receive_all(socket)


async def test_a_lost_message_and_what_comes_before_a_close_are_asked_for(world: StreamWorld) -> None:
    socket, reply = await world.socket()
    world.answer(reply, MessageHead(2, True, True), b"b")
    assert world.take(ProbeHead)[2].received == 1
    world.answer(reply, MessageHead(1, True, True), b"a")
    world.answer(reply, CloseHead(1000, "", 3))
    assert world.take(ProbeHead)[2].received == 2
    world.answer(reply, MessageHead(2, True, True), b"b")
    world.answer(reply, MessageHead(2, True, True), b"b")
    world.answer(reply, CloseHead(1000, "", 3))
    received = [await socket.receive() for _ in range(3)]
    assert received == [SocketMessage(True, b"a"), SocketMessage(True, b"b"), SocketClosed(1000, "")]


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


async def test_messages_that_the_bus_does_not_take_are_sent_when_it_is_back(world: StreamWorld) -> None:
    socket, reply = await world.socket()
    world.bus.is_connected = False
    assert await socket.send(b"x", is_text=True)
    world.bus.is_connected = True
    world.dispatcher.bus_reconnected()
    assert world.take(ProbeHead)[2] == ProbeHead(0.001, 1, WINDOW_MESSAGES + 1, has_lost=True)
    world.answer(reply, AliveHead(1, WINDOW_MESSAGES + 1))
    assert world.take(MessageHead)[2:] == (MessageHead(1, True, True), b"x")
    socket.close(1000, "")
    world.take(CloseHead)
    held = world.dispatcher._outgoing.retained
    assert held.retained_bytes == 0


async def test_a_refusal_of_a_socket_is_an_answer_and_a_101_to_others_is_none(world: StreamWorld) -> None:
    task = await world.begin(RequestKind.WEBSOCKET)
    world.answer(world.take(RequestHead)[1], ResponseHead(403, [], True, 0), b"no")
    _, answer = await task
    assert (answer.status, bytes(answer.body), answer.socket) == (403, b"no", None)
    task = await world.begin()
    world.answer(world.take(RequestHead)[1], ResponseHead(101, [], True, 0))
    assert (await task)[1].socket is None


class Client:
    """Whose body comes through a pipe."""

    def __init__(self, body: RequestBody) -> None:
        self.body = body
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self.far.setblocking(False)
        assert body.open_pipe()

    def send(self, data: bytes) -> None:
        sent = filled = 0
        while filled < len(data):
            with contextlib.suppress(BlockingIOError):
                sent += self.near.send(data[sent:])
            filled += self.body.fill_pipe(self.far.fileno(), len(data) - filled)

    def close(self) -> None:
        self.near.close()
        self.far.close()
        self.body.close()


def carried(
    link: tuple[socket.socket, socket.socket], piece: bytes | memoryview | PipedBytes | None
) -> bytes:
    """Send ``piece`` to its end; returns what has arrived of it."""
    near, far = link
    assert isinstance(piece, PipedBytes)
    arrived, is_sent = b"", False
    while not is_sent:
        is_sent = piece.send(near.fileno())
        with contextlib.suppress(BlockingIOError):
            arrived += far.recv(10**7)
    with contextlib.suppress(BlockingIOError):
        arrived += far.recv(10**7)
    return arrived


@pytest.fixture
def link() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    yield near, far
    near.close()
    far.close()


def test_a_body_in_a_pipe_is_sent_from_it_and_comes_as_bytes_when_it_is_sent_again(link) -> None:
    memory = UploadMemory()
    body = RequestBody(b"first", memory, 5 + 1100 * KIB)
    data = random.Random(1).randbytes(1100 * KIB)
    assert body.piece(0) == b"first"
    body.takes_pipe = True
    client = Client(body)
    client.send(data[: 200 * KIB])
    assert carried(link, body.piece(1)) == data[: 200 * KIB]
    client.send(data[200 * KIB : 900 * KIB])
    piece = body.piece(2)
    assert isinstance(piece, PipedBytes)
    assert len(piece) == FRAME_BODY_BYTES_MAX
    assert body.piece(3) is None, "it is behind a piece that was not sent"
    client.send(data[900 * KIB :])
    assert memory.buffered_bytes == 5 + 1100 * KIB
    again = [body.piece(number) for number in range(3)]
    assert [bytes(part) for part in again] == [b"first", data[: 200 * KIB], data[200 * KIB :][: len(piece)]]  # type: ignore[arg-type]
    assert not body.takes_pipe
    rest = body.piece(3)
    assert isinstance(rest, PipedBytes)
    assert carried(link, piece) == again[2], "what was begun on a link ends there"
    assert bytes(rest.read()) == data[200 * KIB + len(piece) :]
    assert bytes(body.piece(3)) == bytes(rest.read())  # type: ignore[arg-type]
    assert body.is_last(3)
    client.close()
    assert memory.buffered_bytes == 0


def test_credit_releases_what_a_pipe_retains_and_the_next_piece_follows_when_it_can(link) -> None:
    memory = UploadMemory()
    body = RequestBody(b"x", memory)
    body.takes_pipe = True
    client = Client(body)
    assert body.piece(0) == b"x"
    more: list[bool] = []
    body.on_more = lambda: more.append(True)
    for number in range(1, 40):  # more than a body may have in memory
        client.send(bytes([number]) * FRAME_BODY_BYTES_MAX)
        assert carried(link, body.piece(number)) == bytes([number]) * FRAME_BODY_BYTES_MAX
        body.release(number)
    assert memory.buffered_bytes == FRAME_BODY_BYTES_MAX
    assert body.piece(39) == bytes([39]) * FRAME_BODY_BYTES_MAX
    client.send(b"a" * 10)
    first = body.piece(40)
    client.send(b"b" * 10)
    assert isinstance(first, PipedBytes)
    assert body.piece(41) is None
    more.clear()
    assert carried(link, first) == b"a" * 10
    first.notify()
    assert more
    body.leave_pipe()
    body.add(b"c" * 10)
    assert body.piece(41) == b"b" * 10 + b"c" * 10, "what waits in a pipe is before what comes in memory"
    client.close()
    assert memory.buffered_bytes == 0


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_body_that_ends_early_gives_its_pipe_back_and_ends_what_was_begun(link, *, is_begun: bool) -> None:
    near, _ = link
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 50_000)
    memory = UploadMemory()
    body = RequestBody(b"x", memory)
    client = Client(body)
    data = random.Random(2).randbytes(FRAME_BODY_BYTES_MAX)
    client.send(data)
    assert body.piece(0) == b"x"
    piece = body.piece(1)
    assert isinstance(piece, PipedBytes)
    assert not is_begun or not piece.send(near.fileno())
    client.send(b"more")
    pipe = body._pipe
    client.close()
    assert memory.pipes.take() is pipe
    assert carried(link, piece)[-KIB:] == data[-KIB:]
    assert memory.buffered_bytes == 0
