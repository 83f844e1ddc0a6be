"""What `bench.link_cuts` serves: bodies of all sizes, streams, WebSockets and calls by handle.

What may not be run twice writes its number into a file, each time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

import muster as serve

PIECE_BYTES = 50_000


def make(seed: int, size: int) -> bytes:
    """The bytes that stand for a request's number."""
    return random.Random(seed).randbytes(size)


def _record(path: str, number: str) -> None:
    with Path(path).open("a") as runs:
        runs.write(f"{number}\n")


async def echo(request: Request) -> Response:
    """What was posted."""
    _record(request.query_params["record"], request.query_params["number"])
    return Response(await request.body(), media_type="application/octet-stream")


async def get(request: Request) -> Response:
    """Bytes of the size that is asked for."""
    number, size = int(request.query_params["number"]), int(request.query_params["size"])
    return Response(make(number, size), media_type="application/octet-stream")


async def stream(request: Request) -> StreamingResponse:
    """The same, piece by piece, whatever was posted."""
    _record(request.query_params["record"], request.query_params["number"])
    body = await request.body()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), PIECE_BYTES):
            yield body[start : start + PIECE_BYTES]
            await asyncio.sleep(0)

    return StreamingResponse(pieces(), media_type="application/octet-stream")


async def socket(websocket: WebSocket) -> None:
    """Echoes messages until the client closes."""
    await websocket.accept()
    if "record" in websocket.query_params:
        _record(websocket.query_params["record"], websocket.query_params["number"])
    async for message in websocket.iter_bytes():
        await websocket.send_bytes(message)


_routes = [
    Route("/echo", echo, methods=["POST"]),
    Route("/stream", stream, methods=["POST"]),
    Route("/get", get),
    WebSocketRoute("/socket", socket),
]


@serve.ingress(Starlette(routes=_routes))
class Mixed:
    """The application; `call` is for handles."""

    def __init__(self, version: str) -> None:
        self.version = version

    async def call(self, number: int, body: bytes, record: str) -> bytes:
        """What was sent."""
        _record(record, str(number))
        return body
