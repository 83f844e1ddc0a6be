"""Ways to know that something is up."""

from __future__ import annotations

import asyncio

import aiohttp

from muster.embedded.process import Probe

_ATTEMPT_S = 2.0


def takes_connections(port: int) -> Probe:
    """Ready when something listens on ``port``."""

    async def probe() -> str | None:
        try:
            async with asyncio.timeout(_ATTEMPT_S):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError as error:  # TimeoutError is one
            return f"port {port}: {error}"
        writer.close()
        return None

    return probe


def answers_http(url: str) -> Probe:
    """Ready when a GET of ``url`` gets 200."""

    async def probe() -> str | None:
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ATTEMPT_S)) as session,
                session.get(url) as response,
            ):
                return None if response.status == 200 else f"{url} answers {response.status}"
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"{url}: {error!r}"

    return probe
