"""Asking a process whether it is ready, over HTTP.

Why not an HTTP library: three lines of protocol, against a server on this machine.
"""

from __future__ import annotations

import asyncio

from muster.embedded.process import Probe

_TIMEOUT_S = 2.0
_ANSWER_MAX = 4096


def http_probe(port: int, path: str) -> Probe:
    """Ready when ``GET path`` on the loopback's ``port`` answers 200; otherwise the answer's text is the reason."""

    async def probe() -> str | None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                status, text = await _get(port, path)
        except (OSError, TimeoutError, ValueError) as error:
            return f"no answer from 127.0.0.1:{port}{path} ({str(error) or 'in time'})"
        return None if status == 200 else f"{path} answers {status}: {text.strip()[:200]}"

    return probe


async def http_text(port: int, path: str) -> str:
    """What ``GET path`` on the loopback's ``port`` answers. Raises OSError, TimeoutError or ValueError."""
    async with asyncio.timeout(_TIMEOUT_S):
        _, text = await _get(port, path)
    return text


async def _get(port: int, path: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        answer = b""
        while len(answer) < _ANSWER_MAX and (part := await reader.read(_ANSWER_MAX)):
            answer += part
    finally:
        writer.close()
    head, _, body = answer.decode("utf-8", errors="replace").partition("\r\n\r\n")
    words = head.split(maxsplit=2)
    if len(words) < 2:
        raise ValueError("an answer that is no HTTP")
    return int(words[1]), body
