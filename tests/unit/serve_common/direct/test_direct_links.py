"""Direct links over real sockets of both kinds: what is carried, in which order, who may connect, what ends a link."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from serve_common.direct import listening
from serve_common.direct.dialing import BUSY_REQUESTS, DirectLinks
from serve_common.direct.link import (
    FRAME_BYTES_MAX,
    DirectLink,
    link_token,
)
from serve_common.direct.listening import parse_inbox
from serve_common.direct.pipes import BodyPipe, PipedBytes
from serve_common.direct.writing import CONTROL_TOKEN, PENDING_BYTES_MAX
from serve_common.protocol.frames import (
    FRAME_BODY_BYTES_MAX,
    BodyHead,
    CancelHead,
    Head,
    LinkHead,
    decode_frame,
    encode_frame,
)
from serve_common.runtime.settings import DirectMode
from tests.support.link_world import INBOX, MACHINE, REPLICA, SUBJECT, World, whole_frame, with_links
from tests.support.waiting import eventually


@pytest.fixture
def directory():
    """Short, as paths of sockets must be."""
    with tempfile.TemporaryDirectory(prefix="links-") as name:
        yield Path(name) / "direct"


def paths_in(directory: Path) -> set[Path]:
    return {*directory.iterdir()}


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    """What came before the end, or b"" where the connection was reset."""
    with contextlib.suppress(ConnectionResetError):
        return await asyncio.wait_for(reader.read(), 30)
    return b""


def frame_of(size: int, sequence: int = 1) -> tuple[Head, bytes]:
    return BodyHead(sequence, False), random.Random(size).randbytes(size)


@with_links
async def test_frames_of_every_size_arrive_whole_and_in_order_both_ways(world: World) -> None:
    link = await world.dial()
    sizes = [
        0,
        1,
        4_000,
        5_000,
        16_300,
        16_400,
        65_500,
        65_600,
        FRAME_BODY_BYTES_MAX,
        3,
        FRAME_BODY_BYTES_MAX,
        0,
    ]
    expected = []
    for number, size in enumerate(sizes * 3):
        head, body = frame_of(size, number)
        token = b"%08d" % (number % 5)
        expected.append((token, encode_frame(head, body)))
        if number % 2:
            assert link.send(token, head, body, is_alone=number % 3 == 0)
            assert world.other_end.send_frame(token, encode_frame(head, body))
        else:
            assert link.send_frame(token, encode_frame(head, body))
            assert world.other_end.send(token, head, memoryview(body))
    await eventually(lambda: len(world.taken) == len(world.inbox.delivered) == len(expected))
    for name in {token for token, _ in expected}:  # the frames of different requests may overtake one another
        wanted = [frame for token, frame in expected if token == name]
        assert [frame for _, token, frame in world.taken if token == name] == wanted
        assert [frame for token, frame in world.inbox.delivered if token == name.hex().encode()] == wanted
    assert world.taken[0][0].inbox == INBOX


@pytest.mark.parametrize("step", [1, 7, 64, 1_000, 70_000, 300_000])
async def test_bytes_that_come_in_any_pieces_are_the_same_frames(step: int) -> None:
    taken: list[tuple[bytes, bytes]] = []
    link = DirectLink(
        asyncio.get_running_loop(),
        lambda _link, token, frame: taken.append((token, whole_frame(frame))),
        lambda _link: None,
    )
    sizes = (10, 0, 17_000, FRAME_BODY_BYTES_MAX, 3) if step > 60 else (10, 0, 17_000, 3)
    frames = [(b"%08d" % size, encode_frame(*frame_of(size))) for size in sizes]
    stream = b"".join(len(frame).to_bytes(4, "big") + token + frame for token, frame in frames)
    for at in range(0, len(stream), step):
        piece = memoryview(stream)[at : at + step]
        while piece:
            buffer = link.get_buffer(-1)
            count = min(len(buffer), len(piece))
            buffer[:count] = piece[:count]
            link.buffer_updated(count)
            piece = piece[count:]
    assert taken == frames


@with_links
async def test_a_frame_that_is_too_large_ends_the_link(world: World) -> None:
    await world.dial()
    ticket = world.listener.offer(b"_INBOX.other." + b"0" * 16, MACHINE).ticket
    _, writer = await world.connect()
    writer.write(ticket)
    await eventually(lambda: world.listener.open_links == 2)
    writer.write((FRAME_BYTES_MAX + 1).to_bytes(4, "big") + b"12345678")
    await eventually(lambda: world.listener.open_links == 1)
    assert len(world.ended) == 1
    writer.close()


@with_links
async def test_a_frame_that_is_alone_does_not_wait_for_the_end_of_the_iteration(world: World) -> None:
    link = await world.dial()
    for number in range(3):
        assert link.send(b"noop-000", *frame_of(100, number), is_alone=True)
        assert link.is_tcp or not link.pending_bytes
    assert link.send(b"noop-000", *frame_of(100, 3))
    assert link.send(b"noop-000", *frame_of(100, 4), is_alone=True)  # but not before what waits
    assert link.pending_bytes
    await eventually(lambda: len(world.taken) == 5)
    assert [decode_frame(frame)[0].sequence for _, _, frame in world.taken] == list(range(5))  # type: ignore[union-attr]


@with_links
async def test_a_small_frame_of_another_request_does_not_wait_behind_bodies(world: World) -> None:
    link = await world.dial()
    world.other_end._transport.pause_reading()  # type: ignore[union-attr] - it is open
    for number in range(60):
        link.send(b"upload-1", *frame_of(FRAME_BODY_BYTES_MAX, number))
        link.send(b"upload-2", *frame_of(FRAME_BODY_BYTES_MAX, number))
    await asyncio.sleep(0.01)
    assert link.send(b"noop-000", CancelHead())
    await asyncio.sleep(0.01)
    world.other_end._transport.resume_reading()  # type: ignore[union-attr] - as above
    await eventually(lambda: len(world.taken) == 121)
    tokens = [token for _, token, _ in world.taken]
    assert tokens.index(b"noop-000") < 60, "what the sockets held went first"
    for name in (b"upload-1", b"upload-2"):
        sequences = [decode_frame(frame)[0].sequence for _, token, frame in world.taken if token == name]  # type: ignore[union-attr]
        assert sequences == list(range(60))
    turns = [token for token in tokens[30:] if token != b"noop-000"]
    assert all(one != two for one, two in itertools.pairwise(turns)), "requests take turns"


@with_links
async def test_frames_of_two_threads_all_arrive_in_the_order_of_each_request(world: World) -> None:
    await world.dial()
    link, lock, number_of_each = world.other_end, threading.Lock(), 3_000

    def send(token: bytes) -> None:
        for number in range(number_of_each):
            with lock:
                link.send(token, *frame_of(40_000 if number % 50 == 0 else 10, number))

    threads = [threading.Thread(target=send, args=(b"thread-%d" % number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    send(b"the loop")
    await asyncio.to_thread(lambda: [thread.join() for thread in threads])
    await eventually(lambda: len(world.inbox.delivered) == 3 * number_of_each)
    for token in (b"thread-0", b"thread-1", b"the loop"):
        frames = [frame for name, frame in world.inbox.delivered if name == token.hex().encode()]
        assert [decode_frame(frame)[0].sequence for frame in frames] == list(range(number_of_each))  # type: ignore[union-attr]
    assert link.pending_bytes == 0


@with_links
async def test_a_peer_that_does_not_read_ends_the_link(world: World) -> None:
    link = await world.dial()
    world.other_end._transport.pause_reading()  # type: ignore[union-attr] - it is open
    body = bytes(FRAME_BODY_BYTES_MAX)
    for number in range(PENDING_BYTES_MAX // FRAME_BODY_BYTES_MAX + 10):
        link.send(b"12345678", BodyHead(number, False), body)
    await eventually(lambda: not link.is_open)
    assert not link.send(b"12345678", CancelHead())
    assert world.lost == [link]


@with_links
async def test_a_link_that_ends_is_forgotten_by_both_ends_and_dialled_again(world: World) -> None:
    for _ in range(3):
        link = await world.dial()
        link.send(b"12345678", CancelHead())
        await asyncio.sleep(0.01)
        link._transport.close()  # type: ignore[union-attr] - it is open
        await eventually(lambda: world.links.open_links == world.listener.open_links == 0)
    assert len(world.taken) == 3, "what was written before the end has come"
    assert len(world.lost) == len(world.ended) == 3


@with_links
async def test_a_router_that_dials_again_replaces_its_former_link(world: World) -> None:
    await world.dial()
    former = world.other_end
    ticket = world.listener.offer(INBOX + b"f" * 16, MACHINE).ticket
    _, writer = await world.connect()
    writer.write(ticket + (2).to_bytes(4, "big") + b"12345678" + b"\x00\x00")
    await eventually(lambda: not former.is_open and len(world.taken) == 1)
    assert world.listener.open_links == 1
    writer.close()


@with_links
@pytest.mark.parametrize("first", [b"x" * 32, b"", b"\x00" * 31])
async def test_who_has_no_good_ticket_is_put_out(world: World, first: bytes, monkeypatch) -> None:
    world.listener.offer(INBOX + b"0" * 16, MACHINE)  # while none is out, TCP lets nobody in
    monkeypatch.setattr(listening, "TICKET_S", 0.2)
    reader, writer = await world.connect()
    writer.write(first)
    assert await read_to_end(reader) == b""
    writer.close()
    assert world.listener.open_links == 0


@with_links
async def test_a_ticket_is_good_once_and_for_seconds(world: World, monkeypatch) -> None:
    ticket = world.listener.offer(INBOX + b"0" * 16, MACHINE).ticket
    monkeypatch.setattr(listening, "TICKET_S", 0.1)
    late = world.listener.offer(INBOX + b"1" * 16, MACHINE).ticket
    monkeypatch.undo()
    world.listener.offer(INBOX + b"2" * 16, MACHINE)  # while none is out, TCP lets nobody in
    pairs = [await world.connect() for _ in range(3)]
    await asyncio.sleep(0.15)
    for (_, writer), each in zip(pairs, (ticket, ticket, late), strict=True):
        writer.write(each)
        await asyncio.sleep(0.02)
    for reader, _ in pairs[1:]:
        assert await read_to_end(reader) == b""
    assert await pairs[0][0].readexactly(12) == (0).to_bytes(4, "big") + CONTROL_TOKEN
    assert world.listener.open_links == 1
    for _, writer in pairs:
        writer.close()


async def test_a_process_of_another_user_is_put_out(directory: Path) -> None:
    world = World(directory, uids=(4_000_000,))
    await world.listener.start(world.tasks)
    ticket = world.listener.offer(INBOX + b"0" * 16, MACHINE).ticket
    reader, writer = await world.connect()
    writer.write(ticket)
    assert await read_to_end(reader) == b""
    writer.close()
    assert world.listener.open_links == 0
    await world.listener.close()
    await world.tasks.close(5)


@with_links
async def test_tickets_and_connections_without_one_are_bounded(world: World, monkeypatch) -> None:
    offers = [world.listener.offer(INBOX + b"%016x" % number, MACHINE) for number in range(100)]
    assert sum(bool(offer.ticket) for offer in offers) == listening.TICKETS_MAX
    monkeypatch.setattr(listening, "TICKETS_MAX", 3)
    pairs = [await world.connect() for _ in range(3)]
    for _ in range(2):
        with contextlib.suppress(OSError):  # of the handshake that was cut short
            reader, writer = await world.connect()
            assert await read_to_end(reader) == b""
            writer.close()
    assert len(world.listener._unknown) == 3
    for _, writer in pairs:
        writer.close()


@with_links
async def test_beyond_the_limit_the_link_that_is_idle_longest_ends(world: World, monkeypatch) -> None:
    monkeypatch.setattr(listening, "LINKS_MAX", 3)
    writers = []
    for number in range(4):
        ticket = world.listener.offer(b"_INBOX.r%d." % number + b"0" * 16, MACHINE).ticket
        _, writer = await world.connect()
        writer.write(ticket)
        await eventually(lambda number=number: world.listener.link_to(b"_INBOX.r%d." % number) is not None)
        writers.append(writer)
    assert world.listener.open_links == 3
    assert world.listener.link_to(b"_INBOX.r0.") is None
    for writer in writers:
        writer.close()


@with_links
@pytest.mark.parametrize(
    "reply",
    [
        b"_R_.abc." + b"0" * 16,
        b"_INBOX.p." + b"0" * 15,
        b"_INBOX.p." + b"G" * 16,
        b"",
        b"serve.x." + b"0" * 16,
    ],
)
async def test_only_inboxes_with_tokens_are_offered_a_way(world: World, reply: bytes) -> None:
    assert parse_inbox(reply) is None
    assert world.listener.offer(reply, MACHINE) == LinkHead()


@with_links
async def test_another_machine_is_offered_no_way_and_is_not_asked_again_soon(world: World) -> None:
    world.answer = lambda reply, _machine: world.listener.offer(reply, "another")
    for _ in range(3):
        world.links.for_request(REPLICA, SUBJECT, is_large=True)
        await eventually(lambda: not world.links._dials)
    assert (len(world.dialled), world.links.failed) == (1, 1)
    world.links._not_before.clear()
    world.is_bus_away = True
    world.links.for_request(REPLICA, SUBJECT, is_large=True)
    await eventually(lambda: world.links.failed == 2)
    assert world.inbox.receivers == {}


@with_links
async def test_what_is_small_takes_the_bus_unless_all_is_direct(world: World) -> None:
    for _ in range(2 * BUSY_REQUESTS):
        assert world.links.for_request(REPLICA, SUBJECT, is_large=False) is None
    assert world.dialled == []
    await world.dial()
    assert world.links.for_request(REPLICA, SUBJECT, is_large=False) is None
    for mode, dials in ((DirectMode.OFF, 0), (DirectMode.ALL, 1)):
        links = DirectLinks(mode, world.inbox, world._publish, world.lost.append, machine=MACHINE)
        for _ in range(BUSY_REQUESTS):
            assert links.for_request(REPLICA, SUBJECT, is_large=False) is None
        assert not links._dials
        links.for_request(REPLICA, SUBJECT, is_large=mode is DirectMode.OFF)
        assert len(links._dials) == dials
        if dials:
            await eventually(lambda links=links: links.open_links == 1)
            assert links.for_request(REPLICA, SUBJECT, is_large=False) is not None
        await links.close()


@with_links
async def test_links_that_are_idle_end(world: World, monkeypatch) -> None:
    await world.dial()
    world.links.sweep()
    assert world.links.open_links == 1
    monkeypatch.setattr("serve_common.direct.dialing.IDLE_S", -1.0)
    world.links.sweep()
    assert world.links.open_links == 0
    await eventually(lambda: world.listener.open_links == 0)


async def test_sockets_of_killed_replicas_are_removed_and_those_of_others_are_not(directory: Path) -> None:
    world = World(directory)
    await world.listener.start(world.tasks)
    other = directory / "a file"
    other.write_text("")
    dead = [directory / f"dead{number}" for number in range(3)]
    for path in dead:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
    for path in (*dead[:2], other, world.listener._path):
        os.utime(path, (1, 1))
    second = World(directory)
    await second.listener.start(second.tasks)
    assert paths_in(directory) == {dead[2], other, world.listener._path, second.listener._path}
    await second.close()
    await world.close()
    dead[2].unlink()
    other.unlink()


def test_a_token_is_the_end_of_a_reply_subject() -> None:
    assert link_token(b"_INBOX.p.0123456789abcdef") == bytes.fromhex("0123456789abcdef")


@with_links
async def test_a_small_frame_is_sent_at_once_by_any_thread_where_nothing_waits(world: World) -> None:
    await world.dial()
    link = world.other_end
    sent = await asyncio.to_thread(link.send_now, [(b"%08d" % 1, b"one"), (b"%08d" % 2, b"two")])
    assert sent is not link.is_tcp  # TLS is the loop's
    if sent:
        await eventually(lambda: len(world.inbox.delivered) == 2)
        assert [frame for _, frame in world.inbox.delivered] == [b"one", b"two"]
    assert link.send_frame(b"%08d" % 3, b"three")
    assert not link.send_now([(b"%08d" % 4, b"four")]), "the loop has yet to write"
    link.close()
    assert not link.send_now([(b"%08d" % 4, b"four")])


@with_links
async def test_frames_that_threads_send_at_once_and_large_ones_of_the_loop_do_not_mix(world: World) -> None:
    await world.dial()
    link = world.other_end
    small, large = [b"%05d" % number * 100 for number in range(3_000)], random.Random(1).randbytes(100_000)
    sent_now = 0

    def send() -> None:
        nonlocal sent_now
        for frame in small:
            if link.send_now([(b"s" * 8, frame)]):
                sent_now += 1
            else:
                assert link.send_frame(b"s" * 8, frame)

    thread = threading.Thread(target=send)
    thread.start()
    sent = 0
    while thread.is_alive():
        assert link.send_frame(b"l" * 8, large)
        sent += 1
        await asyncio.sleep(0)
        await eventually(lambda: link.pending_bytes < 1_000_000, every_s=0.001)
    thread.join()
    await eventually(lambda: len(world.inbox.delivered) == sent + len(small))
    assert all(frame == large for token, frame in world.inbox.delivered if token == (b"l" * 8).hex().encode())
    got = [frame for token, frame in world.inbox.delivered if token == (b"s" * 8).hex().encode()]
    assert sorted(got) == small
    assert (sent_now > 0) is not link.is_tcp


@with_links
async def test_a_link_that_only_receives_is_in_use(world: World) -> None:
    link = await world.dial()
    world.other_end.last_received_at = world.other_end._writer.last_written_at = 0.0
    assert link.send_frame(b"%08d" % 1, b"one")
    await eventually(lambda: world.taken)
    assert world.other_end.last_used_at > 0.0


@with_links
async def test_a_replica_that_leaves_reads_and_answers_all_that_its_router_has_sent(world: World) -> None:
    link = await world.dial()
    end = world.other_end
    sizes = [10, 100_000, 10, FRAME_BODY_BYTES_MAX, 20] * 4
    for number, size in enumerate(sizes):
        assert link.send(b"%08d" % number, *frame_of(size))
    await world.listener.drain(30)
    assert {token for _, token, _ in world.taken} >= {b"%08d" % number for number in range(len(sizes))}
    assert (link.has_parted, end.has_parted, world.ended) == (True, True, [end])
    assert world.links.open_links == 0
    assert world.lost == [link], "its requests take the bus"
    await eventually(lambda: not link.is_open)
    assert world.lost == [link]
    assert world.links.for_request(REPLICA, SUBJECT, is_large=True) is None
    assert world.dialled == [SUBJECT], "a replica that leaves is not dialled again"


@with_links
async def test_a_link_whose_router_hangs_is_ended_in_the_end(world: World) -> None:
    link = await world.dial()
    end = world.other_end
    assert link._transport is not None
    link._transport.pause_reading()
    await world.listener.drain(0.2)
    assert (world.ended, end.has_parted) == ([end], False)
    link._transport.resume_reading()
    await eventually(lambda: world.lost == [link])


@with_links
async def test_a_replica_that_leaves_accepts_no_more_links(world: World) -> None:
    ticket = world.listener.offer(INBOX + b"0" * 16, MACHINE).ticket
    _, writer = await world.connect()
    await eventually(lambda: world.listener._unknown)
    await world.listener.drain(30)
    assert world.listener.offer(INBOX + b"0" * 16, MACHINE) == LinkHead()
    with contextlib.suppress(ConnectionError):
        writer.write(ticket)
        await writer.drain()
    assert world.listener.open_links == 0
    with pytest.raises((FileNotFoundError, ConnectionRefusedError)):
        await world.connect()
    writer.close()


async def piped(data: bytes, pipe: BodyPipe) -> PipedBytes:
    """``data`` as a piece in ``pipe``, which a client has sent."""
    client, source = socket.socketpair()
    client.setblocking(False)
    source.setblocking(False)
    sent = filled = 0
    while filled < len(data):
        with contextlib.suppress(BlockingIOError):
            sent += client.send(data[sent:])
        filled += pipe.fill(source.fileno(), len(data) - filled)
    client.close()
    source.close()
    piece = pipe.cut(len(data))
    assert isinstance(piece, PipedBytes)
    return piece


@with_links
async def test_bodies_in_pipes_arrive_whole_among_other_frames(world: World) -> None:
    link = await world.dial()
    assert link.splices is not link.is_tcp
    chance, expected, pipes = random.Random(7), dict[bytes, list[bytes]](), [BodyPipe() for _ in range(4)]
    free = {number: asyncio.Event() for number in range(len(pipes))}
    for number, pipe in enumerate(pipes):
        pipe.on_free = free[number].set

    async def upload(number: int) -> None:
        token, pipe = b"upload-%d" % number, pipes[number]
        for sequence in range(12):
            data = chance.randbytes(chance.choice([1, 5_000, 100_000, FRAME_BODY_BYTES_MAX]))
            head = BodyHead(sequence, False)
            expected.setdefault(token, []).append(encode_frame(head, data))
            free[number].clear()
            piece = await piped(data, pipe)
            assert link.send(token, head, piece)
            small = CancelHead(), b"%d" % sequence
            expected.setdefault(b"small--%d" % number, []).append(encode_frame(*small))
            assert link.send(b"small--%d" % number, *small)
            while pipe._piece is not None:
                await asyncio.wait_for(free[number].wait(), 20)
            pipe.release(len(data)) if chance.random() < 0.5 else pipe.read_retained(len(data))
            await asyncio.sleep(0)

    await asyncio.gather(*(upload(number) for number in range(len(pipes))))
    await eventually(lambda: len(world.taken) == sum(map(len, expected.values())))
    for token, frames in expected.items():
        assert [frame for _, name, frame in world.taken if name == token] == frames
    assert link.is_written
    assert link.pending_bytes == 0
    for pipe in pipes:
        pipe.close()


def narrow(link: DirectLink) -> None:
    """Let the link's socket hold little."""
    if not link.is_tcp:
        with socket.socket(fileno=os.dup(link._writer._descriptor)) as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 100_000)


@with_links
async def test_a_body_in_a_pipe_waits_for_a_reader_that_is_slow_and_others_behind_it(world: World) -> None:
    link, pipe = await world.dial(), BodyPipe()
    world.other_end._transport.pause_reading()  # type: ignore[union-attr] - it is open
    narrow(link)
    uploads = 12 if link.is_tcp else 6
    for number in range(uploads):
        link.send(b"upload-1", *frame_of(FRAME_BODY_BYTES_MAX, number))
    await asyncio.sleep(0.01)
    data = random.Random(8).randbytes(FRAME_BODY_BYTES_MAX)
    assert link.send(b"upload-2", BodyHead(1, True), await piped(data, pipe))
    assert link.send(b"noop-000", CancelHead())
    await asyncio.sleep(0.01)
    assert not link.is_written
    world.other_end._transport.resume_reading()  # type: ignore[union-attr] - as above
    await eventually(lambda: len(world.taken) == uploads + 2)
    frames = {token: frame for _, token, frame in world.taken}
    assert frames[b"upload-2"] == encode_frame(BodyHead(1, True), data)
    assert next(iter(frames)) == b"upload-1", "what the socket held"
    tokens = [token for _, token, _ in world.taken]
    assert tokens.index(b"noop-000") < tokens.index(b"upload-2") < len(tokens) - 1
    pipe.close()


@with_links
async def test_a_link_that_ends_in_the_middle_of_a_body_in_a_pipe_leaves_it_to_be_sent_again(
    world: World,
) -> None:
    link, pipe = await world.dial(), BodyPipe()
    world.other_end._transport.pause_reading()  # type: ignore[union-attr] - it is open
    narrow(link)
    data = random.Random(9).randbytes(3 * FRAME_BODY_BYTES_MAX)
    for at in range(0, len(data), FRAME_BODY_BYTES_MAX):
        piece = await piped(data[at : at + FRAME_BODY_BYTES_MAX], pipe)
        link.send(b"upload-1", BodyHead(at, False), piece)
        if pipe._piece is not None:
            break
    else:
        assert link.is_tcp
        return
    link.close()
    assert not link.send(b"upload-1", BodyHead(9, True), piece)
    held = at + FRAME_BODY_BYTES_MAX
    assert pipe.read_retained(held) == data[:held]
    assert pipe.uncut_bytes == 0
    pipe.close()
