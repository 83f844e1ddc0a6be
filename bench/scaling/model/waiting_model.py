"""A model that takes as long as it is told and no CPU, so that many replicas of it fit on a small machine."""

from __future__ import annotations

import asyncio

from starlette.requests import Request


class Waiting:
    """Answers every request after the same time."""

    def __init__(self, work_s: float = 0.1) -> None:
        self._work_s = work_s

    async def __call__(self, request: Request) -> str:
        """Anything is answered alike."""
        await asyncio.sleep(self._work_s)
        return "done"
