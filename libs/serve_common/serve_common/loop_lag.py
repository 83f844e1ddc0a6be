"""How late an event loop comes to what is due: the one number that tells of a blocked loop and of too little CPU.

Why a histogram and not the longest since the last scrape: two who scrape would take it from one another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, final

from serve_common.measures import Observations
from serve_common.metrics_catalogue.everywhere import LOOP_LAG

EVERY_S: Final = 0.25


@final
class LoopLag:
    """Measures the loop on which `run` runs."""

    def __init__(self) -> None:
        self.observations: Final = Observations(LOOP_LAG.buckets)
        """Seconds; read by other threads, which may miss the newest one."""

    async def run(self) -> None:
        """Until cancelled."""
        now = asyncio.get_running_loop().time
        while True:
            due_at = now() + EVERY_S
            await asyncio.sleep(EVERY_S)
            self.observations.observe(max(0.0, now() - due_at))


@final
class OtherLoopsLag:
    """Measures a loop that runs in another thread, and costs it one callback each time."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        observe: Callable[[float], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``observe`` takes seconds, in the thread of ``loop``."""
        self._loop = loop
        self._observe = observe
        self._now = now
        self._asked_at: float | None = None

    def ask(self) -> None:
        """Measure, unless the last measuring has not come to its end. Raises RuntimeError when the loop is closed."""
        if self._asked_at is None:
            self._asked_at = self._now()
            self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        asked_at, self._asked_at = self._asked_at, None
        if asked_at is not None:
            self._observe(self._now() - asked_at)
