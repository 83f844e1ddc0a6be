"""Bodies in pipes: what comes out is what went in, once or again, and no descriptor is left."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_common.direct import pipes
from serve_common.direct.pipes import PIPE_BYTES, BodyPipe, PipedBytes, PipePool

KIB = 1024


class Sockets:
    """Where bytes come from, over TCP as from a client, and where they go, over a Unix socket as to a replica."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.client = socket.create_connection(server.getsockname())
            self.source, _ = server.accept()
        self.target, self.replica = socket.socketpair()
        for each in (self.client, self.source, self.target, self.replica):
            each.setblocking(False)

    def close(self) -> None:
        for each in (self.client, self.source, self.target, self.replica):
            each.close()

    def fill(self, pipe: BodyPipe, data: bytes) -> None:
        """Let ``data`` come into ``pipe``."""
        sent = filled = 0
        while filled < len(data):
            try:
                sent += self.client.send(data[sent:])
                filled += pipe.fill(self.source.fileno(), len(data) - filled)
            except BlockingIOError:
                continue

    def take(self) -> bytes:
        """What has arrived at the replica."""
        parts = []
        try:
            while part := self.replica.recv(256 * KIB):
                parts.append(part)
        except BlockingIOError:
            pass
        return b"".join(parts)


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    sockets = Sockets()
    yield sockets
    sockets.close()


@pytest.fixture
def pipe() -> Iterator[BodyPipe]:
    pipe = BodyPipe()
    yield pipe
    pipe.close()


def open_descriptors() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir())


def cut(pipe: BodyPipe, most_bytes: int) -> PipedBytes:
    piece = pipe.cut(most_bytes)
    assert isinstance(piece, PipedBytes)
    return piece


def test_pieces_arrive_in_order_and_are_there_again_until_they_are_released(
    pipe: BodyPipe, sockets: Sockets
) -> None:
    data = random.Random(1).randbytes(200 * KIB)
    sockets.fill(pipe, data)
    sizes, arrived = (1, 60 * KIB, 40 * KIB, 99 * KIB, 10 * KIB), b""
    for size in sizes:
        piece = cut(pipe, size)
        assert piece.send(sockets.target.fileno())
        arrived += sockets.take()
    assert arrived == data
    assert pipe.cut(1) is None, "nothing is left"
    pipe.release(1)
    assert pipe.read_retained(60 * KIB) == data[1:][: 60 * KIB]
    pipe.release(40 * KIB)
    assert pipe.read_retained(100 * KIB - 1) == data[1 + 100 * KIB :]


def test_the_next_piece_waits_for_one_that_is_not_sent(pipe: BodyPipe, sockets: Sockets) -> None:
    data, freed = random.Random(2).randbytes(1000 * KIB), []
    pipe.on_free = lambda: freed.append(True)
    sockets.fill(pipe, data[: 900 * KIB])
    piece = cut(pipe, 800 * KIB)
    assert not piece.send(sockets.target.fileno()), "the socket holds less"
    assert pipe.cut(1) is None
    arrived = sockets.take()
    assert data.startswith(arrived)
    sockets.fill(pipe, data[900 * KIB :])
    while not piece.send(sockets.target.fileno()):
        arrived += sockets.take()
    piece.notify()
    assert freed == [True]
    rest = cut(pipe, 256 * KIB)
    assert len(rest) == 200 * KIB
    while not rest.send(sockets.target.fileno()):
        arrived += sockets.take()
    assert arrived + sockets.take() == data


@pytest.mark.parametrize("how", ["sent again", "left", "cleared"])
def test_what_was_begun_ends_though_its_pipe_is_used_otherwise(
    pipe: BodyPipe, sockets: Sockets, how: str
) -> None:
    data, freed = random.Random(3).randbytes(900 * KIB), []
    pipe.on_free = lambda: freed.append(True)
    sockets.fill(pipe, data)
    piece = cut(pipe, 800 * KIB)
    assert not piece.send(sockets.target.fileno())
    if how == "sent again":
        assert pipe.read_retained(800 * KIB) == data[: 800 * KIB]
        assert pipe.take_uncut() == data[800 * KIB :]
    elif how == "left":
        assert pipe.take_uncut() == data[800 * KIB :]
        assert pipe.read_retained(800 * KIB) == data[: 800 * KIB]
    else:
        pipe.clear()
        other = random.Random(4).randbytes(70 * KIB)
        sockets.fill(pipe, other)
        assert pipe.take_uncut() == other
    arrived = sockets.take()
    while not piece.send(sockets.target.fileno()):
        arrived += sockets.take()
    piece.notify()
    assert arrived + sockets.take() == data[: 800 * KIB]
    assert freed == [], "its body has gone on before"


def test_a_piece_is_read_where_it_cannot_be_sent(pipe: BodyPipe, sockets: Sockets) -> None:
    data = random.Random(5).randbytes(100 * KIB)
    sockets.fill(pipe, data)
    piece = cut(pipe, 60 * KIB)
    assert piece.read() == piece.read() == data[: 60 * KIB]
    assert cut(pipe, 60 * KIB).read() == data[60 * KIB :]
    assert pipe.read_retained(100 * KIB) == data


def test_what_cannot_be_retained_comes_as_bytes(pipe: BodyPipe, sockets: Sockets) -> None:
    packets = PIPE_BYTES // os.sysconf("SC_PAGESIZE")
    sockets.client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    pieces = []
    for number in range(packets + 5):  # each takes a page of what is retained
        sockets.fill(pipe, bytes([number % 256]) * 10)
        piece = pipe.cut(10)
        assert piece is not None
        pieces.append(piece)
        if isinstance(piece, PipedBytes):
            assert piece.send(sockets.target.fileno())
            assert sockets.take() == bytes([number % 256]) * 10
        else:
            assert piece == bytes([number % 256]) * 10
    assert [type(piece) for piece in pieces] == [PipedBytes] * packets + [bytes] * 5
    assert pipe.read_retained(packets * 10) == b"".join(bytes([n % 256]) * 10 for n in range(packets))


def test_the_end_of_a_socket_is_no_bytes_and_a_broken_one_an_error(pipe: BodyPipe, sockets: Sockets) -> None:
    with pytest.raises(BlockingIOError):
        pipe.fill(sockets.source.fileno(), 10)
    sockets.client.close()
    assert pipe.fill(sockets.source.fileno(), 10) == 0
    sockets.replica.close()
    other = Sockets()
    other.fill(pipe, b"x" * 10)
    with pytest.raises(BrokenPipeError):
        cut(pipe, 10).send(sockets.target.fileno())
    other.close()


def test_pipes_are_used_again_empty_and_are_limited(sockets: Sockets) -> None:
    before = open_descriptors()
    pool = PipePool(2)
    one, two = pool.take(), pool.take()
    assert one is not None
    assert two is not None
    assert pool.take() is None
    sockets.fill(one, b"x" * 100 * KIB)
    assert cut(one, 50 * KIB).send(sockets.target.fileno())
    pool.give_back(one)
    again = pool.take()
    assert again is one
    assert one.cut(1) is None
    sockets.fill(one, b"y" * KIB)
    assert cut(one, 2 * KIB).read() == b"y" * KIB
    assert one.read_retained(KIB) == b"y" * KIB
    pool.give_back(one)
    pool.give_back(two)
    pool.close()
    many = PipePool()
    for pipe in [many.take() for _ in range(10)]:
        assert pipe is not None
        many.give_back(pipe)
    assert len(many._free) == pipes._FREE_MAX
    many.close()
    assert open_descriptors() == before


def test_a_system_that_gives_no_pipe_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_descriptors()

    def refuse(*_: object) -> int:
        raise PermissionError(1, "the user's pipes hold too much")

    monkeypatch.setattr(pipes.fcntl, "fcntl", refuse)
    assert PipePool().take() is None
    monkeypatch.undo()
    monkeypatch.setattr(pipes, "_HAS_SPLICE", False)
    assert PipePool().take() is None
    assert open_descriptors() == before
