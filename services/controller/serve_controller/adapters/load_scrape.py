"""Reads loads from the services' own metrics pages, and chooses between that and Prometheus."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, final
from urllib.parse import urlencode

import aiohttp
import msgspec
import structlog

from serve_common.api.views import BackendLoad, EndpointLoad, LoadView
from serve_common.names import BackendTag
from serve_common.runtime.tasks import OwnedTask, TaskOwner
from serve_common.telemetry.catalogue.proxies import PROXY_INFO, QUEUE_DEPTH, REQUEST_SECONDS, REQUESTS
from serve_common.telemetry.catalogue.replicas import REPLICA_IN_FLIGHT
from serve_controller.adapters.load_windows import LoadWindows, Sample, parse_page
from serve_controller.adapters.prometheus_api import CONNECTED, HOST, ONGOING, PROXY, QUEUED
from serve_controller.adapters.prometheus_source import PrometheusSource
from serve_controller.core.autoscaling.values import LoadRequest, LoadSample, Targets

_BUCKET: Final = f"{REQUEST_SECONDS.name}_bucket"
VIEWED: Final = (PROXY_INFO.name, HOST, REQUESTS.name, _BUCKET, QUEUE_DEPTH.name, REPLICA_IN_FLIGHT.name)
"""Names of the metrics that a `LoadView` needs."""


def aggregate_load(at: float, pages: Iterable[Sequence[Sample]], unreachable: Sequence[str]) -> LoadView:
    """Sum up pages into a view. ``at`` is now; requests that matched no route have the empty endpoint tag."""
    requests: defaultdict[str, float] = defaultdict(float)
    errors: defaultdict[str, float] = defaultdict(float)
    buckets: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    in_flight: defaultdict[str, float] = defaultdict(float)
    queued: defaultdict[str, float] = defaultdict(float)
    for page in pages:
        for sample in page:
            endpoint = sample.labels.get("endpoint_tag", "")
            backend = sample.labels.get("backend_tag", "")
            if sample.name == REQUESTS.name:
                requests[endpoint] += sample.value
                if sample.labels.get("code", "").startswith("5"):
                    errors[endpoint] += sample.value
            elif sample.name == _BUCKET:
                buckets[endpoint][sample.labels.get("le", "")] += sample.value
            elif sample.name == QUEUE_DEPTH.name:
                queued[backend] += sample.value
            elif sample.name == REPLICA_IN_FLIGHT.name:
                in_flight[backend] += sample.value
    return LoadView(
        at=at,
        endpoints=[
            EndpointLoad(
                endpoint_tag=tag,
                requests=requests[tag],
                errors=errors[tag],
                seconds_buckets=dict(buckets[tag]) if tag in buckets else {},
            )
            for tag in sorted(requests.keys() | buckets.keys())
        ],
        backends=[
            BackendLoad(backend_tag=tag, in_flight=in_flight[tag], queued=queued[tag])
            for tag in sorted(in_flight.keys() | queued.keys())
        ],
        unreachable=list(unreachable),
    )


_log = structlog.get_logger(__name__)

PERIOD_S: Final = 2.0
TIMEOUT_S: Final = 2.0
CONCURRENCY: Final = 16
PAGE_BYTES_MAX: Final = 32 * 1024 * 1024
NAMES: Final = (PROXY, HOST, ONGOING, QUEUED, CONNECTED)
_FIRST_ROUNDS_S: Final = 2 * (PERIOD_S + TIMEOUT_S)
"""Most seconds that the first read waits for its two scrapes."""
_IDLE_MIN_S: Final = 30.0
_IDLE_INTERVALS: Final = 2.5
"""Metrics intervals without a read after which sampling stops."""
_RETENTION_FACTOR: Final = 1.25
_SMALL_PAGE_BYTES: Final = 128 * 1024
"""Size in bytes above which pages are parsed in another thread."""
_CLOSE_TIMEOUT_S: Final = 1.0
_BATCH: Final = 500
"""Load samples between two turns of the event loop."""


@final
class LoadScrape:
    """A `LoadSource` by scraping, and the load view for `muster top`.

    It scrapes periodically, because a mean over a window needs scrapes from before the first `read`, but only while it
    is in use: a system with a Prometheus should not be scraped twice.
    """

    def __init__(self, clock: Callable[[], float], *, period_s: float = PERIOD_S) -> None:
        """``clock`` returns monotonic seconds. Nothing is scraped before the first `read`."""
        self._clock = clock
        self._period_s = period_s
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._tasks = TaskOwner("load_scrape")
        self._sampling: OwnedTask | None = None
        self._windows = LoadWindows()
        self._urls: frozenset[str] = frozenset()
        self._labels: dict[str, dict[str, dict[str, str]]] = {}
        """Labels by series, for the latest page of each target."""
        self._unfiltered: set[str] = set()
        """Targets that do not support the filter by names."""
        self._retention_s = 0.0
        self._used_until = 0.0
        self._is_filled = asyncio.Event()

    async def read(
        self, requests: Sequence[LoadRequest], targets: Targets, now: float
    ) -> Mapping[BackendTag, LoadSample]:
        """Read the loads; the first call waits until all targets were scraped twice."""
        without_query = [request for request in requests if request.config.query is None]
        if without_query:
            await self._use(without_query, targets)
        evaluation = self._windows.at(self._clock())
        samples: dict[BackendTag, LoadSample] = {}
        for number, request in enumerate(requests):
            if number % _BATCH == _BATCH - 1:
                await asyncio.sleep(0)
            samples[request.backend_tag] = evaluation.sample(request, now)
        return samples

    async def load_view(self, targets: Targets, now: float) -> LoadView:
        """Scrape all services once and sum up; unreachable ones are named in the result."""
        urls = sorted(targets.urls)
        pages = await asyncio.gather(*(self._scrape(url, VIEWED) for url in urls))
        unreachable = [url for url, page in zip(urls, pages, strict=True) if isinstance(page, str)]
        return aggregate_load(now, (page for page in pages if not isinstance(page, str)), unreachable)

    async def close(self) -> None:
        """End sampling and close the connections."""
        await self._tasks.close(_CLOSE_TIMEOUT_S)
        if self._session is not None:
            await self._session.close()
            self._session = None

    # -- sampling -------------------------------------------------------------------------------------------------

    async def _use(self, requests: Sequence[LoadRequest], targets: Targets) -> None:
        self._urls = targets.urls
        self._retention_s = max(
            self._retention_s,
            *(
                _RETENTION_FACTOR * max(request.config.look_back_period_s, request.config.panic_window_s)
                for request in requests
            ),
        )
        idle_s = max(
            _IDLE_MIN_S, *(_IDLE_INTERVALS * request.config.metrics_interval_s for request in requests)
        )
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
                started_at = self._clock()
                urls = self._urls
                self._windows.retain(urls)
                self._unfiltered &= urls
                self._labels = {url: labels for url, labels in self._labels.items() if url in urls}
                await asyncio.gather(*(self._sample_one(url) for url in urls))
                rounds += 1
                if rounds == 2:
                    self._is_filled.set()
                await asyncio.sleep(max(started_at + self._period_s - self._clock(), 0.0))
        finally:
            self._is_filled.clear()
            self._windows = LoadWindows()
            self._labels = {}
            self._retention_s = 0.0
        _log.info("scraping_ends")

    async def _sample_one(self, url: str) -> None:
        sent_at = self._clock()
        page = await self._scrape(url, NAMES)
        if isinstance(page, str):
            self._windows.add_failure(url, page)
        else:
            self._labels[url] = {sample.series: sample.labels for sample in page}
            self._windows.add(url, (sent_at + self._clock()) / 2, page, self._retention_s)

    # -- one page -------------------------------------------------------------------------------------------------

    async def _scrape(self, url: str, names: Sequence[str]) -> list[Sample] | str:
        """The samples of these names on a page, or why it cannot be read."""
        async with self._slots:
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
            # An exporter that collects its metrics on request may not support the filter.
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


TRUSTED_AFTER: Final = 3
"""Good samples in a row before a backend goes back to Prometheus, so that it does not alternate."""
_SECONDS: Final = re.compile(r"\b\d+(\.\d+)?(?= s\b)")
_REASONS_LOGGED_MAX: Final = 5
_REMEMBERED_INTERVALS: Final = 3
"""Metrics intervals without a read after which a backend is forgotten."""


class _MissingLoad(NamedTuple):
    """Why Prometheus lacked the load of a backend."""

    until: float
    why: str
    good: int = 0
    """Good samples in a row since."""


@final
class LoadSources:
    """A `LoadSource`: Prometheus, with scraping as the fallback.

    The choice is made for each backend: a proxy that Prometheus does not scrape affects all, a host only the backends
    on it.
    """

    def __init__(self, prometheus: PrometheusSource | None, scrape: LoadScrape) -> None:
        """``prometheus`` None: everything is scraped, and users' queries have no value."""
        self._prometheus = prometheus
        self._scrape = scrape
        self._known: dict[BackendTag, _MissingLoad] = {}
        """Backends whose load Prometheus lacks, or lacked until lately."""
        self._logged_reasons: frozenset[str] = frozenset()
        """The reasons logged last."""

    async def read(
        self, requests: Sequence[LoadRequest], targets: Targets, now: float
    ) -> Mapping[BackendTag, LoadSample]:
        """Read the loads from Prometheus; those that it lacks are scraped."""
        if self._prometheus is None:
            return await self._scrape.read(requests, targets, now)
        first = await self._prometheus.read(requests, targets, now)
        to_scrape = [
            request for request in requests if self._needs_scrape(request, first[request.backend_tag], now)
        ]
        self._log_missing(now)
        if not to_scrape:
            return first
        second = await self._scrape.read(to_scrape, targets, now)
        return {**first, **{tag: _better_sample(first[tag], sample) for tag, sample in second.items()}}

    async def close(self) -> None:
        """Close both sources."""
        if self._prometheus is not None:
            await self._prometheus.close()
        await self._scrape.close()

    def _needs_scrape(self, request: LoadRequest, sample: LoadSample, now: float) -> bool:
        """Whether to scrape the load of this backend because Prometheus lacked it lately."""
        until = now + _REMEMBERED_INTERVALS * request.config.metrics_interval_s
        known = self._known.get(request.backend_tag)
        if sample.seen is None:
            self._known[request.backend_tag] = _MissingLoad(until, sample.missing)
        elif known is None:
            return False
        elif known.good + 1 >= TRUSTED_AFTER or request.config.query is not None:
            del self._known[request.backend_tag]
            return False
        else:
            self._known[request.backend_tag] = _MissingLoad(until, known.why, known.good + 1)
        return request.config.query is None

    def _log_missing(self, now: float) -> None:
        """Log the loads that Prometheus lacks when that has changed: each reason once, ignoring times in its text."""
        self._known = {tag: known for tag, known in self._known.items() if known.until >= now}
        reasons = Counter(_SECONDS.sub("#", known.why) for known in self._known.values())
        if reasons.keys() == self._logged_reasons:
            return
        self._logged_reasons = frozenset(reasons)
        if reasons:
            few = dict(reasons.most_common(_REASONS_LOGGED_MAX))
            _log.warning("prometheus_lacks_loads", backends=reasons.total(), reasons=few)
        else:
            _log.info("prometheus_has_all_loads")


def _better_sample(first: LoadSample, second: LoadSample) -> LoadSample:
    """The scraped sample if it has a value, otherwise that of Prometheus."""
    if second.seen is not None:
        return second
    if first.seen is not None:
        return first
    return msgspec.structs.replace(second, missing=f"{first.missing}; scraping: {second.missing}")
