"""Clients that each wait for an answer before they ask again, in a number that changes while they run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

import aiohttp
import msgspec

ANSWER_WITHIN_S: Final = 60.0


class Asked(msgspec.Struct, frozen=True, gc=False):
    """One request."""

    begun_at: float
    """The loop's time."""
    took_s: float
    error: str
    """Empty for an answer with status 200."""


class Clients:
    """So many clients as `set` said last."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.asked: list[Asked] = []
        """In the order in which they ended."""
        self._session, self._url = session, url
        self._wanted = 0
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()

    @classmethod
    @contextlib.asynccontextmanager
    async def asking(cls, url: str) -> AsyncIterator[Clients]:
        """None at first; all are gone when the block ends."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=ANSWER_WITHIN_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            clients = cls(session, url)
            try:
                yield clients
            finally:
                await clients.end()

    def set(self, wanted: int) -> None:
        """So many from now on; those who are too many end with their answer."""
        self._wanted = wanted
        for number in range(wanted):
            known = self._tasks.get(number)
            if known is None or known.done():
                self._tasks[number] = self._loop.create_task(self._ask_on(number))

    async def end(self) -> None:
        """Wait until all have their last answer."""
        self.set(0)
        await asyncio.gather(*self._tasks.values())

    async def once(self) -> Asked:
        """One request beside all others."""
        begun_at = self._loop.time()
        error = ""
        try:
            async with self._session.get(self._url) as response:
                await response.read()
                if response.status != 200:
                    error = f"status {response.status}"
        except (aiohttp.ClientError, TimeoutError) as caught:
            error = repr(caught)
        asked = Asked(begun_at, self._loop.time() - begun_at, error)
        self.asked.append(asked)
        return asked

    async def _ask_on(self, number: int) -> None:
        while number < self._wanted:
            if (await self.once()).error:
                await asyncio.sleep(0.1)
