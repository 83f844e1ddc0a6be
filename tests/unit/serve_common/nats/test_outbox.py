"""A socket that several threads write to: nothing is lost, torn apart or written to somebody else's socket."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
import uvloop

from serve_common.nats.outbox import SharedSocket

PENDING_BYTES_MAX = 64 * 1024 * 1024


class Ends:
    """A shared socket, and the raw one at the other end."""

    def __init__(self, transport: asyncio.Transport, far: socket.socket, limit_bytes: int) -> None:
        self.far = far
        self.shared = SharedSocket(
            asyncio.get_running_loop(), transport, limit_bytes, lambda: self.shared.write_on_loop([])
        )

    async def read(self, size_bytes: int) -> bytes:
        loop = asyncio.get_running_loop()
        data = bytearray()
        async with asyncio.timeout(20):
            while len(data) < size_bytes:
                piece = await loop.sock_recv(self.far, 64 * 1024)
                assert piece, "the other end closed"
                data += piece
        return bytes(data)


@asynccontextmanager
async def connected(limit_bytes: int = PENDING_BYTES_MAX) -> AsyncIterator[Ends]:
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    far.setblocking(False)
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=near)
    ends = Ends(cast("asyncio.Transport", transport), far, limit_bytes)
    yield ends
    ends.shared.shut_down()
    transport.abort()
    far.close()


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    async with connected() as ends:
        yield ends


async def test_what_another_thread_writes_leaves_without_the_loop(ends: Ends) -> None:
    ends.far.setblocking(True)
    assert ends.shared.write([b"ab", b"c"])
    assert ends.far.recv(10) == b"abc"  # this loop has not turned since


async def test_what_the_socket_does_not_take_follows_in_order(ends: Ends) -> None:
    large = os.urandom(1_000_000)
    assert ends.shared.write([large])
    assert ends.shared.write([b"second"])
    ends.shared.write_on_loop([b"th", b"ird"])
    assert await ends.read(len(large) + 11) == large + b"secondthird"
    await asyncio.sleep(0.01)
    ends.far.setblocking(True)
    assert ends.shared.write([b"x"])  # left to the loop, which finds nothing waiting any more
    await asyncio.sleep(0.01)
    assert ends.far.recv(10) == b"x"
    assert ends.shared.write([b"y"])
    assert ends.far.recv(10) == b"y"


async def test_it_takes_no_more_than_its_limit_while_the_peer_does_not_read() -> None:
    large = bytes(300_000)
    async with connected(limit_bytes=100_000) as ends:
        assert ends.shared.write([large])
        assert not ends.shared.write([b"one too many"])
        assert await ends.read(len(large)) == large


async def test_a_closed_one_writes_nothing_even_when_its_descriptor_belongs_to_somebody_else(
    ends: Ends,
) -> None:
    ends.shared.shut_down()
    ends.shared.shut_down()
    one, two = socket.socketpair()
    with one, two:
        assert not ends.shared.write([b"not for you"])
        two.setblocking(False)
        with pytest.raises(BlockingIOError):
            two.recv(10)


@pytest.mark.parametrize("seed", range(3))
def test_messages_of_three_threads_and_the_loop_arrive_whole_and_each_threads_in_order(seed: int) -> None:
    print(f"seed {seed}")
    uvloop.run(write_from_everywhere(seed))


async def write_from_everywhere(seed: int) -> None:
    counts = {"a": 400, "b": 400, "c": 400, "l": 400}
    chances = {writer: random.Random(f"{seed}{writer}") for writer in counts}
    messages = {
        writer: [
            f"{writer}{number:04}".encode() + b"." * chances[writer].choice([0, 10, 500, 9000])
            for number in range(count)
        ]
        for writer, count in counts.items()
    }

    def write(writer: str) -> None:
        for message in messages[writer]:
            assert ends.shared.write([message, b"\n"])

    async def write_on_loop() -> None:
        for message in messages["l"]:
            ends.shared.write_on_loop([message, b"\n"])
            await asyncio.sleep(0)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in "abc"]
    total_bytes = sum(len(message) + 1 for several in messages.values() for message in several)
    async with connected() as ends:
        for thread in threads:
            thread.start()
        received, _ = await asyncio.gather(ends.read(total_bytes), write_on_loop())
        for thread in threads:
            await asyncio.to_thread(thread.join)

    lines = received.split(b"\n")[:-1]
    assert len(lines) == sum(counts.values())
    for writer, expected in messages.items():
        assert [line for line in lines if line.startswith(writer.encode())] == expected
