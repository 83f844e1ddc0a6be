"""The operations port: `/metrics`, `/healthz`, `/readyz` of a service process.

Why apart from any traffic: a scrape or a probe must be answered also while the service drains or its queue is full.

Why on a thread of its own: a probe must say "the loop has not turned for 30 s", and a scrape must go on, also when the
service's loop stands still; an answer that never comes tells nobody why.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Collection, Iterator
from typing import Final, Protocol, final

import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from serve_common.health import Heartbeat, WhyNot
from serve_common.settings import OperationsSettings
from serve_common.tasks import TaskOwner
from serve_common.threads.loop_thread import LoopThread

_log = structlog.get_logger(__name__)

NAMES_PARAMETER: Final = "name[]"
"""As in prometheus_client's own server: only samples of these names are wanted."""
_CLOSE_TIMEOUT_S: Final = 2.0


class OperationsPages(Protocol):
    """What an operations port shows. All methods run on the port's own loop."""

    async def metrics(self, names: Collection[str]) -> bytes:
        """In Prometheus' text format; only samples with one of ``names``, or all when there are none."""
        ...

    async def why_not_healthy(self) -> str | None:
        """None unless a restart of the process would help."""
        ...

    async def why_not_ready(self) -> str | None:
        """None when traffic may come."""
        ...

    async def close(self) -> None:
        """The port is closed."""
        ...


@final
class OperationsSite:
    """Serves the three paths, on a thread of its own, until closed."""

    def __init__(self, settings: OperationsSettings, pages: OperationsPages) -> None:
        """Starts nothing."""
        self.port = settings.port
        """Where it listens; after `start` the real one."""
        self._settings = settings
        self._pages = pages
        self._thread: LoopThread | None = None
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen; raises OSError when the port is taken."""
        self._thread = LoopThread("operations")
        try:
            await asyncio.wrap_future(self._thread.submit(self._listen()))
        except OSError:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop listening; bounded in time."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await asyncio.wrap_future(thread.submit(self._end()))
        except TimeoutError:
            _log.warning("operations_port_not_closed", timeout_s=_CLOSE_TIMEOUT_S)
        await asyncio.to_thread(thread.stop, _CLOSE_TIMEOUT_S)

    async def _listen(self) -> None:
        application = web.Application()
        application.add_routes(
            [
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        for host in self._settings.host.split(","):
            for address in await _own_addresses(host.strip()):
                await web.TCPSite(self._runner, address, self.port).start()
                self.port = int(self._runner.addresses[0][1])

    async def _end(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        await self._pages.close()

    async def _metrics(self, request: web.Request) -> web.Response:
        page = await self._pages.metrics(frozenset(request.query.getall(NAMES_PARAMETER, ())))
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _healthz(self, _request: web.Request) -> web.Response:
        return _answer(await self._pages.why_not_healthy())

    async def _readyz(self, _request: web.Request) -> web.Response:
        return _answer(await self._pages.why_not_ready())


@final
class OperationsServer:
    """The operations port of a process with one loop."""

    def __init__(
        self,
        settings: OperationsSettings,
        registry: CollectorRegistry,
        *,
        why_not_ready: WhyNot,
        why_not_healthy: WhyNot = lambda: None,
    ) -> None:
        """``why_not_healthy`` should be non-None only where a restart of the process would help.

        That the loop turns on which `start` is called is looked at anyway.
        """
        self._heartbeat = Heartbeat(settings.unhealthy_after_s)
        pages = _ProcessPages(registry, self._heartbeat, why_not_ready, why_not_healthy)
        self._site = OperationsSite(settings, pages)
        self._tasks = TaskOwner("operations")

    @property
    def port(self) -> int:
        """Where it listens; after `start` the real one."""
        return self._site.port

    async def start(self) -> None:
        """Listen; raises OSError when the port is taken. ``port`` then tells the real port (0 picks a free one)."""
        self._tasks.start(self._heartbeat.run(), "heartbeat")
        await self._site.start()

    async def close(self) -> None:
        """Stop listening."""
        await self._tasks.close(_CLOSE_TIMEOUT_S)
        await self._site.close()


@final
class _ProcessPages:
    def __init__(
        self,
        registry: CollectorRegistry,
        heartbeat: Heartbeat,
        why_not_ready: WhyNot,
        why_not_healthy: WhyNot,
    ) -> None:
        self._registry = registry
        self._heartbeat = heartbeat
        self._why_not_ready = why_not_ready
        self._why_not_healthy = why_not_healthy

    async def metrics(self, names: Collection[str]) -> bytes:
        # In a thread: the multiprocess collector reads files, which must not hold up a probe.
        return await asyncio.to_thread(metrics_page, self._registry, names)

    async def why_not_healthy(self) -> str | None:
        return self._heartbeat.why_not_healthy() or self._why_not_healthy()

    async def why_not_ready(self) -> str | None:
        return self._heartbeat.why_not_healthy() or self._why_not_ready()

    async def close(self) -> None:
        """Nothing is held."""


def metrics_page(registry: Collector, names: Collection[str]) -> bytes:
    """All samples with one of ``names`` in Prometheus' text format; all that there are when there are no names.

    A registry's own restriction knows only collectors that describe themselves, which few of ours can.
    """
    return generate_latest(_Restricted(registry, names) if names else registry)


@final
class _Restricted(CollectorRegistry):
    def __init__(self, registry: Collector, names: Collection[str]) -> None:
        super().__init__()
        self._whole = registry
        self._wanted = names

    def collect(self) -> Iterator[Metric]:
        for family in self._whole.collect():
            samples = [sample for sample in family.samples if sample.name in self._wanted]
            if samples:
                kept = Metric(family.name, family.documentation, family.type, family.unit)
                kept.samples = samples
                yield kept


async def _own_addresses(host: str) -> list[str]:
    """Those addresses of ``host`` that this process can listen at; raises OSError when there are none.

    A name that containers of a scaled service share has all their addresses, and one is this container's.
    """
    found = await asyncio.to_thread(
        socket.getaddrinfo, host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    own: list[str] = []
    error: OSError | None = None
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError as refused:
            error = refused
        else:
            own.append(str(address[0]))
    if not own:
        raise OSError(errno.EADDRNOTAVAIL, f"{host} is no address of this machine") from error
    return own


def _answer(reason: str | None) -> web.Response:
    return web.Response(text="ok\n") if reason is None else web.Response(status=503, text=f"{reason}\n")
