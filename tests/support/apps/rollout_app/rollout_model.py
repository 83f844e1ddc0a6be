"""What the tests of rollouts serve: some requests fail, and all take a time that varies."""

from __future__ import annotations

import asyncio
import random

from starlette.requests import Request

MEDIAN_S = 0.02
SPREAD = 0.5


class Rolled:
    """Answers its name. Times are log-normal; a share of the requests fails."""

    def __init__(self, name: str, errors: float = 0.0, slowdown: float = 1.0) -> None:
        self._name, self._errors, self._slowdown = name, errors, slowdown

    async def __call__(self, _request: Request) -> str:
        if random.random() < self._errors:
            raise RuntimeError("planted")
        await asyncio.sleep(random.lognormvariate(0, SPREAD) * MEDIAN_S * self._slowdown)
        return self._name
