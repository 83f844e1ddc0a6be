"""What counting costs: the same no-op with all of its metrics and with none, in turn.

Why pairs within a second of one another: the difference is smaller than what a machine drifts by in a minute.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from statistics import median
from typing import Final

import aiohttp
import msgspec

from bench.measure import Figures, Load, Served, System
from bench.meters import Meter
from serve_common.runtime.tasks import TaskOwner

PAIRS: Final = 8
CONNECTIONS: Final = 64
UNCOUNTED: Final = f"default/{Served.UNCOUNTED.value}"
"""Endpoint and backend without metrics: for the variable MUSTER_UNCOUNTED."""
_RUN_S: Final = 1
_SCRAPE_EVERY_S: Final = 1.0


class CountingCost(msgspec.Struct, frozen=True, kw_only=True):
    """The rate with metrics over the rate without."""

    ratio: float
    """Median of the pairs."""
    ratio_min: float
    ratio_max: float
    cpu_us: float
    """Of all processes for one request, with metrics; median."""
    cpu_us_without: float
    rate: float
    """With metrics, req/s."""
    errors: int


async def measure_counting(
    system: System,
    generate: Callable[[Load, str, int], Awaitable[Figures]],
    pages: Sequence[str],
) -> CountingCost:
    """Takes some 20 s. ``pages`` are scraped once a second while there are metrics."""
    loads = {
        path: Load(name=path.value, path=path, connections=CONNECTIONS)
        for path in (Served.NOOP, Served.UNCOUNTED)
    }
    meter = Meter.of_stack(system.stack_id)
    rates: dict[Served, list[float]] = {path: [] for path in loads}
    cpu_us: dict[Served, list[float]] = {path: [] for path in loads}
    errors = 0
    for path, load in loads.items():
        await generate(load, system.urls[path.value], _RUN_S)
    for pair in range(PAIRS):
        order = list(loads) if pair % 2 else list(reversed(loads))
        for path in order:
            tasks = TaskOwner("scrapes")
            if path is Served.NOOP:
                tasks.start(_scrape(pages), "scrape")
            try:
                async with meter.watching() as usage:
                    figures = await generate(loads[path], system.urls[path.value], _RUN_S)
            finally:
                await tasks.close(timeout_s=1.0)
            rates[path].append(figures.rate)
            cpu_s = sum(process.cpu_s for process in usage.values())
            cpu_us[path].append(cpu_s * 1e6 / max(figures.requests, 1))
            errors += figures.errors
    ratios = [
        counted / uncounted
        for counted, uncounted in zip(rates[Served.NOOP], rates[Served.UNCOUNTED], strict=True)
    ]
    return CountingCost(
        ratio=median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        cpu_us=median(cpu_us[Served.NOOP]),
        cpu_us_without=median(cpu_us[Served.UNCOUNTED]),
        rate=median(rates[Served.NOOP]),
        errors=errors,
    )


async def _scrape(pages: Sequence[str]) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            for page in pages:
                with suppress(aiohttp.ClientError):  # it is the cost that counts here
                    async with session.get(page) as response:
                        await response.read()
            await asyncio.sleep(_SCRAPE_EVERY_S)
