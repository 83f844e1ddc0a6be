"""What the proofs of strictness and of leaks serve."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse


class Alone:
    """Watches whether it is ever run beside itself, by the loop or by threads; answers with what it saw so far."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._running = 0
        self.most_at_once = 0
        self.served = 0

    async def __call__(self, request: Request) -> dict[str, Any]:
        number = self._enter()
        try:
            await asyncio.sleep(float(request.query_params.get("work_s", "0")))
        finally:
            self._leave()
        return {"most_at_once": self.most_at_once, "served": self.served, "number": number}

    def _enter(self) -> int:
        with self._guard:
            self._running += 1
            self.served += 1
            self.most_at_once = max(self.most_at_once, self._running)
            return self.served

    def _leave(self) -> None:
        with self._guard:
            self._running -= 1


class Mixed:
    """Waits, reads, streams or fails, as the path says; for clients that leave whenever they like."""

    async def __call__(self, request: Request) -> Any:
        kind = request.path_params.get("kind") or request.url.path.rpartition("/")[2]
        if kind == "wait":
            await asyncio.sleep(0.02)
        elif kind == "read":
            return {"read": len(await request.body())}
        elif kind == "large":
            return bytes(1024 * 1024)
        elif kind == "fail":
            raise ValueError("as it was asked to")
        elif kind == "stream":
            return StreamingResponse(self._pieces(), media_type="text/plain")
        return Response(str(os.getpid()))

    async def _pieces(self) -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"0123456789" * 100
            await asyncio.sleep(0.002)
