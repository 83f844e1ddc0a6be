"""The two threads of a replica that take frames, and the lock that keeps them apart."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

from serve_common.protocol.frames import RequestHead, RequestKind, encode_frame
from serve_replica_host.replica.io.replica_io import ReplicaIO
from tests.support.replica_rig import Tally

REQUEST = RequestHead(RequestKind.HTTP, "GET", "/", "/", "", [], 30.0, 0, "d/a", "id")


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
