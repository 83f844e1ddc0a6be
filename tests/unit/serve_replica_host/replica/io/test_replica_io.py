"""The two threads of a replica that take frames, and the lock that keeps them apart."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from serve_common.direct.link import DirectLink
from serve_common.protocol.frames import Head, RequestHead, RequestKind, decode_frame, encode_frame
from serve_replica_host.replica.io import replica_io
from serve_replica_host.replica.io.replica_io import ReplicaIO
from serve_replica_host.replica.io.request import Closed, Opened, ReplicaRequest, SocketSent
from serve_replica_host.replica.io.response_stream import ResponseStream
from tests.support.replica_rig import Tally

REQUEST = RequestHead(RequestKind.HTTP, "GET", "/", "/", "", [], 30.0, 0, "d/a", "id")
REPLY = b"_INBOX.r.%016d" % 1


class RecordedLink:
    """A link that takes everything."""

    pending_bytes = 0
    is_tcp = False

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def send(self, _token: bytes, _head: Head, body: bytes) -> bool:
        self.bodies.append(bytes(body))
        return True

    def send_frame(self, _token: bytes, frame: bytes) -> bool:
        self.bodies.append(bytes(decode_frame(frame)[1]))
        return True


def replica_with_request(request: RequestHead = REQUEST) -> tuple[ReplicaIO, ReplicaRequest, RecordedLink]:
    """One request that came over a link; its user code runs on this thread, and so does the bus loop."""
    connection: Any = SimpleNamespace(
        on_connected=[], on_disconnected=[], can_write_shared=False, pending_bytes=0, max_payload=1 << 20
    )
    code: Any = SimpleNamespace(streams_bodies=False)
    io = ReplicaIO(connection, code, asyncio.get_running_loop(), Tally(), 4)
    link = RecordedLink()
    io._reader.is_on_user_loop = True
    io._protocol.handle_link_frame(cast("DirectLink", link), REPLY, encode_frame(request))
    io._reader.is_on_user_loop = False
    return io, io._protocol._exchanges[REPLY], link


async def test_a_stream_over_a_link_begins_and_ends_on_the_users_thread() -> None:
    io, exchange, link = replica_with_request()
    stream = ResponseStream(exchange, io._put_for_io)
    stream.open(200, [], soon=False)
    stream.put(b"first")
    assert link.bodies == [b"first"], "no other thread had to wake up"
    stream.put(b"a")
    stream.put(b"b")
    assert link.bodies == [b"first"], "what comes this fast is gathered"
    stream.end(b"last")
    assert b"".join(link.bodies) == b"firstablast"
    assert io.in_flight == 0
    sent = list(link.bodies)
    await asyncio.sleep(0.01)
    assert link.bodies == sent, "what was left to the bus loop was sent already"


async def test_a_part_that_comes_alone_leaves_on_the_users_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    io, exchange, link = replica_with_request()
    stream = ResponseStream(exchange, io._put_for_io)
    stream.open(200, [], soon=False)
    stream.put(b"first")
    stream.put(b"gathered")
    await asyncio.sleep(0.01)
    assert link.bodies == [b"first", b"gathered"]
    monkeypatch.setattr(replica_io, "GATHER_S", 0.0)
    stream.put(b"alone")
    assert link.bodies == [b"first", b"gathered", b"alone"]


async def test_a_response_that_began_on_the_bus_loop_stays_in_order_when_its_request_moves_to_a_link() -> (
    None
):
    io, exchange, link = replica_with_request(REQUEST)
    exchange.is_direct = False
    stream = ResponseStream(exchange, io._put_for_io)
    stream.open(200, [], soon=False)
    stream.put(b"first")
    exchange.is_direct = True
    stream.put(b"second")
    stream.end(b"last")
    assert link.bodies == []
    await asyncio.sleep(0.01)
    assert b"".join(link.bodies) == b"firstsecondlast"
    assert io.in_flight == 0


async def test_a_stream_over_a_link_with_tls_leaves_from_the_bus_loop_which_alone_writes_there() -> None:
    """Else that loop waits for the interpreter's lock, which a stream that never pauses holds for 5 ms."""
    io, exchange, link = replica_with_request()
    link.is_tcp = True
    stream = ResponseStream(exchange, io._put_for_io)
    stream.open(200, [], soon=False)
    stream.put(b"first")
    stream.end(b"last")
    assert link.bodies == []
    await asyncio.sleep(0.01)
    assert b"".join(link.bodies) == b"firstlast"
    assert io.in_flight == 0


async def test_messages_of_a_websocket_over_a_link_leave_on_the_users_thread() -> None:
    socket = RequestHead(RequestKind.WEBSOCKET, "GET", "/", "/", "", [], 30.0, 0, "d/a", "id")
    io, exchange, link = replica_with_request(socket)
    io._put_for_io(Opened(exchange, 101, []))
    io._put_for_io(SocketSent(exchange, b"one", is_text=False))
    io._put_for_io(SocketSent(exchange, b"two", is_text=False))
    assert link.bodies == [b"", b"one", b"two"]
    io._put_for_io(Closed(exchange, 1000, ""))
    assert len(link.bodies) == 4
    assert io.in_flight == 0


async def test_the_bus_thread_takes_no_frame_while_the_users_thread_reads_a_link() -> None:
    """As where the NATS connection is TLS, which its own loop reads, and links are Unix sockets."""
    connection: Any = SimpleNamespace(
        on_connected=[], on_disconnected=[], can_write_shared=False, pending_bytes=0, max_payload=1 << 20
    )
    code: Any = SimpleNamespace(streams_bodies=False)
    io = ReplicaIO(connection, code, asyncio.get_running_loop(), Tally(), 4)
    reads, may_end = threading.Event(), threading.Event()
    in_flight: list[int] = []

    def read() -> None:
        with io._lock:
            io._reader.is_on_user_loop = True
            reads.set()
            assert may_end.wait(30)
            in_flight.append(io.in_flight)
            io._reader.is_on_user_loop = False

    reader = threading.Thread(target=read)
    reader.start()
    assert reads.wait(30)
    threading.Timer(0.05, may_end.set).start()
    io._take_frame(b"serve.data.a.1", b"_INBOX.r.1", encode_frame(REQUEST), None)
    reader.join()
    assert in_flight == [0]
    assert io.in_flight == 1
    assert io._user_queue._gathers, "it is woken after the messages, as no reader empties it"
