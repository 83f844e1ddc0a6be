"""Large bodies of known size, which do not reach the parser: what arrives, what comes behind them, and their ends."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import uvloop

from serve_common.config.backend import HttpOptions
from serve_common.direct.pipes import PipedBytes
from serve_common.dispatch.request_body import RequestBody
from serve_common.protocol.frames import FRAME_BODY_BYTES_MAX
from serve_proxy.http import bodies, connection
from serve_proxy.http.bodies import RAW_BYTES_MIN, MinRateGuard
from serve_proxy.http.raw_bodies import COUNTED_BYTES_MIN, CountingConnection, RawBody
from serve_proxy.http.server import HttpServer
from serve_proxy.http.tls import load_context
from serve_proxy.settings import TlsSettings
from tests.support.certificates import Certificate
from tests.support.http_desk import HOST, Desk, goes_on, listening, read_answer, whole
from tests.support.waiting import eventually

MIB = 1024 * 1024
GET = b"GET /behind HTTP/1.1\r\n" + HOST + b"\r\n"


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    async with listening(Desk(HttpOptions(body_bytes_max=64 * MIB))) as desk:
        yield desk


class Replica:
    """Takes a body as a replica with credit does."""

    def __init__(self, body: RequestBody) -> None:
        self.taken: list[bytes] = []
        self.is_whole = False
        self._body = body
        body.on_more = self.take
        self.take()

    def take(self) -> None:
        while not self.is_whole and (piece := self._body.piece(len(self.taken))) is not None:
            self.taken.append(bytes(piece))
            assert len(piece) <= FRAME_BODY_BYTES_MAX
            self.is_whole = self._body.is_last(len(self.taken) - 1)
            self._body.release(len(self.taken))


class PipingReplica:
    """Takes a body over a Unix socket, as a link does: pieces in pipes go from there."""

    def __init__(self, body: RequestBody) -> None:
        self.arrived = b""
        self.in_pipes = self.pieces = 0
        self.is_whole = False
        self._body = body
        self._near, self._far = socket.socketpair()
        for each in (self._near, self._far):
            each.setblocking(False)
        body.on_more = self.take
        body.takes_pipe = True
        self.take()

    def take(self) -> None:
        while not self.is_whole and (piece := self._body.piece(self.pieces)) is not None:
            self.pieces += 1
            if isinstance(piece, PipedBytes):
                self.in_pipes += 1
                while not piece.send(self._near.fileno()):
                    self._read()
                self._read()
            else:
                self.arrived += piece
            self.is_whole = self._body.is_last(self.pieces - 1)
            self._body.release(self.pieces)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while part := self._far.recv(MIB):
                self.arrived += part

    def close(self) -> None:
        self._near.close()
        self._far.close()


def open_descriptors() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir())


def post(size: int, path: bytes = b"/a") -> bytes:
    return b"POST " + path + b" HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % size


def body_of(ask: object) -> bytes:
    """What arrived of a body, which is read to its end."""
    spec = ask.spec  # type: ignore[attr-defined]
    return spec.body if spec.upload is None else b"".join(ask.replica.taken)  # type: ignore[attr-defined]


def asked(desk: Desk, number: int) -> bool:
    """True once request ``number`` is there with its whole body, by whichever way."""
    asks = sorted([*desk.ingress.begun, *desk.ingress.asked], key=lambda ask: ask.spec.path)
    if len(asks) <= number:
        return False
    ask = asks[number]
    if ask.spec.upload is not None and not hasattr(ask, "replica"):
        ask.replica = Replica(ask.spec.upload)
    return ask.spec.upload is None or ask.replica.is_whole


SIZES = (COUNTED_BYTES_MIN - 1, COUNTED_BYTES_MIN, 200_000, 300_000, RAW_BYTES_MIN + 256 * 1024, 9 * MIB + 1)


@pytest.mark.parametrize("step", [1_400, 100_000, 64 * MIB])
@pytest.mark.parametrize("is_head_alone", [False, True])
async def test_bodies_of_any_size_arrive_as_they_are_one_behind_the_other(
    desk: Desk, *, step: int, is_head_alone: bool
) -> None:
    rng = random.Random(step)
    bodies = [rng.randbytes(size) for size in SIZES]
    reader, writer = await desk.connect()

    async def send() -> None:
        for number, body in enumerate(bodies):
            head = post(len(body), b"/%d" % number)
            if is_head_alone:
                writer.write(head)
                await asyncio.sleep(0.01)
            data = body if is_head_alone else head + body
            for at in range(0, len(data), step):
                writer.write(data[at : at + step])
                await writer.drain()

    async with asyncio.TaskGroup() as group:
        group.create_task(send())
        for number, body in enumerate(bodies):
            await eventually(partial(asked, desk, number), every_s=0.001)
            ask = next(a for a in [*desk.ingress.begun, *desk.ingress.asked] if a.spec.path == f"/{number}")
            assert body_of(ask) == body
            if ask in desk.ingress.begun:
                ask.on_response(ask, whole(b"ok"))
            else:
                ask.waiter.set_result(whole(b"ok"))
            assert (await read_answer(reader))[0] == 200
    await goes_on(reader, writer)


async def test_a_large_body_is_read_past_the_parser(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    updated = RawBody.buffer_updated

    def count(self: RawBody, nbytes: int) -> None:
        sizes.append(nbytes)
        updated(self, nbytes)

    monkeypatch.setattr(RawBody, "buffer_updated", count)
    reader, writer = await desk.connect()
    writer.write(post(8 * MIB) + bytes(8 * MIB))
    await desk.ingress.until(lambda: desk.ingress.asked)
    await eventually(lambda: asked(desk, 0))
    assert sum(sizes) > 6 * MIB
    desk.ingress.asked[0].waiter.set_result(whole(b"ok"))
    assert (await read_answer(reader))[0] == 200


async def test_a_body_without_space_is_not_read_on_until_there_is_some(desk: Desk) -> None:
    reader, writer = await desk.connect()
    body = random.Random(1).randbytes(16 * MIB)
    writer.write(post(len(body)) + body)
    await desk.ingress.until(lambda: desk.ingress.asked)
    upload = desk.ingress.asked[0].spec.upload
    await eventually(lambda: not upload.has_space)
    received = upload.received_bytes
    await asyncio.sleep(0.2)
    assert upload.received_bytes == received < MIB
    replica = Replica(upload)
    await eventually(lambda: replica.is_whole)
    assert b"".join(replica.taken) == body
    desk.ingress.asked[0].waiter.set_result(whole(b"ok"))
    assert (await read_answer(reader))[0] == 200
    await goes_on(reader, writer)


@pytest.mark.parametrize("change", ["none", "the replica is gone", "the client is slow", "no pipe"])
async def test_a_body_for_a_link_goes_through_a_pipe_as_long_as_that_is_of_use(
    desk: Desk, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if change == "no pipe":
        monkeypatch.setattr(desk.ingress.memory.pipes, "_pipes_max", 0)
    reader, writer = await desk.connect()
    body = random.Random(6).randbytes(8 * MIB)
    for turn in range(2):
        writer.write(post(len(body)) + body[: 300 * 1024])
        await desk.ingress.until(lambda turn=turn: len(desk.ingress.asked) > turn)
        upload = desk.ingress.asked[turn].spec.upload
        replica = PipingReplica(upload)
        if change == "the client is slow":
            for at in range(300 * 1024, 330 * 1024, 1000):
                writer.write(body[at : at + 1000])
                await eventually(lambda at=at, upload=upload: upload.received_bytes > at)
            at = upload.received_bytes
            in_pipes = replica.in_pipes
            writer.write(body[at:])
        else:
            writer.write(body[300 * 1024 : 4 * MIB])
            await eventually(lambda upload=upload: upload.received_bytes == 4 * MIB)
            in_pipes = replica.in_pipes
            if change == "the replica is gone":
                upload.takes_pipe = False
            writer.write(body[4 * MIB :])
        await eventually(lambda replica=replica: replica.is_whole)
        assert replica.arrived == body
        assert bool(in_pipes) is (change != "no pipe")
        assert (replica.in_pipes > in_pipes) is (change == "none")
        desk.ingress.asked[turn].waiter.set_result(whole(b"ok"))
        assert (await read_answer(reader))[0] == 200
        replica.close()
        assert desk.ingress.memory.buffered_bytes == 0
    await goes_on(reader, writer)


@pytest.mark.parametrize("how", ["reset", "end"])
async def test_a_client_that_leaves_within_a_body_in_a_pipe_is_given_up(desk: Desk, how: str) -> None:
    before = open_descriptors()
    _, writer = await desk.connect()
    writer.write(post(32 * MIB) + bytes(4 * MIB))
    await desk.ingress.until(lambda: desk.ingress.asked)
    upload = desk.ingress.asked[0].spec.upload
    replica = PipingReplica(upload)
    await eventually(lambda: upload.received_bytes == 4 * MIB and replica.in_pipes)
    if how == "reset":
        client = writer.transport.get_extra_info("socket")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    await eventually(lambda: desk.server.in_flight == 0 and not desk.server.connections)
    replica.close()
    upload.close()  # as the dispatcher does
    desk.ingress.memory.pipes.close()
    await eventually(lambda: open_descriptors() == before)


@pytest.mark.parametrize("is_paused", [False, True])
async def test_a_client_that_leaves_within_a_large_body_is_given_up(desk: Desk, *, is_paused: bool) -> None:
    _, writer = await desk.connect()
    writer.write(post(32 * MIB) + bytes(8 * MIB))
    await desk.ingress.until(lambda: desk.ingress.asked)
    if not is_paused:
        Replica(desk.ingress.asked[0].spec.upload)
        await eventually(lambda: desk.ingress.asked[0].spec.upload.received_bytes == 8 * MIB)
    # A reset: an end of file would come behind what is not read.
    client = writer.transport.get_extra_info("socket")
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    await eventually(lambda: desk.server.in_flight == 0 and not desk.server.connections)
    await eventually(lambda: not desk.ingress.memory.admitted_bytes)


@pytest.mark.parametrize("rest", [1, 60_000])
async def test_an_answer_before_the_last_bytes_leaves_the_connection_to_the_next_request(
    desk: Desk, rest: int
) -> None:
    reader, writer = await desk.connect()
    writer.write(post(4 * MIB) + bytes(4 * MIB - rest))
    await desk.ingress.until(lambda: desk.ingress.asked)
    upload = desk.ingress.asked[0].spec.upload
    Replica(upload)
    await eventually(lambda: upload.received_bytes == 4 * MIB - rest)
    desk.ingress.asked[0].waiter.set_result(whole(b"early"))
    assert (await read_answer(reader))[::2] == (200, b"early")
    writer.write(bytes(rest))
    await goes_on(reader, writer)


async def test_an_answer_long_before_the_end_closes_the_connection_once_the_client_has_it(desk: Desk) -> None:
    reader, writer = await desk.connect()
    writer.write(post(16 * MIB) + bytes(4 * MIB))
    await desk.ingress.until(lambda: desk.ingress.asked)
    Replica(desk.ingress.asked[0].spec.upload)
    await eventually(lambda: desk.ingress.asked[0].spec.upload.received_bytes == 4 * MIB)
    desk.ingress.asked[0].waiter.set_result(whole(b"early"))
    assert (await read_answer(reader))[::2] == (200, b"early")
    writer.write(bytes(12 * MIB))
    assert await asyncio.wait_for(reader.read(), 30) == b""


async def test_invalid_bytes_behind_a_large_body_are_refused_and_the_body_is_answered(desk: Desk) -> None:
    reader, writer = await desk.connect()
    writer.write(post(MIB) + bytes(MIB) + b"NOT HTTP\r\n\r\n")
    await desk.ingress.until(lambda: desk.ingress.asked)
    await eventually(lambda: asked(desk, 0))
    desk.ingress.asked[0].waiter.set_result(whole(b"ok"))
    assert (await read_answer(reader))[0] == 200
    assert (await read_answer(reader))[0] == 400
    assert await asyncio.wait_for(reader.read(), 30) == b""


def test_a_refused_upload_over_tls_is_answered_and_then_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_LINGERS_IDLE_S", 0.1)
    certificate = Certificate(tmp_path)
    settings = TlsSettings(
        cert_file=str(certificate.cert_file), key_file=str(certificate.key_file), key_password=""
    )

    async def main() -> None:
        desk = Desk(HttpOptions(body_bytes_max=100))
        desk.server = HttpServer(desk.requests, desk.ingress, load_context(settings))
        async with listening(desk):
            host, _, port = desk.address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port), ssl=certificate.trust())
            writer.write(post(MIB) + bytes(MIB // 2))
            assert (await read_answer(reader))[0] == 413
            assert await asyncio.wait_for(reader.read(), 30) == b""
            writer.close()

    uvloop.run(main())


async def test_only_the_length_that_the_client_has_sent_ends_a_body(desk: Desk) -> None:
    _, writer = await desk.connect()
    writer.write(post(4 * MIB))
    await eventually(lambda: desk.server.connections)
    (connected,) = desk.server._http.connections
    await eventually(lambda: connected._last_payload.total_bytes or connected._rest_bytes)
    assert isinstance(connected, CountingConnection)
    content = connected._last_payload
    body = RequestBody(b"x", desk.ingress.memory, 4 * MIB)
    assert connected.start_raw_body(content, 4 * MIB - 1, body) is None, "another length than the client's"
    raw = connected.start_raw_body(content, 4 * MIB, body)
    assert raw is not None
    connected.end_raw_body()
    assert connected._rest_bytes == 4 * MIB
    writer.close()


@pytest.mark.parametrize("spares_first", [False, True])
async def test_a_single_pause_at_the_beginning_may_be_spared(
    monkeypatch: pytest.MonkeyPatch, *, spares_first: bool
) -> None:
    monkeypatch.setattr(bodies, "PERIOD_S", 0.05)
    slow = asyncio.Event()
    looks: list[float] = []
    loop = asyncio.get_running_loop()

    def progress() -> int:
        looks.append(loop.time())
        return 7

    began = loop.time()
    with MinRateGuard(1000, progress, slow.set, spares_first=spares_first):
        await asyncio.wait_for(slow.wait(), 30)
    assert len(looks) == 2
    assert loop.time() - began >= (2 if spares_first else 1) * 0.05
    assert (looks[0] - began >= 0.04) is spares_first
