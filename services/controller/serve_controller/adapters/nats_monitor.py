"""Reads the state of NATS servers from their monitoring ports, and exports it, while this controller leads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeVar, final

import aiohttp
import msgspec
import structlog
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from yarl import URL

from serve_common.runtime.operations import build_family
from serve_common.telemetry.catalogue.nats_servers import (
    JETSTREAM_CONSUMERS,
    JETSTREAM_ERRORS,
    JETSTREAM_MEMORY,
    JETSTREAM_MEMORY_LIMIT,
    JETSTREAM_REQUESTS,
    JETSTREAM_STORAGE,
    JETSTREAM_STORAGE_LIMIT,
    JETSTREAM_STREAMS,
    NATS_CONNECTIONS,
    NATS_CONNECTIONS_LIMIT,
    NATS_CONNECTIONS_OPENED,
    NATS_CPUS,
    NATS_CPUS_USED,
    NATS_HEALTHY,
    NATS_MEMORY,
    NATS_METRICS,
    NATS_RECEIVED_BYTES,
    NATS_RECEIVED_MESSAGES,
    NATS_SENT_BYTES,
    NATS_SENT_MESSAGES,
    NATS_SLOW_CONSUMERS,
    NATS_STALE_CONNECTIONS,
    NATS_STALLED_CLIENTS,
    NATS_START_TIME,
    NATS_SUBSCRIPTIONS,
    NATS_UP,
)
from serve_common.telemetry.catalogue.specs import MetricSpec

Values = dict[MetricSpec, float]
"""Values by metric; unknown ones are left out."""


class NotANatsServer(ValueError):
    """The response is not that of a NATS server; the message has the reason."""


_NUMBER_MAX: Final = 2.0**64
_VARZ: Final = (
    (NATS_CONNECTIONS, "connections"),
    (NATS_CONNECTIONS_LIMIT, "max_connections"),
    (NATS_CONNECTIONS_OPENED, "total_connections"),
    (NATS_SUBSCRIPTIONS, "subscriptions"),
    (NATS_SLOW_CONSUMERS, "slow_consumers"),
    (NATS_STALE_CONNECTIONS, "stale_connections"),
    (NATS_STALLED_CLIENTS, "stalled_clients"),
    (NATS_RECEIVED_MESSAGES, "in_msgs"),
    (NATS_SENT_MESSAGES, "out_msgs"),
    (NATS_RECEIVED_BYTES, "in_bytes"),
    (NATS_SENT_BYTES, "out_bytes"),
    (NATS_MEMORY, "mem"),
    (JETSTREAM_STORAGE, "jetstream.stats.storage"),
    (JETSTREAM_STORAGE_LIMIT, "jetstream.config.max_storage"),
    (JETSTREAM_MEMORY, "jetstream.stats.memory"),
    (JETSTREAM_MEMORY_LIMIT, "jetstream.config.max_memory"),
    (JETSTREAM_REQUESTS, "jetstream.stats.api.total"),
    (JETSTREAM_ERRORS, "jetstream.stats.api.errors"),
)
_JSZ: Final = ((JETSTREAM_STREAMS, "streams"), (JETSTREAM_CONSUMERS, "consumers"))
_LIMITS: Final = (NATS_CONNECTIONS_LIMIT, JETSTREAM_STORAGE_LIMIT, JETSTREAM_MEMORY_LIMIT)
"""Limits of which 0 and -1 mean none."""


def varz_values(body: bytes) -> Values:
    """Parse `/varz`. Raises `NotANatsServer`."""
    page = _page(body)
    values = _values(page, _VARZ)
    for spec in _LIMITS:
        if not values.get(spec):
            values.pop(spec, None)
    cpu_percent = _number(page, "cpu")
    if cpu_percent is not None:
        values[NATS_CPUS_USED] = cpu_percent / 100.0  # of one CPU, as in `ps`
    cpus = _number(page, "gomaxprocs") or _number(page, "cores")
    if cpus:
        values[NATS_CPUS] = cpus
    start = _moment(page.get("start"))
    if start is not None:
        values[NATS_START_TIME] = start
    return values


def jsz_values(body: bytes) -> Values:
    """Parse `/jsz`; empty without JetStream. Raises `NotANatsServer`."""
    page = _page(body)
    return {} if page.get("disabled") is True else _values(page, _JSZ)


def _page(body: bytes) -> Mapping[str, Any]:
    try:
        page = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        raise NotANatsServer("it answers something that is not JSON") from error
    if not isinstance(page, dict) or not isinstance(page.get("server_id"), str):
        raise NotANatsServer("it does not answer as a NATS server does")
    return page


def _values(page: Mapping[str, Any], fields: tuple[tuple[MetricSpec, str], ...]) -> Values:
    # Number by number: the fields differ between versions of the server, and one that is missing or invalid must not
    # hide the others. They are documented in https://docs.nats.io/running-a-nats-service/nats_admin/monitoring.
    found = ((spec, _number(page, path)) for spec, path in fields)
    return {spec: number for spec, number in found if number is not None}


def _number(page: Mapping[str, Any], path: str) -> float | None:
    value: Any = page
    for name in path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _NUMBER_MAX:
        return None
    return float(value)


def _moment(text: Any) -> float | None:
    """Parse a time into seconds since 1970; None for an invalid one."""
    try:
        return msgspec.convert(text, datetime).timestamp()
    except (msgspec.ValidationError, OverflowError):
        return None


_log = structlog.get_logger(__name__)

PERIOD_S: Final = 2.0
TIMEOUT_S: Final = 2.0
"""Timeout of one page, seconds."""
RETENTION_S: Final = 10.0
"""Greatest age of an exported reading, seconds: more than two rounds in which every page takes its timeout."""
PAGE_BYTES_MAX: Final = 1024 * 1024
"""A page of an ordinary server has 3 KB, of one with very many routes and gateways some 100."""
_REASON_LENGTH_MAX: Final = 200

T = TypeVar("T")


class ServerSample(NamedTuple):
    """State of one server at one time."""

    server: str
    at: float
    """When the request was sent, by the reader's clock."""
    values: Values | None
    """None if it could not be read."""


@final
class NatsMonitorReader:
    """Polls all servers in `run` while this controller leads.

    It polls by itself and not at each scrape of the metrics: a slow server must not delay the metrics page or anything
    else. So the page has the latest readings, and nothing that is too old.
    """

    def __init__(
        self,
        monitors: Mapping[str, str],
        *,
        leads: Callable[[], bool],
        clock: Callable[[], float],
        period_s: float = PERIOD_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """``monitors`` has the base URL of each server's monitoring port by its name; ``clock`` monotonic seconds."""
        self._monitors = [(server, URL(url)) for server, url in monitors.items()]
        self._leads = leads
        self._clock = clock
        self._period_s = period_s
        self._timeout_s = timeout_s
        self._samples: Sequence[ServerSample] = ()
        self._unavailable: set[tuple[str, str]] = set()
        """(server, page) pairs that cannot be read."""

    def samples(self) -> list[ServerSample]:
        """The latest reading of each server that is recent enough; empty on a standby. Thread-safe."""
        oldest_at = self._clock() - RETENTION_S
        return [sample for sample in self._samples if sample.at >= oldest_at] if self._leads() else []

    async def run(self) -> None:
        """Poll until cancelled; returns at once without servers."""
        if not self._monitors:
            return
        async with aiohttp.ClientSession(
            # A kept-alive connection to a restarted server would count as a failure of that server.
            connector=aiohttp.TCPConnector(force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
            trust_env=False,
        ) as session:
            while True:
                started_at = self._clock()
                if self._leads():
                    sample = (self._read(session, server, base) for server, base in self._monitors)
                    self._samples = await asyncio.gather(*sample)
                else:
                    self._samples = ()
                await asyncio.sleep(max(started_at + self._period_s - self._clock(), 0.0))

    async def _read(self, session: aiohttp.ClientSession, server: str, base: URL) -> ServerSample:
        at = self._clock()
        values = await self._parsed(session, server, base / "varz", varz_values)
        if values is not None:
            # Separately: a hanging JetStream must not affect the other pages.
            of_jetstream, health = await asyncio.gather(
                self._parsed(session, server, base / "jsz", jsz_values),
                self._parsed(session, server, base / "healthz", bytes),
            )
            values = {**values, **(of_jetstream or {}), NATS_HEALTHY: float(health is not None)}
        return ServerSample(server, at, values)

    async def _parsed(
        self, session: aiohttp.ClientSession, server: str, url: URL, parse: Callable[[bytes], T]
    ) -> T | None:
        """Read and parse a page; None when it cannot be read, which is logged when that begins and ends."""
        key = (server, url.name)
        try:
            parsed = parse(await self._page(session, url))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if key not in self._unavailable:
                self._unavailable.add(key)
                _log.warning("nats_page_away", server=server, page=url.name, reason=self._reason(error))
            return None
        if key in self._unavailable:
            self._unavailable.discard(key)
            _log.info("nats_page_back", server=server, page=url.name)
        return parsed

    async def _page(self, session: aiohttp.ClientSession, url: URL) -> bytes:
        """Get a page. Raises TimeoutError, ValueError and aiohttp's errors."""
        async with asyncio.timeout(self._timeout_s), session.get(url, allow_redirects=False) as response:
            body = bytearray()
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > PAGE_BYTES_MAX:
                    raise ValueError(f"its page has more than {PAGE_BYTES_MAX} bytes")
            if response.status != 200:
                raise ValueError(f"it answers with status {response.status}: {body.decode(errors='replace')}")
            return bytes(body)

    def _reason(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"it does not answer within {self._timeout_s:g} s"
        return str(error)[:_REASON_LENGTH_MAX] or type(error).__name__


@final
class NatsServersCollector(Collector):
    """Metrics of every server that was polled lately.

    Only the leader exports them: several controllers may run, and each server should occur once.
    """

    def __init__(self, samples: Callable[[], Sequence[ServerSample]]) -> None:
        """``samples`` is called from the operations port's thread."""
        self._samples = samples

    def describe(self) -> Iterable[Metric]:
        """No static metrics: they depend on the servers."""
        return []

    def collect(self) -> Iterable[Metric]:
        """All metric families that have values."""
        samples = self._samples()
        for spec in NATS_METRICS:
            family = build_family(spec)
            for sample in samples:
                known = {NATS_UP: 0.0} if sample.values is None else {NATS_UP: 1.0, **sample.values}
                if spec in known:
                    family.add_metric([sample.server], known[spec])
            if family.samples:
                yield family
