"""The operations port: `/metrics`, `/healthz`, `/readyz` of a service process.

Why apart from any traffic: a scrape or a probe must be answered also while the service drains or its queue is full.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from serve_common.settings import OperationsSettings

NotReady = Callable[[], str | None]
"""None when ready (or healthy), otherwise why not."""


class OperationsServer:
    """Serves the three paths until closed."""

    def __init__(
        self,
        settings: OperationsSettings,
        registry: CollectorRegistry,
        *,
        why_not_ready: NotReady,
        why_not_healthy: NotReady = lambda: None,
    ) -> None:
        """``why_not_healthy`` should be non-None only where a restart of the process would help."""
        self._settings = settings
        self._registry = registry
        self._why_not_ready = why_not_ready
        self._why_not_healthy = why_not_healthy
        self._runner: web.AppRunner | None = None
        self.port = settings.port

    async def start(self) -> None:
        """Listen; raises OSError when the port is taken. ``port`` then tells the real port (0 picks a free one)."""
        application = web.Application()
        application.add_routes(
            [
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
            ]
        )
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        self._runner = runner
        site = web.TCPSite(runner, self._settings.host, self._settings.port)
        await site.start()
        self.port = int(runner.addresses[0][1])

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _metrics(self, _request: web.Request) -> web.Response:
        # In a thread: the multiprocess collector reads files.
        text = await asyncio.to_thread(generate_latest, self._registry)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _healthz(self, _request: web.Request) -> web.Response:
        return _answer(self._why_not_healthy())

    async def _readyz(self, _request: web.Request) -> web.Response:
        return _answer(self._why_not_ready())


def _answer(reason: str | None) -> web.Response:
    return web.Response(text="ok\n") if reason is None else web.Response(status=503, text=f"{reason}\n")
