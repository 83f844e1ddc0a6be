"""What every system of the benchmark serves: the same code, written against what Ray Serve's users know."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

TOKEN = b"~123456789"


class Noop:
    """Answers at once, without reading the request."""

    async def __call__(self, request: Request) -> str:
        return "ok"


class Echo:
    """Sends back what it was sent, held whole."""

    async def __call__(self, request: Request) -> Response:
        return Response(await request.body(), media_type="application/octet-stream")


class Upload:
    """Counts what it is sent, piece by piece."""

    async def __call__(self, request: Request) -> str:
        size = 0
        async for piece in request.stream():
            size += len(piece)
        return str(size)


class Tokens:
    """Streams ``?count`` pieces of ten bytes."""

    async def __call__(self, request: Request) -> Response:
        return StreamingResponse(self._tokens(int(request.query_params["count"])), media_type="text/plain")

    async def _tokens(self, count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield TOKEN


class Paced:
    """Streams ``?count`` pieces at ``?rate`` a second, each the time when it was made (ns, monotonic)."""

    async def __call__(self, request: Request) -> Response:
        query = request.query_params
        tokens = self._tokens(int(query["count"]), float(query["rate"]))
        return StreamingResponse(tokens, media_type="text/plain")

    async def _tokens(self, count: int, rate: float) -> AsyncIterator[bytes]:
        began = time.monotonic()
        for number in range(count):
            await asyncio.sleep(began + number / rate - time.monotonic())
            yield b"~%020d" % time.monotonic_ns()


class Front:
    """Asks another deployment for its answer."""

    def __init__(self, back: Any = None) -> None:
        if back is None:
            from muster.handles import get_deployment_handle

            back = get_deployment_handle("back", "chain")
        self._back = back

    async def __call__(self, request: Request) -> str:
        answer: str = await self._back.ask.remote("question")
        return answer


class Back:
    """Asked by handle only."""

    async def ask(self, question: str) -> str:
        return question

    async def __call__(self, request: Request) -> str:
        return "ask me by handle"


class VersionedNoop:
    """Answers the version that it was made with, so that one sees over HTTP which version serves."""

    def __init__(self, version: str) -> None:
        self._answer = version.encode()

    async def __call__(self, request: Request) -> bytes:
        return self._answer


class Waiting:
    """Takes its time and no CPU, so that many replicas of it fit on a small machine."""

    def __init__(self, work_s: float = 0.1) -> None:
        self._work_s = work_s

    async def __call__(self, request: Request) -> str:
        await asyncio.sleep(self._work_s)
        return "done"
