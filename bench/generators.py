"""Makes the loads: wrk for requests, and clients of our own for what wrk cannot do.

Why raw sockets for bodies and streams: an HTTP client in Python would cost more than what it measures.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from bench.measure import MIB, Figures, Kind, Load
from bench.wrk import run_wrk

_PIECE_BYTES: Final = MIB
_READ_BYTES: Final = 256 * 1024
_MARK: Final = b"~"
_TRANSFERS_MIN: Final = 2
_TIMEOUT_S: Final = 120.0


class Generators:
    """Runs any load; needs ``wrk``."""

    def __init__(self, wrk: str, directory: Path) -> None:
        self._wrk = wrk
        self._directory = directory

    async def run(self, load: Load, url: str, seconds: int) -> Figures:
        """As `measure.Generate`."""
        match load.kind:
            case Kind.REQUESTS:
                return await self._requests(load, url, seconds)
            case Kind.TRANSFER:
                return await _transfer(load, url, seconds)
            case Kind.TOKENS:
                return await _tokens(load, url, seconds)
            case Kind.PACED:
                return await _paced(load, url, seconds)

    async def _requests(self, load: Load, url: str, seconds: int) -> Figures:
        script = None
        if load.body_bytes:
            script = self._directory / f"post-{load.body_bytes}.lua"
            script.write_text(
                f'wrk.method = "POST"\nwrk.body = string.rep("x", {load.body_bytes})\n'
                'wrk.headers["Content-Type"] = "application/octet-stream"\n'
            )
        figures = await run_wrk(self._wrk, url, load.connections, seconds, script)
        return Figures(
            requests=figures.requests,
            rate=figures.requests_per_s,
            errors=figures.errors,
            p50_ms=figures.p50_ms,
            p99_ms=figures.p99_ms,
        )


class _ResponseHead(msgspec.Struct):
    status: int
    is_chunked: bool
    length: int


async def _transfer(load: Load, url: str, seconds: int) -> Figures:
    """Bodies one after the other, for as long as asked; each is sent while its echo is read."""
    loop = asyncio.get_running_loop()
    began, errors = loop.time(), 0
    taken_ms: list[float] = []
    while len(taken_ms) + errors < _TRANSFERS_MIN or loop.time() - began < seconds:
        one_began = loop.time()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                answer_bytes = await _send_body(url, load.body_bytes)
        except (OSError, EOFError, ValueError):  # TimeoutError is an OSError
            errors += 1
            if errors >= _TRANSFERS_MIN:
                break
            continue
        if answer_bytes in (load.body_bytes, len(str(load.body_bytes))):
            taken_ms.append((loop.time() - one_began) * 1000)
        else:
            errors += 1
    rate = load.body_bytes / MIB / (statistics.median(taken_ms) / 1000) if taken_ms else 0.0
    return Figures(
        requests=len(taken_ms),
        rate=rate,
        errors=errors,
        p50_ms=statistics.median(taken_ms) if taken_ms else None,
    )


async def _send_body(url: str, size: int) -> int:
    """How long the answer's body is. Raises ValueError for another status than 200."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=4 * MIB)
    piece = b"x" * _PIECE_BYTES
    try:
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(_read_whole(reader))
            writer.write(
                f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
                f"Content-Type: application/octet-stream\r\nContent-Length: {size}\r\n\r\n".encode()
            )
            left = size
            while left > 0 and not reading.done():
                writer.write(piece[: min(left, _PIECE_BYTES)])
                left -= _PIECE_BYTES
                await writer.drain()
    except* (OSError, EOFError, ValueError) as group:
        raise ValueError(str(group.exceptions[0])) from group
    finally:
        writer.close()
    return reading.result()


async def _read_whole(reader: asyncio.StreamReader) -> int:
    answer = await _read_head(reader)
    if answer.status != 200:
        raise ValueError(f"status {answer.status}")
    if not answer.is_chunked:
        left = answer.length
        while left > 0:
            piece = await reader.read(min(left, _READ_BYTES))
            if not piece:
                raise EOFError
            left -= len(piece)
        return answer.length
    total = 0
    while size := int(await reader.readuntil(b"\r\n"), 16):
        total += size
        left = size + 2
        while left > 0:
            piece = await reader.read(min(left, _READ_BYTES))
            if not piece:
                raise EOFError
            left -= len(piece)
    return total


async def _read_head(reader: asyncio.StreamReader) -> _ResponseHead:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0].strip()
    return _ResponseHead(
        status=int(head.split(maxsplit=2)[1]),
        is_chunked=b"\r\ntransfer-encoding: chunked" in head,
        length=int(length) if length else 0,
    )


class _TokenCounts:
    def __init__(self) -> None:
        self.tokens = self.requests = self.errors = 0
        self.first_ms: list[float] = []


async def _tokens(load: Load, url: str, seconds: int) -> Figures:
    loop = asyncio.get_running_loop()
    counts = _TokenCounts()
    began = loop.time()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(load.connections):
            tasks.create_task(_token_client(load, url, began + seconds, counts))
    taken_s = loop.time() - began
    return Figures(
        requests=counts.requests,
        rate=counts.tokens / taken_s,
        errors=counts.errors + (counts.requests == 0),
        first_ms=statistics.median(counts.first_ms) if counts.first_ms else None,
    )


async def _token_client(load: Load, url: str, until: float, counts: _TokenCounts) -> None:
    """Stream after stream; what is counted is the mark of each token, wherever the stream is cut."""
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    request = f"GET {parts.path}?count={load.tokens} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=4 * MIB)
    try:
        while loop.time() < until:
            sent_at = loop.time()
            writer.write(request)
            async with asyncio.timeout(_TIMEOUT_S):
                answer = await _read_head(reader)
                if answer.status != 200:
                    raise ValueError(f"status {answer.status}")
                count, tail = 0, b""
                while count < load.tokens or (answer.is_chunked and not tail.endswith(b"0\r\n\r\n")):
                    piece = await reader.read(_READ_BYTES)
                    if not piece:
                        raise EOFError
                    if not count:
                        counts.first_ms.append((loop.time() - sent_at) * 1000)
                    found = piece.count(_MARK)
                    count += found
                    counts.tokens += found
                    tail = (tail + piece)[-5:]
            counts.requests += 1
    except (OSError, EOFError, ValueError):
        counts.errors += 1
    finally:
        writer.close()


_STAMP: Final = re.compile(rb"~([0-9]{20})")


async def _paced(load: Load, url: str, seconds: int) -> Figures:
    """One stream a client, at the model's pace; the latencies are from a token's making to its arrival."""
    delays_ms: list[float] = []
    errors = 0

    async def client(number: int) -> None:
        nonlocal errors
        await asyncio.sleep(number / load.connections / load.tokens)  # so that tokens do not come all at once
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await _read_paced(url, load.tokens * seconds, load.tokens, delays_ms)
        except (OSError, EOFError, ValueError):
            errors += 1

    async with asyncio.TaskGroup() as tasks:
        for number in range(load.connections):
            tasks.create_task(client(number))
    ordered = sorted(delays_ms) or [0.0]
    return Figures(
        requests=load.connections - errors,
        rate=len(delays_ms) / seconds,
        errors=errors,
        p50_ms=ordered[len(ordered) // 2],
        p99_ms=ordered[len(ordered) * 99 // 100],
    )


async def _read_paced(url: str, count: int, rate: int, delays_ms: list[float]) -> None:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        query = f"count={count}&rate={rate}"
        writer.write(f"GET {parts.path}?{query} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
        answer = await _read_head(reader)
        if answer.status != 200:
            raise ValueError(f"status {answer.status}")
        tail = b""
        while count:
            piece = await reader.read(_READ_BYTES)
            now = time.monotonic_ns()
            if not piece:
                raise EOFError
            tail += piece
            end = 0
            for found in _STAMP.finditer(tail):
                delays_ms.append((now - int(found[1])) / 1e6)
                end = found.end()
                count -= 1
            tail = tail[end:]
    finally:
        writer.close()
