"""Clients that each wait for a response before they ask again, and what the stack did beside what they felt."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator, Sequence
from typing import Final

import aiohttp
import msgspec

from muster.client.admin import AdminClient
from serve_common.api.queries import GetAutoscaling, GetDeploymentInfo
from serve_common.api.views import AutoscalingView

ANSWER_WITHIN_S: Final = 60.0
POLL_PERIOD_S: Final = 0.5


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


class Poll(msgspec.Struct, frozen=True):
    """The deployment at one moment."""

    at: float
    """The loop's time."""
    running: int
    decided: int
    seen: float | None
    wanted: float | None
    verdict: str
    why: str
    source: str


async def watch(admin: AdminClient, name: str, polls: list[Poll]) -> None:
    """Poll for ever."""
    loop = asyncio.get_running_loop()
    while True:
        info, scalings = await asyncio.gather(
            admin.call(GetDeploymentInfo(name=name)), admin.call(GetAutoscaling())
        )
        view = next((v for v in scalings if v.backend_tag == info.name), _NONE)
        running = sum(replica.state in ("running", "updating") for replica in info.replicas)
        polls.append(
            Poll(
                at=loop.time(),
                running=running,
                decided=view.num_replicas,
                seen=view.seen,
                wanted=view.wanted,
                verdict=view.verdict,
                why=view.why,
                source=view.source,
            )
        )
        await asyncio.sleep(POLL_PERIOD_S)


_NONE = AutoscalingView(backend_tag="", num_replicas=0, min_replicas=0, max_replicas=0)


def rows(polls: Sequence[Poll], asked: Sequence[Asked], started_at: float, step_s: float = 1.0) -> list[str]:
    """A line for each second in which anything about the replicas changed, and one at least every ten seconds."""
    lines = [" t/s  running  decided  seen   wanted  req/s   p50/ms   p99/ms  failed  what it says"]
    last: tuple[object, ...] = ()
    last_at = float("-inf")
    for poll in polls:
        now = (poll.running, poll.decided, poll.verdict)
        if now == last and poll.at - last_at < 10.0:
            continue
        last, last_at = now, poll.at
        took = [a.took_s for a in asked if poll.at - step_s <= a.begun_at + a.took_s < poll.at]
        failed = sum(bool(a.error) for a in asked if poll.at - step_s <= a.begun_at + a.took_s < poll.at)
        lines.append(
            f"{poll.at - started_at:4.0f}  {poll.running:7d}  {poll.decided:7d}  {_shown(poll.seen):>5}  "
            f"{_shown(poll.wanted):>6}  {len(took) / step_s:5.0f}  {_ms(took, 50):>7}  {_ms(took, 99):>7}  "
            f"{failed:6d}  {poll.verdict}: {poll.why}"
        )
    return lines


def percentile_ms(took_s: Sequence[float], percent: int) -> float:
    """NaN of nothing."""
    if not took_s:
        return float("nan")
    if len(took_s) == 1:
        return took_s[0] * 1000
    return statistics.quantiles(took_s, n=100, method="inclusive")[percent - 1] * 1000


def _ms(took_s: Sequence[float], percent: int) -> str:
    return f"{percentile_ms(took_s, percent):.0f}" if took_s else "-"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
