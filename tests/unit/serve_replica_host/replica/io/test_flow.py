"""A request's body as the user's code reads it: part by part, or whole, and what is acknowledged of it."""

from __future__ import annotations

import asyncio

import pytest

from serve_replica_host.replica.io.flow import BodyReader


async def let_run() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_parts_of_a_body_that_is_wanted_whole_are_acknowledged_as_they_come() -> None:
    taken: list[int] = []
    reader = BodyReader(None, taken.append)
    reader.add(memoryview(b"0"), last=False)
    first = await reader()
    assert (first["body"], first["more_body"]) == (b"0", True)
    reader.add(memoryview(b"1"), last=False)
    waiting = asyncio.get_running_loop().create_task(reader.rest())
    await let_run()
    for number in range(2, 9):
        reader.add(memoryview(b"%d" % number), last=number == 8)
    assert await waiting == b"12345678"
    assert sum(taken) == 8, "the last one is not worth an acknowledgement of its own"
    assert all(count == 2 for count in taken)


async def test_a_body_of_one_part_is_not_copied() -> None:
    body = bytes(1000)
    assert await BodyReader(body).rest() is body


async def test_who_gives_up_waiting_for_all_may_read_part_by_part_and_nothing_counts_twice() -> None:
    taken: list[int] = []
    reader = BodyReader(None, taken.append)
    waiting = asyncio.get_running_loop().create_task(reader.rest())
    await let_run()
    for number in range(4):
        reader.add(memoryview(b"%d" % number), last=False)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert sum(taken) == 4
    reader.add(memoryview(b"4"), last=False)
    reader.add(memoryview(b"5"), last=True)
    messages = [await reader() for _ in range(6)]
    assert [message["body"] for message in messages] == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert [message["more_body"] for message in messages] == [True] * 5 + [False]
    assert sum(taken) == 6


async def test_a_caller_that_leaves_ends_the_wait() -> None:
    reader = BodyReader(None)
    waiting = asyncio.get_running_loop().create_task(reader.rest())
    await let_run()
    reader.leave()
    assert await waiting is None
    assert (await reader())["type"] == "http.disconnect"
