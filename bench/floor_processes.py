"""The processes of the floors: HTTP in, the bus out, and what echoes at the other end.

Run as ``python -m bench.floor_processes ingress KIND BUS PORT`` or ``echo KIND BUS``; the bus is NATS' port, or a Unix
socket's path. Why all kinds in one file: they must differ in nothing but the hop that is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import nats
import uvloop
from aiohttp import web
from nats.aio.msg import Msg

PAYLOAD = b"ok"
TOKEN = b"~123456789"
NATS_PY_SUBJECT = "floor.nats-py"
PROTOCOL_SUBJECT = "floor.protocol"
_NATS_PY_TIMEOUT_S = 5.0

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class BareNats(asyncio.Protocol):
    """The fewest verbs that carry a request and its response: INFO, CONNECT, PING, PONG, SUB, PUB and MSG.

    Why not the data plane's own connection: a floor is what nobody can go below with this language and these servers.
    It has no reconnects, headers, limits, timeouts or checks, so it says what those cost. Subclasses say what to do
    with a message.
    """

    def __init__(self) -> None:
        self.is_connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rest = b""
        self._batch: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet at once: the server's INFO tells nothing that is needed here."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._transport.write(
            b'CONNECT {"verbose":false,"pedantic":false}\r\nSUB %b 1\r\nPING\r\n' % self.subject
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """Without the bus this process is of no use: end it, so that the benchmark fails instead of waiting."""
        os._exit(1)

    def data_received(self, data: bytes) -> None:
        """Take the lines and messages apart, cut anywhere."""
        data = self._rest + data if self._rest else data
        at = 0
        while (line_end := data.find(b"\r\n", at)) >= 0:
            if data.startswith(b"MSG", at):
                words = data[at:line_end].split(b" ")
                body = line_end + 2
                body_end = body + int(words[-1])
                if len(data) < body_end + 2:
                    break
                self.on_message(words, data[body:body_end])
                at = body_end + 2
                continue
            if data.startswith(b"PING", at):
                self._transport.write(b"PONG\r\n")
            elif data.startswith(b"PONG", at):
                self.is_connected.set_result(None)  # answers our only PING
            elif data.startswith(b"-ERR", at):
                raise ConnectionError(data[at:line_end].decode())
            at = line_end + 2
        self._rest = data[at:]

    def send(self, message: bytes) -> None:
        """Write with all else of this turn of the loop: a system call for each message halves the rate at c=64."""
        if not self._batch:
            self._loop.call_soon(self._flush)
        self._batch.append(message)

    def _flush(self) -> None:
        self._transport.write(b"".join(self._batch))
        self._batch.clear()

    subject: bytes
    """What is subscribed to."""

    def on_message(self, words: list[bytes], payload: bytes) -> None:
        """``words``: MSG, subject, sid, maybe the reply subject, size."""
        raise NotImplementedError


class BareResponder(BareNats):
    """Sends every request's payload back."""

    def __init__(self, subject: bytes) -> None:
        self.subject = subject
        super().__init__()

    def on_message(self, words: list[bytes], payload: bytes) -> None:
        """Answer in the read path."""
        self.send(b"PUB %b %d\r\n%b\r\n" % (words[3], len(payload), payload))


class BareRequester(BareNats):
    """Asks, and awaits the answer for as long as it takes (wrk counts what takes over two seconds as an error)."""

    def __init__(self) -> None:
        self.subject = b"_INBOX.floor.*"
        self._numbers = itertools.count()
        self._waiting: dict[bytes, asyncio.Future[bytes]] = {}
        super().__init__()

    def request(self, subject: bytes, payload: bytes) -> asyncio.Future[bytes]:
        """The answer's payload."""
        reply = b"_INBOX.floor.%d" % next(self._numbers)
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._waiting[reply] = answer
        self.send(b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(payload), payload))
        return answer

    def on_message(self, words: list[bytes], payload: bytes) -> None:
        """Hand the answer to whoever waits; he may be gone when wrk closed the connection."""
        answer = self._waiting.pop(words[1])
        if not answer.done():
            answer.set_result(payload)


class UnixEcho(asyncio.Protocol):
    """Sends back what comes, in one write for each read."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep it."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Echo."""
        self._transport.write(data)


class UnixRequester(asyncio.Protocol):
    """Sends numbered requests of one size, and awaits their echoes."""

    _NUMBER_BYTES = 8

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._waiting: dict[bytes, asyncio.Future[bytes]] = {}
        self._batch: list[bytes] = []
        self._rest = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep it."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """As of `BareNats`."""
        os._exit(1)

    def request(self, payload: bytes) -> asyncio.Future[bytes]:
        """The answer's payload."""
        number = next(self._numbers).to_bytes(self._NUMBER_BYTES, "big")
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._waiting[number] = answer
        if not self._batch:
            self._loop.call_soon(self._flush)
        self._batch.append(number + payload)
        return answer

    def _flush(self) -> None:
        self._transport.write(b"".join(self._batch))
        self._batch.clear()

    def data_received(self, data: bytes) -> None:
        """Take the echoes apart, cut anywhere."""
        data = self._rest + data if self._rest else data
        size = self._NUMBER_BYTES + len(PAYLOAD)
        at = 0
        while at + size <= len(data):
            answer = self._waiting.pop(data[at : at + self._NUMBER_BYTES])
            if not answer.done():
                answer.set_result(data[at + self._NUMBER_BYTES : at + size])
            at += size
        self._rest = data[at:]


async def bare() -> Handler:
    """Answers by itself whatever the other systems are asked."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        if path == "/echo":
            pieces = []
            while piece := await request.content.readany():
                pieces.append(piece)
            return web.Response(body=b"".join(pieces))
        if path == "/upload":
            size = 0
            while piece := await request.content.readany():
                size += len(piece)
            return web.Response(body=str(size).encode())
        if path == "/tokens":
            return await _stream_tokens(request)
        if path == "/paced":
            return await _stream_paced(request)
        return web.Response(body=PAYLOAD)

    return handle


async def _stream_tokens(request: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse()
    response.enable_chunked_encoding()
    await response.prepare(request)
    for _ in range(int(request.query["count"])):
        await response.write(TOKEN)
    await response.write_eof()
    return response


async def _stream_paced(request: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse()
    response.enable_chunked_encoding()
    await response.prepare(request)
    began, rate = time.monotonic(), float(request.query["rate"])
    for number in range(int(request.query["count"])):
        await asyncio.sleep(began + number / rate - time.monotonic())
        await response.write(b"~%020d" % time.monotonic_ns())
    await response.write_eof()
    return response


async def over_unix(path: str) -> Handler:
    """Floor C: asks the responder in a Ray actor over a Unix socket."""
    _, requester = await asyncio.get_running_loop().create_unix_connection(UnixRequester, path)

    async def handle(_request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=await requester.request(PAYLOAD))

    return handle


async def over_nats_py(nats_port: int) -> Handler:
    """Floor A: asks the responder with nats-py, as its documentation shows."""
    client = await nats.connect(f"nats://127.0.0.1:{nats_port}", allow_reconnect=False)

    async def handle(_request: web.BaseRequest) -> web.StreamResponse:
        answer = await client.request(NATS_PY_SUBJECT, PAYLOAD, timeout=_NATS_PY_TIMEOUT_S)
        return web.Response(body=answer.data)

    return handle


async def over_protocol(nats_port: int) -> Handler:
    """Floor B: asks the responder with a plain protocol class."""
    loop = asyncio.get_running_loop()
    _, requester = await loop.create_connection(BareRequester, "127.0.0.1", nats_port)
    await requester.is_connected
    subject = PROTOCOL_SUBJECT.encode()

    async def handle(_request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=await requester.request(subject, PAYLOAD))

    return handle


async def serve(kind: str, port: int, bus: str) -> None:
    """Serve until SIGTERM."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    handlers: dict[str, Callable[[], Awaitable[Handler]]] = {
        "bare": bare,
        "nats-py": lambda: over_nats_py(int(bus)),
        "protocol": lambda: over_protocol(int(bus)),
        "unix": lambda: over_unix(bus),
    }
    http = web.Server(await handlers[kind]())
    server = await loop.create_server(http, "127.0.0.1", port)
    await stopping.wait()
    server.close()
    await http.shutdown(1.0)


async def echo_over_nats_py(nats_port: int) -> None:
    """Floor A's responder; echoes for ever."""
    client = await nats.connect(f"nats://127.0.0.1:{nats_port}", allow_reconnect=False)

    async def echo(message: Msg) -> None:
        await message.respond(message.data)

    await client.subscribe(NATS_PY_SUBJECT, cb=echo)
    await client.flush()
    await asyncio.Event().wait()


async def echo_over_protocol(nats_port: int) -> None:
    """Floor B's responder; echoes for ever."""
    loop = asyncio.get_running_loop()
    _, responder = await loop.create_connection(
        lambda: BareResponder(PROTOCOL_SUBJECT.encode()), "127.0.0.1", nats_port
    )
    await responder.is_connected
    await asyncio.Event().wait()


def run_echo(kind: str, nats_port: int) -> None:
    """Echo until SIGTERM.

    Why a thread although the process does nothing else: a replica serves the bus from a thread of its own, beside the
    main thread that belongs to Ray. Ray itself is left out, so that a floor is up at once.
    """
    # Before any thread exists, so that all inherit it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    echo = {"nats-py": echo_over_nats_py, "protocol": echo_over_protocol}[kind]

    def run() -> None:
        try:
            uvloop.run(echo(nats_port))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # a thread that failed must not leave an idle process

    threading.Thread(target=run, daemon=True, name="bus").start()
    signal.sigwait({signal.SIGTERM})


class _UnixReplica:
    """Floor C's responder, as a Ray actor: on a thread beside Ray's own, as a replica's bus is."""

    def serve(self, path: str) -> None:
        """Return once it listens."""
        listens = threading.Event()

        async def run() -> None:
            await asyncio.get_running_loop().create_unix_server(UnixEcho, path)
            listens.set()
            await asyncio.Event().wait()

        threading.Thread(target=lambda: uvloop.run(run()), daemon=True, name="bus").start()
        listens.wait()


def run_actor(path: str) -> None:
    """Let a Ray actor echo until SIGTERM."""
    import ray

    root = str(Path(__file__).parents[1])
    ray.init(
        address="local",
        include_dashboard=False,
        num_cpus=1,
        object_store_memory=100 * 1024 * 1024,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": {"PYTHONPATH": root}},
        _temp_dir=str(Path(path).parent / "r"),
    )
    # By its name in this package: as a program this module is `__main__`.
    from bench.floor_processes import _UnixReplica as replica_class

    replica = ray.remote(replica_class).remote()
    ray.get(replica.serve.remote(path))
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    ray.shutdown()


def main() -> None:
    """Read the arguments and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["ingress", "echo"])
    parser.add_argument("kind", choices=["bare", "nats-py", "protocol", "unix"])
    parser.add_argument("bus", help="NATS' port, or the path of a Unix socket")
    parser.add_argument("port", type=int, nargs="?", help="of the ingress")
    options = parser.parse_args()
    if options.part == "ingress":
        uvloop.run(serve(options.kind, options.port, options.bus))
    elif options.kind == "unix":
        run_actor(options.bus)
    else:
        run_echo(options.kind, int(options.bus))


if __name__ == "__main__":
    main()
