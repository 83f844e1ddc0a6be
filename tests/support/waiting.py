"""Waiting for what nobody tells of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def eventually(is_so: Callable[[], object], *, within_s: float = 30.0, every_s: float = 0.01) -> None:
    """Ask again and again until ``is_so``; raises TimeoutError after ``within_s`` seconds.

    For what has no event of its own: a log file, a count, another process.
    """
    async with asyncio.timeout(within_s):
        while not is_so():  # noqa: ASYNC110 - as said
            await asyncio.sleep(every_s)
