"""A proxy that gets more uploads at once than it has memory for: what becomes of them, and of its memory.

Why not in the test: `python -m bench.uploads` demands the same, more strictly, and again and again.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import msgspec
import psutil

from tests.support.loads.upload_load import Upload
from tests.support.stacks.bare_stack import BareStack, Runner

MIB = 1024 * 1024
UPLOADS = 300
UPLOAD_BYTES = 5 * MIB
RSS_BYTES_MAX = 200 * MIB
"""Of the proxy, while they come."""
RETAINED_BYTES_MAX = 24 * MIB
"""Above what the proxy had before, once the memory was given back."""
GIVEN_BACK_WITHIN_S = 60.0

APP = """
from starlette.requests import Request

async def sink(request: Request) -> bytes:
    size = 0
    async for piece in request.stream():
        size += len(piece)
    return b"%d" % size
"""


class Burst(msgspec.Struct):
    """What became of so many uploads that came at once, and of their proxy."""

    uploads: list[Upload]
    before_bytes: int
    most_bytes: int
    """What the proxy had in memory."""
    given_back_after_s: float

    @property
    def refused(self) -> list[Upload]:
        """Those that found no room."""
        return [upload for upload in self.uploads if upload.status == 503]

    @property
    def text(self) -> str:
        """It in lines."""
        before, most, after = self.before_bytes // MIB, self.most_bytes // MIB, self.given_back_after_s
        lines = [f"{before} MiB before, {most} at most, given back after {after:.1f} s"]
        groups: dict[tuple[str, int, str], list[Upload]] = {}
        for upload in self.uploads:
            key = (upload.kind, upload.status, upload.error)
            groups.setdefault(key, []).append(upload)
        for (kind, status, error), group in sorted(groups.items()):
            answered = [upload.answered_after_s for upload in group]
            read = [upload.read_after_s for upload in group]
            lines.append(
                f"{kind:8} {status} {error or 'whole'}: {len(group):3}, answered after {min(answered):.2f}"
                f" to {max(answered):.2f} s, read after {min(read):.2f} to {max(read):.2f} s"
            )
        return "\n".join(lines)


async def add_sink(stack: BareStack, directory: Path) -> Runner:
    """A proxy, and two replicas that read what is uploaded to ``/sink``."""
    (directory / "sink_app.py").write_text(APP)
    (proxy,) = await stack.add_proxies(1, request_timeout_s=120.0)
    tags = ["d/sink#0", "d/sink#1"]
    for tag in tags:
        await stack.add_replica(tag, "sink_app:sink", app_dir=str(directory))
    await stack.put_endpoint("d/sink", "/sink")
    await stack.put_backend("d/sink", tags)
    return proxy


async def upload_too_much(proxy: Runner) -> Burst:
    """All of them at once; returns when the memory was given back, or `GIVEN_BACK_WITHIN_S` is over."""
    process = psutil.Process(proxy.process.pid)
    before_bytes = most_bytes = process.memory_info().rss
    uploading = asyncio.gather(upload_at_once(proxy, UPLOADS))
    while not uploading.done():
        most_bytes = max(most_bytes, process.memory_info().rss)
        await asyncio.sleep(0.02)
    ended = time.monotonic()
    while process.memory_info().rss > before_bytes + RETAINED_BYTES_MAX:
        if time.monotonic() > ended + GIVEN_BACK_WITHIN_S:
            break
        await asyncio.sleep(0.2)
    (uploads,) = await uploading
    return Burst(uploads, before_bytes, most_bytes, time.monotonic() - ended)


async def upload_at_once(proxy: Runner, count: int) -> list[Upload]:
    """See `upload_load`, which has a process of its own."""
    host, port = proxy.url.removeprefix("http://").split(":")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.loads.upload_load", host, port, "/sink"),
        *(str(count), str(UPLOAD_BYTES)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return msgspec.json.decode(output, type=list[Upload])
