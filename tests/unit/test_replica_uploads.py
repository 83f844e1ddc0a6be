"""Bodies that come in pieces: read as they come, with credit for what was read and no more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from serve_common.protocol.frames import WINDOW_FRAMES, BodyHead, CancelHead, ErrorHead, RequestKind
from serve_replica_host.replica.io.protocol import REQUEST_BODY_BYTES_MAX
from tests.unit.replica_rig import PIECE, UNKNOWN, Rig

FRAMES = WINDOW_FRAMES * 5


async def test_an_async_handler_reads_a_body_of_unknown_size_while_it_comes() -> None:
    read: list[bytes] = []
    has_read = asyncio.Event()

    async def handler(request: Request) -> int:
        async for piece in request.stream():
            read.append(piece)
            has_read.set()
        return sum(map(len, read))

    rig = Rig(handler)
    request = rig.begin(first=b"one", body_bytes=UNKNOWN)
    await asyncio.wait_for(has_read.wait(), 30)
    assert read == [b"one"]
    await request.upload([b"two"], ends=False)
    await request.upload([b"", b"three"])

    answer = await request.answer()

    assert (answer.status, answer.body) == (200, b"11")
    await rig.idle()


async def test_a_slow_reader_holds_the_router_back_and_memory_is_bounded() -> None:
    go = asyncio.Event()
    total = 0

    async def handler(request: Request) -> int:
        nonlocal total
        stream = request.stream()
        total += len(await anext(stream))
        await go.wait()
        async for piece in stream:
            total += len(piece)
        return total

    rig = Rig(handler)
    request = rig.begin(first=PIECE, body_bytes=FRAMES * len(PIECE))
    async with asyncio.TaskGroup() as group:
        upload = group.create_task(request.upload([PIECE] * (FRAMES - 1)))
        done, _ = await asyncio.wait([upload], timeout=0.05)
        assert not done
        assert request.sequence <= WINDOW_FRAMES + 1
        go.set()
        answer = await request.answer()

    assert int(answer.body) == FRAMES * len(PIECE)


async def test_a_plain_function_gets_the_whole_body() -> None:
    seen: list[Any] = []

    def handler(request: Request) -> str:
        seen.append(asyncio.run(_whole(request)))
        return "ok"

    async def _whole(request: Request) -> bytes:
        return await request.body()

    rig = Rig(handler)
    request = rig.begin(first=b"ab", body_bytes=UNKNOWN)
    await asyncio.sleep(0)
    assert seen == []
    await request.upload([b"cd", b"ef"])

    assert (await request.answer()).body == b"ok"
    assert seen == [b"abcdef"]
    rig.code.discard()


async def test_plain_calls_are_limited_in_size_also_when_it_was_not_said() -> None:
    rig = Rig(lambda argument: argument)
    request = rig.begin(kind=RequestKind.CALL, first=PIECE, body_bytes=UNKNOWN)
    pieces = REQUEST_BODY_BYTES_MAX // len(PIECE)
    await request.upload([PIECE] * pieces, ends=False)

    answer = await request.answer()

    assert answer.status == 413
    await rig.idle()


async def test_an_answer_may_come_before_the_end_of_the_body() -> None:
    async def handler(request: Request) -> str:
        await anext(request.stream())
        return "enough"

    rig = Rig(handler)
    request = rig.begin(first=b"one", body_bytes=UNKNOWN)

    answer = await request.answer()
    request.send(BodyHead(1, False), b"two")
    request.send(BodyHead(2, True), b"three")

    assert answer.body == b"enough"
    assert request.is_silent
    await rig.idle()


async def test_the_callers_leaving_ends_the_reading() -> None:
    ended: list[str] = []
    reading = asyncio.Event()

    async def handler(request: Request) -> None:
        try:
            async for _ in request.stream():
                reading.set()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    rig = Rig(handler)
    request = rig.begin(first=b"one", body_bytes=UNKNOWN)
    await asyncio.wait_for(reading.wait(), 30)
    request.send(CancelHead())
    await rig.idle()

    assert ended == ["cancelled"]
    assert rig.metrics.answered == [499]


async def test_an_application_that_ignores_its_cancellation_hears_of_the_leaving() -> None:
    heard: list[str] = []
    reading = asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        reading.set()
        try:
            await receive()
        except asyncio.CancelledError:
            heard.append((await receive())["type"])

    rig = Rig(application=application)
    request = rig.begin(first=b"one", body_bytes=UNKNOWN)
    await asyncio.wait_for(reading.wait(), 30)
    await asyncio.sleep(0)
    request.send(CancelHead())
    await rig.idle()

    assert heard == ["http.disconnect"]


@pytest.mark.parametrize(
    ("head", "piece", "why"),
    [
        (BodyHead(2, False), b"x", "lost"),
        (BodyHead(1, True), b"x", "5 bytes instead of 6"),
        (BodyHead(1, False), b"xxx", "7 bytes instead of 6"),
    ],
)
async def test_a_body_with_a_lost_part_or_a_wrong_size_ends_the_work(
    head: BodyHead, piece: bytes, why: str
) -> None:
    async def handler(request: Request) -> bytes:
        return await request.body()

    rig = Rig(handler)
    request = rig.begin(first=b"four", body_bytes=6)
    await asyncio.sleep(0)
    request.send(head, piece)

    error, _ = await request.frame()

    assert isinstance(error, ErrorHead)
    assert error.status == 502
    assert why in error.message
    await rig.idle()


async def test_a_router_that_ignores_the_window_is_cut_off() -> None:
    async def handler(request: Request) -> None:
        await asyncio.Event().wait()

    rig = Rig(handler)
    request = rig.begin(first=b"x", body_bytes=UNKNOWN)
    for sequence in range(1, WINDOW_FRAMES + 4):
        request.send(BodyHead(sequence, False), b"x")

    error, _ = await request.frame()

    assert isinstance(error, ErrorHead)
    assert "more of the body than it was allowed" in error.message
    await rig.idle()


async def test_a_large_body_is_echoed_whole_in_constant_memory_both_ways() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        more = True
        while more:
            message = await receive()
            more = message["more_body"]
            await send({"type": "http.response.body", "body": message["body"], "more_body": more})

    rig = Rig(application=application)
    request = rig.begin(first=PIECE, body_bytes=FRAMES * len(PIECE))
    async with asyncio.TaskGroup() as group:
        upload = group.create_task(request.upload([PIECE] * (FRAMES - 1)))
        answer = await request.answer()

    assert upload.done()
    assert len(answer.body) == FRAMES * len(PIECE)
    assert rig.metrics.answered == [200]
