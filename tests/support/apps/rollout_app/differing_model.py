"""What the tests of differing responses serve: labels among ids and times that are always others."""

from __future__ import annotations

import asyncio
import random
import time
import uuid

from starlette.requests import Request

MEDIAN_S = 0.05
"""Long beside what the way to one host takes more than that to another: versions may run on one each."""
SPREAD = 0.5


class Labels:
    """Answers the label of a number; a share of the answers has a wrong one, and looks right."""

    def __init__(self, wrong: float = 0.0) -> None:
        self._wrong = wrong

    async def __call__(self, request: Request) -> dict[str, object]:
        label = int(request.query_params["number"]) % 10
        if random.random() < self._wrong:
            label = (label + 1) % 10
        await asyncio.sleep(random.lognormvariate(0, SPREAD) * MEDIAN_S)
        return {
            "id": str(uuid.uuid4()),
            # As text, which differs each time: as a number it is within the tolerance or not, by the machine's uptime.
            "at": str(time.monotonic_ns()),
            "label": label,
            "scores": [{"label": label, "score": 0.9 + random.random() * 1e-9}],
        }
