"""Sends captured requests again: to an old version, to the old version once more, and to a new one.

Why requests that show a difference are sent again, up to `REPEATS_MAX` times: a fault that shows in half a percent of
the requests shows in five of a thousand, which are too few to tell it from chance. Each of them repeated tells.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Final, final

from serve_common.protocol.captures import CapturedPair
from serve_common.replay.comparison import Comparison
from serve_common.replay.differences import ReplayedResponse

REPEATS_MAX: Final = 24
"""Repeats of one request."""
VAIN_REPEATS_MAX: Final = 4
"""Repeats of one request in a row in which the new version does not differ again."""
ALL_REPEATS_MIN: Final = 200
"""Repeats in all that are allowed however few requests there are; otherwise as many as requests."""


class ReplayTarget(Enum):
    """Which version a request is sent to."""

    OLD = "old"
    NEW = "new"


Send = Callable[[CapturedPair, ReplayTarget], Awaitable[ReplayedResponse]]
"""Sends one captured request to a version and returns its response."""


@final
class Replay:
    """Replays captured requests, several at a time, into a `Comparison`."""

    def __init__(
        self,
        send: Send,
        comparison: Comparison,
        *,
        rng: Callable[[], float],
        concurrency: int = 1,
        on_progress: Callable[[int], None] = lambda _done: None,
    ) -> None:
        """``rng`` returns random numbers in [0, 1); ``on_progress`` gets the number of requests that are compared."""
        self._send = send
        self._comparison = comparison
        self._rng = rng
        self._concurrency = concurrency
        self._on_progress = on_progress
        self._repeats_left = 0
        self._done = 0

    async def run(self, pairs: Sequence[CapturedPair]) -> None:
        """Replay all ``pairs``. The first error of sending ends it."""
        self._repeats_left = max(ALL_REPEATS_MIN, len(pairs))
        rest = iter(pairs)

        async def replay_next() -> None:
            for pair in rest:
                await self._replay(pair)
                self._done += 1
                self._on_progress(self._done)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._concurrency):
                group.create_task(replay_next())

    async def _replay(self, pair: CapturedPair) -> None:
        old = await self._send(pair, ReplayTarget.OLD)
        again, new = await self._send_both(pair)
        keys = self._comparison.add(pair.request_id, old, again, new)
        vain = 0
        for _ in range(REPEATS_MAX):
            if vain == VAIN_REPEATS_MAX or not self._repeats_left:
                break
            if not keys or not self._comparison.is_worth_repeating(keys):
                break
            self._repeats_left -= 1
            again, new = await self._send_both(pair)
            shown = self._comparison.add(pair.request_id, old, again, new, is_repeat=True)
            vain = 0 if keys & shown else vain + 1

    async def _send_both(self, pair: CapturedPair) -> tuple[ReplayedResponse, ReplayedResponse]:
        """Send to both versions, in random order: what changes with time must not speak against either."""
        if self._rng() < 0.5:
            again = await self._send(pair, ReplayTarget.OLD)
            return again, await self._send(pair, ReplayTarget.NEW)
        new = await self._send(pair, ReplayTarget.NEW)
        return await self._send(pair, ReplayTarget.OLD), new
