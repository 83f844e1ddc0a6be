"""One process of a floor: HTTP in, the bus out. Run as ``python -m bench.floor_ingress KIND PORT NATS_PORT``.

Why all kinds in one file: they must differ in nothing but the hop that is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Awaitable, Callable

import nats
import uvloop
from aiohttp import web

from bench.bare_nats import BareRequester

PAYLOAD = b"ok"
TOKEN = b"~123456789"
NATS_PY_SUBJECT = "floor.nats-py"
PROTOCOL_SUBJECT = "floor.protocol"
_NATS_PY_TIMEOUT_S = 5.0

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


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


async def serve(kind: str, port: int, nats_port: int) -> None:
    """Serve until SIGTERM."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    handlers: dict[str, Callable[[], Awaitable[Handler]]] = {
        "bare": bare,
        "nats-py": lambda: over_nats_py(nats_port),
        "protocol": lambda: over_protocol(nats_port),
    }
    http = web.Server(await handlers[kind]())
    server = await loop.create_server(http, "127.0.0.1", port)
    await stopping.wait()
    server.close()
    await http.shutdown(1.0)


def main() -> None:
    """Read the arguments and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["bare", "nats-py", "protocol"])
    parser.add_argument("port", type=int)
    parser.add_argument("nats_port", type=int)
    options = parser.parse_args()
    uvloop.run(serve(options.kind, options.port, options.nats_port))


if __name__ == "__main__":
    main()
