"""Reads loads straight from the services' pages of metrics: where there is no Prometheus, or while it is away.

Why it samples by itself and only while it is in use: a mean over a window needs scrapes from before anybody asks, and a
system with a Prometheus should not be scraped twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, final
from urllib.parse import urlencode

import aiohttp
import structlog

from serve_common.names import BackendTag
from serve_common.tasks import OwnedTask, TaskOwner
from serve_common.wires.views import LoadView
from serve_controller.adapters.load_page import Sample, parse_page
from serve_controller.adapters.load_view import VIEWED, sum_up
from serve_controller.adapters.load_windows import LoadWindows
from serve_controller.adapters.prometheus_queries import CONNECTED, HOST, ONGOING, PROXY, QUEUED
from serve_controller.core.autoscaling.values import Reading
from serve_controller.ports import LoadAsk, Targets

_log = structlog.get_logger(__name__)

PERIOD_S: Final = 2.0
TIMEOUT_S: Final = 2.0
CONCURRENCY: Final = 16
PAGE_BYTES_MAX: Final = 32 * 1024 * 1024
NAMES: Final = (PROXY, HOST, ONGOING, QUEUED, CONNECTED)
_FIRST_ROUNDS_S: Final = 2 * (PERIOD_S + TIMEOUT_S)
"""How long the first reading waits for its two scrapes at most."""
_IDLE_MIN_S: Final = 30.0
_IDLE_INTERVALS: Final = 2.5
"""Sampling ends when nobody has read for so many of their intervals."""
_KEEP_SHARE: Final = 1.25
_SMALL_PAGE_BYTES: Final = 128 * 1024
"""Larger ones are parsed in another thread."""
_CLOSE_TIMEOUT_S: Final = 1.0
_BATCH: Final = 500
"""Readings between two turns of the loop."""


@final
class LoadScrape:
    """A `LoadSource`, and what `muster top` shows."""

    def __init__(self, clock: Callable[[], float], *, period_s: float = PERIOD_S) -> None:
        """``clock`` tells monotonic seconds. Nothing is scraped before the first `read`."""
        self._clock = clock
        self._period_s = period_s
        self._session: aiohttp.ClientSession | None = None
        self._places = asyncio.Semaphore(CONCURRENCY)
        self._tasks = TaskOwner("load_scrape")
        self._sampling: OwnedTask | None = None
        self._windows = LoadWindows()
        self._urls: frozenset[str] = frozenset()
        self._labels: dict[str, dict[str, dict[str, str]]] = {}
        """By target: of the series that were on its page last."""
        self._unfiltered: set[str] = set()
        """Who does not answer when asked for certain names only."""
        self._keep_s = 0.0
        self._used_until = 0.0
        self._is_filled = asyncio.Event()

    async def read(
        self, asks: Sequence[LoadAsk], targets: Targets, now: float
    ) -> Mapping[BackendTag, Reading]:
        """As `LoadSource`; the first one waits until everybody was scraped twice."""
        asked = [ask for ask in asks if ask.config.query is None]
        if asked:
            await self._use(asked, targets)
        look = self._windows.at(self._clock())
        readings: dict[BackendTag, Reading] = {}
        for number, ask in enumerate(asks):
            if number % _BATCH == _BATCH - 1:
                await asyncio.sleep(0)
            readings[ask.backend_tag] = look.reading(ask, now)
        return readings

    async def load_view(self, targets: Targets, now: float) -> LoadView:
        """One scrape of all services, summed up; who does not answer is named in it."""
        urls = sorted(targets.urls)
        pages = await asyncio.gather(*(self._scrape(url, VIEWED) for url in urls))
        unreachable = [url for url, page in zip(urls, pages, strict=True) if isinstance(page, str)]
        return sum_up(now, (page for page in pages if not isinstance(page, str)), unreachable)

    async def close(self) -> None:
        """End sampling and close the connections."""
        await self._tasks.close(_CLOSE_TIMEOUT_S)
        if self._session is not None:
            await self._session.close()
            self._session = None

    # -- sampling -------------------------------------------------------------------------------------------------

    async def _use(self, asks: Sequence[LoadAsk], targets: Targets) -> None:
        self._urls = targets.urls
        self._keep_s = max(
            self._keep_s,
            *(_KEEP_SHARE * max(ask.config.look_back_period_s, ask.config.panic_window_s) for ask in asks),
        )
        idle_s = max(_IDLE_MIN_S, *(_IDLE_INTERVALS * ask.config.metrics_interval_s for ask in asks))
        self._used_until = max(self._used_until, self._clock() + idle_s)
        if self._sampling is None or self._sampling.is_done:
            self._sampling = self._tasks.start(self._sample(), "sample")
        try:
            async with asyncio.timeout(_FIRST_ROUNDS_S):
                await self._is_filled.wait()
        except TimeoutError:
            _log.warning("scrape_takes_long", targets=len(self._urls))

    async def _sample(self) -> None:
        rounds = 0
        _log.info("scraping_begins", targets=len(self._urls), period_s=self._period_s)
        try:
            while self._clock() < self._used_until:
                began_at = self._clock()
                urls = self._urls
                self._windows.keep_only(urls)
                self._unfiltered &= urls
                self._labels = {url: labels for url, labels in self._labels.items() if url in urls}
                await asyncio.gather(*(self._sample_one(url) for url in urls))
                rounds += 1
                if rounds == 2:
                    self._is_filled.set()
                await asyncio.sleep(max(began_at + self._period_s - self._clock(), 0.0))
        finally:
            self._is_filled.clear()
            self._windows = LoadWindows()
            self._labels = {}
            self._keep_s = 0.0
        _log.info("scraping_ends")

    async def _sample_one(self, url: str) -> None:
        asked_at = self._clock()
        page = await self._scrape(url, NAMES)
        if isinstance(page, str):
            self._windows.add_failure(url, page)
        else:
            self._labels[url] = {sample.series: sample.labels for sample in page}
            self._windows.add(url, (asked_at + self._clock()) / 2, page, self._keep_s)

    # -- one page -------------------------------------------------------------------------------------------------

    async def _scrape(self, url: str, names: Sequence[str]) -> list[Sample] | str:
        """The samples of these names on a page; or why it cannot be had."""
        async with self._places:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    return await self._samples(url, names)
            except TimeoutError:
                return f"it does not answer within {TIMEOUT_S:g} s"
            except (aiohttp.ClientError, OSError, ValueError) as error:
                return str(error)[:200] or type(error).__name__

    async def _samples(self, url: str, names: Sequence[str]) -> list[Sample]:
        if url not in self._unfiltered:
            query = urlencode([("name[]", name) for name in names])
            samples = await self._parsed(url, await self._get(f"{url}?{query}"), names)
            if any(sample.name in (PROXY, HOST) for sample in samples):
                return samples
            # An exporter that reads its metrics when it is asked may know no names before.
            self._unfiltered.add(url)
        return await self._parsed(url, await self._get(url), names)

    async def _get(self, url: str) -> bytes:
        if self._session is None:
            self._session = aiohttp.ClientSession(trust_env=False)
        async with self._session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                raise ValueError(f"it answers with status {response.status}")
            body = bytearray()
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > PAGE_BYTES_MAX:
                    raise ValueError(f"its page has more than {PAGE_BYTES_MAX} bytes")
            return bytes(body)

    async def _parsed(self, url: str, body: bytes, names: Iterable[str]) -> list[Sample]:
        wanted = frozenset(names)
        known = self._labels.get(url)
        if len(body) <= _SMALL_PAGE_BYTES:
            return list(parse_page(body.decode(), wanted, known))
        return await asyncio.to_thread(lambda: list(parse_page(body.decode(), wanted, known)))
