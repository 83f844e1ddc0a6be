"""Health of this process: its event loop runs, and how late; and the bus responds.

Why `/healthz` checks only these two: it answers whether a restart would help. While NATS is unreachable it would not,
for the connection comes back by itself; it would for a connection that counts as up and receives nothing, and for a
loop that is stuck.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, final

from serve_common.errors import BusUnavailable
from serve_common.runtime.tasks import raise_if_cancelled
from serve_common.telemetry.catalogue.services import LOOP_LAG
from serve_common.telemetry.metrics import Observations

EVERY_S: Final = 0.25


@final
class LoopLag:
    """Records the lag of the loop on which `run` runs: the one number that shows a blocked loop and too little CPU.

    Why a histogram and not the maximum since the last scrape: two scrapers would take it from each other.
    """

    def __init__(self) -> None:
        self.observations: Final = Observations(LOOP_LAG.buckets)
        """Seconds; read by other threads, which may miss the newest one."""

    async def run(self) -> None:
        """Run until cancelled."""
        now = asyncio.get_running_loop().time
        while True:
            due_at = now() + EVERY_S
            await asyncio.sleep(EVERY_S)
            self.observations.observe(max(0.0, now() - due_at))


@final
class ThreadLoopLag:
    """Records the lag of a loop in another thread, at one callback per measurement."""

    def __init__(self, loop: asyncio.AbstractEventLoop, observe: Callable[[float], None]) -> None:
        """``observe`` takes seconds, in the thread of ``loop``."""
        self._loop = loop
        self._observe = observe
        self._scheduled_at: float | None = None

    def measure(self) -> None:
        """Measure, unless a measurement is in progress. Raises RuntimeError when the loop is closed."""
        if self._scheduled_at is None:
            self._scheduled_at = time.monotonic()
            self._loop.call_soon_threadsafe(self._record)

    def _record(self) -> None:
        scheduled_at, self._scheduled_at = self._scheduled_at, None
        if scheduled_at is not None:
            self._observe(time.monotonic() - scheduled_at)


HealthProbe = Callable[[], str | None]
"""Returns None when healthy, otherwise the reason. Called on another thread than the loop's, so it only reads."""

_CHECKS: Final = 8
"""Checks within the time after which something counts as dead."""
_CHECK_INTERVAL_MAX_S: Final = 2.0


@final
class Heartbeat:
    """Records periodically that the loop on which `run` runs is not stuck."""

    def __init__(self, stuck_after_s: float) -> None:
        """After ``stuck_after_s`` seconds without a turn the loop counts as stuck."""
        self._stuck_after_s = stuck_after_s
        self._last_run_at = time.monotonic()

    async def run(self) -> None:
        """Run until cancelled."""
        every_s = min(self._stuck_after_s / _CHECKS, _CHECK_INTERVAL_MAX_S)
        while True:
            self._last_run_at = time.monotonic()
            await asyncio.sleep(every_s)

    def health_error(self) -> str | None:
        """The reason why not, or None; callable from any thread."""
        stuck_s = time.monotonic() - self._last_run_at
        return f"the loop has not turned for {stuck_s:.1f} s" if stuck_s >= self._stuck_after_s else None


@final
class BusHealthCheck:
    """Pings one connection to NATS, in addition to its own pings, and records when no response comes.

    The connection's own pings end a silent connection sooner than this reports it. So this reports only when that
    mechanism itself is broken, such as a reader that has ended while the connection counts as connected.
    """

    def __init__(
        self,
        name: str,
        *,
        is_connected: Callable[[], bool],
        ping: Callable[[float], Awaitable[None]],
        silent_after_s: float,
    ) -> None:
        """``ping`` returns when NATS responds, and raises `BusUnavailable` after as many seconds as its argument."""
        self._name = name
        self._is_connected = is_connected
        self._ping = ping
        self._silent_after_s = silent_after_s
        self._unanswered_since: float | None = None

    async def run(self) -> None:
        """Run until cancelled."""
        every_s = min(self._silent_after_s / _CHECKS, _CHECK_INTERVAL_MAX_S)
        while True:
            await self._check(every_s)
            raise_if_cancelled()
            await asyncio.sleep(every_s)

    def health_error(self) -> str | None:
        """The reason why not, or None; callable from any thread."""
        since = self._unanswered_since
        silent_s = 0.0 if since is None else time.monotonic() - since
        if silent_s < self._silent_after_s:
            return None
        return f"{self._name}: connected to NATS, which has not answered a ping for {silent_s:.1f} s"

    async def _check(self, within_s: float) -> None:
        if not self._is_connected():
            self._unanswered_since = None
            return
        started_at = time.monotonic()
        try:
            await self._ping(within_s)
        except BusUnavailable:
            if not self._is_connected():
                self._unanswered_since = None
            elif self._unanswered_since is None:
                self._unanswered_since = started_at
        else:
            self._unanswered_since = None


def first_error(*whys: HealthProbe) -> HealthProbe:
    """Combine checks: the first reason that any of ``whys`` returns."""

    def why_not() -> str | None:
        return next((reason for why in whys if (reason := why()) is not None), None)

    return why_not
