"""Reads the state of NATS servers from their monitoring ports, while this controller leads.

Why by itself and not when it is scraped: a server that is slow to answer must hold up neither the page of metrics nor
anything else, so what is shown is what was read last, and nothing of that which is old.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar, final

import aiohttp
import structlog
from yarl import URL

from serve_common.metrics_catalogue.nats_servers import NATS_HEALTHY
from serve_controller.adapters.nats_monitor_pages import Values, jsz_values, varz_values
from serve_controller.nats_monitors import NatsMonitor

_log = structlog.get_logger(__name__)

PERIOD_S: Final = 2.0
TIMEOUT_S: Final = 2.0
"""Of one page."""
KEEP_S: Final = 10.0
"""How old a reading may be that is shown: more than two rounds in which all pages come at the last moment."""
PAGE_BYTES_MAX: Final = 1024 * 1024
"""A page of an ordinary server has 3 KB, of one with very many routes and gateways some 100."""
_REASON_LENGTH_MAX: Final = 200

T = TypeVar("T")


class ServerReading(NamedTuple):
    """One server at one moment."""

    server: str
    at: float
    """When it was asked, by the reader's clock."""
    values: Values | None
    """None: it could not be read."""


@final
class NatsMonitorReader:
    """Reads all servers again and again in `run`, for as long as that runs and this controller leads."""

    def __init__(
        self,
        monitors: Sequence[NatsMonitor],
        *,
        leads: Callable[[], bool],
        clock: Callable[[], float],
        period_s: float = PERIOD_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """``clock`` tells monotonic seconds."""
        self._monitors = [(monitor.server, URL(monitor.url)) for monitor in monitors]
        self._leads = leads
        self._clock = clock
        self._period_s = period_s
        self._timeout_s = timeout_s
        self._readings: Sequence[ServerReading] = ()
        self._away: set[tuple[str, str]] = set()
        """Servers with the page that cannot be had."""

    def readings(self) -> list[ServerReading]:
        """The newest of each server, if they are new enough; none without leading. From any thread."""
        oldest_at = self._clock() - KEEP_S
        return [reading for reading in self._readings if reading.at >= oldest_at] if self._leads() else []

    async def run(self) -> None:
        """Until cancelled; returns at once when there is no server to read."""
        if not self._monitors:
            return
        async with aiohttp.ClientSession(
            # A kept connection to a server that was started anew would count as a failure of that server.
            connector=aiohttp.TCPConnector(force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
            trust_env=False,
        ) as session:
            while True:
                began_at = self._clock()
                if self._leads():
                    reading = (self._read(session, server, base) for server, base in self._monitors)
                    self._readings = await asyncio.gather(*reading)
                else:
                    self._readings = ()
                await asyncio.sleep(max(began_at + self._period_s - self._clock(), 0.0))

    async def _read(self, session: aiohttp.ClientSession, server: str, base: URL) -> ServerReading:
        at = self._clock()
        values = await self._parsed(session, server, base / "varz", varz_values)
        if values is not None:
            # Each for itself: a JetStream that hangs does not take the rest along.
            of_jetstream, health = await asyncio.gather(
                self._parsed(session, server, base / "jsz", jsz_values),
                self._parsed(session, server, base / "healthz", bytes),
            )
            values = {**values, **(of_jetstream or {}), NATS_HEALTHY: float(health is not None)}
        return ServerReading(server, at, values)

    async def _parsed(
        self, session: aiohttp.ClientSession, server: str, url: URL, parse: Callable[[bytes], T]
    ) -> T | None:
        """What ``parse`` makes of a page; None when it cannot be had, which is logged when it begins and ends."""
        key = (server, url.name)
        try:
            parsed = parse(await self._page(session, url))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if key not in self._away:
                self._away.add(key)
                _log.warning("nats_page_away", server=server, page=url.name, reason=self._reason(error))
            return None
        if key in self._away:
            self._away.discard(key)
            _log.info("nats_page_back", server=server, page=url.name)
        return parsed

    async def _page(self, session: aiohttp.ClientSession, url: URL) -> bytes:
        """Raises TimeoutError, ValueError, and what aiohttp raises."""
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
