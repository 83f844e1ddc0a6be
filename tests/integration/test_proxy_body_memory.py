"""More uploads at once than a proxy has memory for: each is answered, the memory is bounded and given back."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.integration.bare_stack import BareStack

pytestmark = [pytest.mark.alone, pytest.mark.integration, pytest.mark.timeout(240)]

MIB = 1024 * 1024
UPLOADS = 300
UPLOAD_BYTES = 5 * MIB
PIECE_BYTES = 64 * 1024
RSS_BYTES_MAX = 200 * MIB
KEPT_BYTES_MAX = 24 * MIB
"""Above what the proxy had before, once the memory was given back."""

APP = """
from starlette.requests import Request

async def sink(request: Request) -> bytes:
    size = 0
    async for piece in request.stream():
        size += len(piece)
    return b"%d" % size
"""


async def upload(url: str, body: bytes) -> tuple[int, bool]:
    """The status, and whether it said when to try again."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))

    async def send() -> None:
        writer.write(b"POST /sink HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body))
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(body), PIECE_BYTES):
                writer.write(body[at : at + PIECE_BYTES])
                await writer.drain()

    sending = asyncio.get_running_loop().create_task(send())
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()
    return int(head.split()[1]), b"\r\nretry-after: " in head.lower()


async def test_300_uploads_at_once_are_each_answered_in_bounded_memory(tmp_path: Path) -> None:
    (tmp_path / "sink_app.py").write_text(APP)
    async with BareStack.running(tmp_path) as stack:
        (proxy,) = await stack.add_proxies(1, request_timeout_s=120.0)
        tags = ["d/sink#0", "d/sink#1"]
        for tag in tags:
            await stack.add_replica(tag, "sink_app:sink", app_dir=str(tmp_path))
        await stack.put_endpoint("d/sink", "/sink")
        await stack.put_backend("d/sink", tags)
        process = psutil.Process(proxy.process.pid)
        before_bytes = most_bytes = process.memory_info().rss
        body = os.urandom(UPLOAD_BYTES)
        uploads = asyncio.gather(*(upload(proxy.url, body) for _ in range(UPLOADS)))
        while not uploads.done():
            most_bytes = max(most_bytes, process.memory_info().rss)
            await asyncio.sleep(0.02)
        answers = Counter(await uploads)
        print(f"{dict(answers)}; {before_bytes // MIB} MiB before, {most_bytes // MIB} at most")
        assert set(answers) == {(200, False), (503, True)}
        assert most_bytes < RSS_BYTES_MAX
        async with asyncio.timeout(60):
            while process.memory_info().rss > before_bytes + KEPT_BYTES_MAX:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        assert await upload(proxy.url, body) == (200, False), "there is room again"
