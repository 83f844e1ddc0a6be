"""What stands between two ends of connections, and cuts them at random bytes.

A `Forwarder` takes the place of a port, or of Unix sockets that appear in some directories. Those of a stack are in a
process of their own, with a `Network` to tell them what to do: a client that is busy with large bodies would make
every login at NATS slow, and what is away for long is another fault than a cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Self

import msgspec
import uvloop

LINK_BYTES = (64, 16 * 1024 * 1024)
"""A direct link ends after so many bytes, drawn evenly by their logarithm; a ticket, of 32, has always come through."""
NATS_BYTES = (8 * 1024, 16 * 1024 * 1024)
"""The same of a connection to NATS once its turn comes; a login, with its subscriptions, has always come through."""
_LOOK_EVERY_S = 0.005
_READ_BYTES = 65_536

_Dial = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


def draw_bytes(chance: random.Random, least: int, most: int) -> int:
    """A number of bytes, evenly by its logarithm."""
    return int(least * (most / least) ** chance.random())


class _Connection:
    """One that is forwarded."""

    def __init__(self, near: asyncio.StreamWriter, left: float) -> None:
        self.left = left
        """Bytes that it may still carry, both ways together."""
        self.writers = [near]

    async def pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        """Pass bytes on for as long as it may; always ends with ConnectionError or another OSError."""
        while self.left > 0 and (data := await source.read(_READ_BYTES)):
            data = data[: int(min(self.left, len(data)))]
            self.left -= len(data)
            target.write(data)
            await target.drain()
        raise ConnectionError("the connection is cut, or an end has closed it")


class Forwarder:
    """Passes connections on, and ends some, at both ends, after a random number of bytes."""

    def __init__(self, least_bytes: int, most_bytes: int) -> None:
        self.forwarded = 0
        """Connections."""
        self.cuts = 0
        self._span = (least_bytes, most_bytes)
        self._chance: random.Random | None = None
        self._connections: set[_Connection] = set()
        self._servers: list[asyncio.Server] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, least_bytes: int, most_bytes: int) -> AsyncIterator[Self]:
        """Every connection that it forwards ends with it."""
        self = cls(least_bytes, most_bytes)
        try:
            yield self
        finally:
            for server in self._servers:
                server.close()
            for connection in self._connections:
                for writer in connection.writers:
                    writer.transport.abort()

    def cut(self, chance: random.Random) -> None:
        """End each connection from now on, also those that there are already."""
        self._chance = chance
        for connection in self._connections:
            connection.left = self._draw()

    async def cut_in_turn(self, chance: random.Random, every_s: float) -> None:
        """End one, whichever, about every so many seconds; never returns.

        Not each: one that was cut has much to send again, so another one would follow at once, and again. A client then
        waits longer from time to time before it comes back, and what is away for seconds is another fault.
        """
        while True:
            await asyncio.sleep(every_s * chance.uniform(0.5, 1.5))
            whole = [connection for connection in self._connections if connection.left == math.inf]
            if whole:
                chance.choice(whole).left = draw_bytes(chance, *self._span)

    def spare(self) -> None:
        """Cut no more."""
        self._chance = None
        for connection in self._connections:
            if connection.left > 0:
                connection.left = math.inf

    async def stand_before_port(self, port: int, real_port: int) -> None:
        """Listen on ``port`` and pass on to ``real_port``, both of this machine's own address."""
        dial = partial(asyncio.open_connection, "127.0.0.1", real_port)
        server = await asyncio.start_server(partial(self._forward, dial), "127.0.0.1", port)
        self._servers.append(server)

    async def take_over_sockets(self, directories: list[Path]) -> None:
        """Take the place of every socket that is, or appears, in ``directories``; never ends."""
        taken: set[Path] = set()
        while True:
            for directory in directories:
                for path in directory.iterdir() if directory.exists() else ():
                    if path not in taken and path.is_socket():
                        taken.add(path)
                        await self._stand_before_socket(path)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _stand_before_socket(self, path: Path) -> None:
        real = path.parent / "aside" / path.name
        await asyncio.to_thread(_put_aside, path, real)
        dial = partial(asyncio.open_unix_connection, str(real))
        self._servers.append(await asyncio.start_unix_server(partial(self._forward, dial), str(path)))

    def _draw(self) -> float:
        return math.inf if self._chance is None else draw_bytes(self._chance, *self._span)

    async def _forward(self, dial: _Dial, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(writer, self._draw())
        self._connections.add(connection)
        try:
            far_reader, far = await dial()
            connection.writers.append(far)
            self.forwarded += 1
            with contextlib.suppress(ExceptionGroup):
                async with asyncio.TaskGroup() as pumps:
                    pumps.create_task(connection.pump(reader, far))
                    pumps.create_task(connection.pump(far_reader, writer))
            self.cuts += connection.left <= 0
        except OSError:
            pass  # nobody listens there any more
        finally:
            self._connections.discard(connection)
            for each in connection.writers:
                each.close()  # what was written arrives, and then the end


def _put_aside(path: Path, real: Path) -> None:
    real.parent.mkdir(exist_ok=True)
    path.rename(real)


class Counts(msgspec.Struct):
    """So far."""

    links: int
    """That were forwarded."""
    link_cuts: int
    nats_cuts: int


class Network:
    """The forwarders of a stack: one before NATS, and one before the sockets of its replicas."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls) -> AsyncIterator[Self]:
        """Every connection that it forwards ends with it."""
        pipe = asyncio.subprocess.PIPE
        # Ctrl-C is for the bench; this ends once nobody is left to tell it anything.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.forwarders", stdin=pipe, stdout=pipe, start_new_session=True
        )
        try:
            yield cls(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()

    async def stand_before_nats(self, port: int, nats_port: int) -> None:
        """The front of a `LoadedStack`."""
        await self._tell("stand_before_nats", port, nats_port)

    async def take_over_sockets(self, directories: list[Path]) -> None:
        """Of the replicas that there are and will be, until `spare`."""
        await self._tell("take_over_sockets", *map(str, directories))

    async def cut(self, seed: int, nats_every_s: float) -> Counts:
        """Cut each link from now on, and a connection to NATS every so many seconds."""
        return await self._tell("cut", seed, nats_every_s)

    async def count(self) -> Counts:
        """What was cut so far. One call at a time, as of all these."""
        return await self._tell("count")

    async def spare(self) -> Counts:
        """Cut no more; what is forwarded already is so further."""
        return await self._tell("spare")

    async def _tell(self, *command: str | float) -> Counts:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(command) + b"\n")
        return msgspec.json.decode(await self._process.stdout.readline(), type=Counts)


async def _obey() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    others: list[asyncio.Task[None]] = []
    async with (
        Forwarder.running(*LINK_BYTES) as links,
        Forwarder.running(*NATS_BYTES) as nats,
        asyncio.TaskGroup() as tasks,
    ):
        while line := await reader.readline():
            match msgspec.json.decode(line):
                case ["stand_before_nats", port, nats_port]:
                    await nats.stand_before_port(port, nats_port)
                case ["take_over_sockets", *directories]:
                    others.append(tasks.create_task(links.take_over_sockets(list(map(Path, directories)))))
                case ["cut", seed, nats_every_s]:
                    links.cut(random.Random(seed))
                    others.append(tasks.create_task(nats.cut_in_turn(random.Random(seed), nats_every_s)))
                case ["count"]:
                    pass
                case ["spare"]:
                    while others:
                        others.pop().cancel()
                    links.spare()
                    nats.spare()
                case other:
                    raise ValueError(f"unknown command {other!r}")
            counts = Counts(links=links.forwarded, link_cuts=links.cuts, nats_cuts=nats.cuts)
            print(msgspec.json.encode(counts).decode(), flush=True)
        for task in others:
            task.cancel()


if __name__ == "__main__":
    uvloop.run(_obey())
