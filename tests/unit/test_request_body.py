"""A body on its way: what is sent, what is kept for a second sending, and how much all of them may hold."""

from __future__ import annotations

import asyncio

from serve_common.dispatch.request_body import FAIR_BYTES, RETAINED_BYTES_MAX, RequestBody, UploadMemory
from serve_common.protocol.frames import CREDIT_FRAMES, FRAME_BODY_BYTES_MAX, UNKNOWN_BYTES, WINDOW_FRAMES

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
    room = UploadMemory()
    body = RequestBody(bytes(KIB), room)
    sent(body)
    body.release(1)
    assert body.is_from_start
    assert room.held_bytes == KIB
    body.add(bytes(RETAINED_BYTES_MAX))
    count = 1 + len(sent(body, 1))
    body.release(2)
    assert not body.is_from_start
    assert room.held_bytes == RETAINED_BYTES_MAX - FRAME_BODY_BYTES_MAX
    body.release(count)
    assert room.held_bytes == 0
    assert body.piece(count) is None


def test_nothing_is_kept_that_was_taken_when_all_uploads_together_hold_too_much() -> None:
    room = UploadMemory(bytes_max=2 * KIB)
    body, other = RequestBody(bytes(KIB), room), RequestBody(bytes(KIB), room)
    sent(body)
    body.release(1)
    assert not body.is_from_start
    assert other.is_from_start
    assert room.held_bytes == KIB


def test_closing_gives_everything_back_and_what_still_comes_is_dropped() -> None:
    room = UploadMemory()
    body = RequestBody(b"abc", room)
    body.on_more = body.on_failed = lambda *_: None
    sent(body)
    body.close()
    body.close()
    body.add(b"d")
    assert room.held_bytes == 0
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
    for _ in range(2 * WINDOW_FRAMES):
        body.add(bytes(FRAME_BODY_BYTES_MAX))
    sent(body)
    producer = await waits(body)
    assert not producer.done()
    body.release(2)
    await producer


async def test_each_may_hold_a_little_however_full_the_room_is_and_the_rest_waits() -> None:
    room = UploadMemory(bytes_max=8 * FAIR_BYTES)
    large = RequestBody(bytes(8 * FAIR_BYTES - 1), room)
    small = RequestBody(b"a", room)
    await (await waits(small))
    small.add(bytes(FAIR_BYTES))
    waiting = [await waits(small), await waits(RequestBody(bytes(FAIR_BYTES), room))]
    assert not any(task.done() for task in waiting)
    large.close()
    await asyncio.gather(*waiting)


async def test_a_producer_that_nobody_waits_for_any_more_does_not_wait_either() -> None:
    room = UploadMemory(bytes_max=FRAME_BODY_BYTES_MAX)
    large = RequestBody(bytes(FRAME_BODY_BYTES_MAX), room)
    gone, other = RequestBody(bytes(FAIR_BYTES), room), RequestBody(bytes(FAIR_BYTES), room)
    first, second = await waits(gone), await waits(other)
    gone.close()
    await first
    assert not second.done()
    large.close()
    await second


def test_bodies_are_let_in_while_there_is_room_and_one_always_is() -> None:
    room = UploadMemory(admitted_bytes_max=100)
    assert room.admit(1_000), "whatever it needs, an only body is let in"
    assert not room.admit(1)
    room.leave(1_000)
    assert room.admit(60)
    assert room.admit(40)
    assert not room.admit(1)
    assert (room.admitted_bytes, room.refused) == (100, 2)


def test_an_upload_gets_on_to_its_replicas_credit_however_full_the_room_is() -> None:
    """A replica gives credit for `CREDIT_FRAMES` frames at once: who stops before that waits for ever."""
    room = UploadMemory(bytes_max=1)
    body = RequestBody(bytes(FAIR_BYTES), room)
    assert not body.has_room, "it has not been sent"
    at = 0
    while (piece := body.piece(at)) is not None:
        assert piece
        at += 1
        if body.has_room:
            body.add(bytes(FAIR_BYTES))
    assert at == CREDIT_FRAMES
    body.release(CREDIT_FRAMES)
    assert body.has_room


async def test_uploads_that_are_kept_for_a_second_sending_do_not_fill_the_room_for_ever() -> None:
    """Each has sent too little since its replica's last credit to get the next one, which would let go of the rest."""
    room = UploadMemory(bytes_max=2 * (CREDIT_FRAMES + 1) * FAIR_BYTES)
    bodies = [RequestBody(bytes(FAIR_BYTES), room) for _ in range(2)]
    for at in range(CREDIT_FRAMES + 1):
        for body in bodies:
            assert len(sent(body, at)) == 1
            if at < CREDIT_FRAMES:
                body.release(at + 1)
                body.add(bytes(FAIR_BYTES))
    assert room.is_full
    waiting = [await waits(body) for body in bodies]
    async with asyncio.timeout(5):
        await asyncio.gather(*waiting)
    assert [body.piece(CREDIT_FRAMES) is None for body in bodies] == [False, False], (
        "what was not taken is kept"
    )


async def test_what_may_have_to_be_sent_again_from_its_beginning_is_kept_however_full_the_room_is() -> None:
    room = UploadMemory(bytes_max=2 * FAIR_BYTES)
    body = RequestBody(bytes(FAIR_BYTES), room)
    first = sent(body)
    body.release(1)
    body.restart()
    body.add(bytes(FAIR_BYTES))
    assert room.is_full
    producer = await waits(body)
    assert not producer.done()
    assert body.is_from_start
    assert sent(body)[: len(first)] == first
    body.close()
    await producer
