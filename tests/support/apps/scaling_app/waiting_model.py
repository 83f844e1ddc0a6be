"""A model that takes time and no CPU."""

from __future__ import annotations

import asyncio

from starlette.requests import Request


class Waiting:
    """Answers every request after so long that what its way takes on a slow machine is little beside it."""

    async def __call__(self, request: Request) -> str:
        """Anything is answered alike."""
        await asyncio.sleep(0.3)
        return "done"
