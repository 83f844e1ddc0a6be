"""``python -m bench.slow_readers``: 1,000 clients ask for long streams and read almost nothing of them.

What a stream may hold: its window in the proxy, 4 frames of 512 KiB, for what was sent and not yet taken; in the
replica 1 MiB that its code has written ahead, and of all streams together 32 MiB for sending again and 16 MiB that wait
on the link. The heap keeps 16 MiB more than is used.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import sys
import tempfile
from pathlib import Path

import msgspec
import psutil

from serve_common.protocol import streams
from serve_common.protocol.frames import FRAME_BODY_BYTES_MAX, WINDOW_FRAMES
from serve_common.runtime import heap
from serve_common.runtime.settings import DirectMode
from serve_replica_host.replica.io.frame_sender import WAY_BYTES_MAX
from tests.support.stacks.bare_stack import BareStack, Runner

MIB = 1024 * 1024
READERS = 1_000
STREAM_BYTES = 8 * MIB
OWN_BYTES = 512 * 1024
"""Of a connection beside its stream: buffers of transports, tasks, heads, and what the allocator keeps."""
PROXY_BYTES_MAX = WINDOW_FRAMES // 2 * FRAME_BODY_BYTES_MAX + OWN_BYTES
"""Of the proxy, for each reader: large frames take two places of a window."""
REPLICA_BYTES_MAX = MIB + FRAME_BODY_BYTES_MAX + OWN_BYTES
"""Of the replica, for each reader."""
SHARED_BYTES_MAX = streams.RETAINED_BYTES_MAX + WAY_BYTES_MAX + heap.RETAINED_BYTES_MAX
"""Of the replica, for all readers together."""
_SLOW_S = 20
_SLOW_BYTES = 4096
"""Read in each second by each."""
_READ_BYTES = 64 * 1024
_WHOLE_WITHIN_S = 120.0

APP = f"""
import asyncio
from starlette.responses import StreamingResponse

PIECE = bytes({FRAME_BODY_BYTES_MAX // 2})

async def drip(request):
    async def pieces():
        for _ in range({STREAM_BYTES} // len(PIECE)):
            yield PIECE
            await asyncio.sleep(0)
    return StreamingResponse(pieces())
"""


class Outcome(msgspec.Struct):
    """What the processes had in memory above what they had before, at most, and what the readers got."""

    readers: int
    proxy_bytes: int
    replica_bytes: int
    whole: int
    """Streams that came whole once they were read."""

    @property
    def line(self) -> str:
        """In one line."""
        return (
            f"{self.readers} slow readers: the proxy had {self.proxy_bytes / self.readers / MIB:.2f} MiB for each, "
            f"the replica {self.replica_bytes / self.readers / MIB:.2f} MiB; {self.whole} streams came whole in the end"
        )

    @property
    def is_well(self) -> bool:
        """Within the bounds, and nothing lost."""
        return (
            self.proxy_bytes <= self.readers * PROXY_BYTES_MAX
            and self.replica_bytes <= self.readers * REPLICA_BYTES_MAX + SHARED_BYTES_MAX
            and self.whole == self.readers
        )


async def add_drip(
    stack: BareStack, directory: Path, readers: int, direct: DirectMode
) -> tuple[Runner, Runner]:
    """A proxy, and a replica that streams at ``/drip``."""
    (directory / "drip_app.py").write_text(APP)
    (proxy,) = await stack.add_proxies(1, direct=direct, body_rate_min=0)
    replica = await stack.add_replica(
        "d/drip#0",
        "drip_app:drip",
        app_dir=str(directory),
        max_concurrent_queries=readers,
        direct=direct,
        direct_dir=str(directory / "direct"),
    )
    await stack.put_endpoint("d/drip", "/drip")
    await stack.put_backend("d/drip", ["d/drip#0"], limit=readers)
    return proxy, replica


async def read_slowly(proxy: Runner, replica: Runner, readers: int) -> Outcome:
    """All of them at once: they read the head and wait; then they read everything."""
    watched = [psutil.Process(runner.process.pid) for runner in (proxy, replica)]
    before = [process.memory_info().rss for process in watched]
    host, port = proxy.url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    sockets: list[socket.socket] = []
    try:
        for _ in range(readers):
            one = socket.socket()
            sockets.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.setblocking(False)
            await loop.sock_connect(one, (host, int(port)))
            await loop.sock_sendall(one, b"GET /drip HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        for one in sockets:
            head = await loop.sock_recv(one, 15)
            assert head.startswith(b"HTTP/1.1 200"), head + await loop.sock_recv(one, 2000)
        most = before
        sizes = [0] * readers
        for _ in range(_SLOW_S):
            for number, one in enumerate(sockets):
                with contextlib.suppress(BlockingIOError):
                    sizes[number] += len(one.recv(_SLOW_BYTES))
            most = [max(had, process.memory_info().rss) for had, process in zip(most, watched, strict=True)]
            await asyncio.sleep(1.0)

        async def read_all(one: socket.socket) -> int:
            size = 0
            while data := await loop.sock_recv(one, _READ_BYTES):
                size += len(data)
            return size

        async with asyncio.timeout(_WHOLE_WITHIN_S):
            rest = await asyncio.gather(*map(read_all, sockets))
    finally:
        for one in sockets:
            one.close()
    proxy_bytes, replica_bytes = (had - old for had, old in zip(most, before, strict=True))
    whole = sum(had + more >= STREAM_BYTES for had, more in zip(sizes, rest, strict=True))
    return Outcome(readers, proxy_bytes, replica_bytes, whole)


async def measure(options: argparse.Namespace) -> bool:
    """Tell; True when all is within the bounds."""
    with tempfile.TemporaryDirectory(prefix="ms-", ignore_cleanup_errors=True) as text:
        async with BareStack.running(Path(text)) as stack:
            proxy, replica = await add_drip(stack, Path(text), options.readers, DirectMode(options.direct))
            outcome = await read_slowly(proxy, replica, options.readers)
    print(outcome.line)
    return outcome.is_well


def main() -> int:
    """0: within the bounds; 1: not."""
    parser = argparse.ArgumentParser(prog="python -m bench.slow_readers", description=__doc__)
    parser.add_argument("--readers", type=int, default=READERS)
    parser.add_argument("--direct", choices=[mode.value for mode in DirectMode], default="all")
    is_well = asyncio.run(measure(parser.parse_args()))
    print("within the bounds" if is_well else "NOT within the bounds")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
