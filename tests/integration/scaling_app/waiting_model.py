"""A model that takes time and no CPU."""

from __future__ import annotations

import asyncio

from starlette.requests import Request


class Waiting:
    """Answers every request after a tenth of a second."""

    async def __call__(self, request: Request) -> str:
        """Anything is answered alike."""
        await asyncio.sleep(0.1)
        return "done"
