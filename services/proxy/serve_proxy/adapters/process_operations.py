"""The operations port of a container with several proxy processes: one page of metrics, ready when all of them are.

Why one port: probes, scrapes and people find a container as they find one with a single process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, final

import aiohttp
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from serve_common.settings import OperationsSettings
from serve_proxy.core.process_metrics import merge_metrics
from serve_proxy.ports import Child

_ASK_TIMEOUT_S: Final = 2.0


@final
class ProcessOperations:
    """Serves ``/metrics``, ``/healthz`` and ``/readyz`` for all children."""

    def __init__(
        self,
        settings: OperationsSettings,
        children: Mapping[int, Child],
        why_not_ready: Callable[[], str | None],
    ) -> None:
        """``children`` is looked at with each question."""
        self.port = settings.port
        """Where it listens; after `start` the real one."""
        self._settings = settings
        self._children = children
        self._why_not_ready = why_not_ready
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen; raises OSError when the port is taken."""
        application = web.Application()
        application.add_routes(
            [
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
            ]
        )
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ASK_TIMEOUT_S))
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._settings.host, self._settings.port).start()
        self.port = int(self._runner.addresses[0][1])

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def _metrics(self, _request: web.Request) -> web.Response:
        # Who does not answer is left out: its absence shows, and the others are not lost with it.
        pages = {
            number: text
            for number, (status, text) in (await self._ask_all("/metrics")).items()
            if status == 200
        }
        merged = await asyncio.to_thread(merge_metrics, pages)
        return web.Response(body=merged.encode(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _request: web.Request) -> web.Response:
        reason = self._why_not_ready()
        if reason is not None:
            return web.Response(status=503, text=f"{reason}\n")
        answers = await self._ask_all("/readyz")
        unready = [
            f"process {number}: {text.strip()}" for number, (status, text) in answers.items() if status != 200
        ]
        if unready:
            return web.Response(status=503, text="\n".join([*unready, ""]))
        return web.Response(text="ok\n")

    async def _ask_all(self, path: str) -> dict[str, tuple[int, str]]:
        """Status and body by the number of the process; 0 and the reason for one that does not answer."""
        asked = sorted(self._children.items())
        answers = await asyncio.gather(*(self._ask(child.operations_port, path) for _, child in asked))
        return {str(number): answer for (number, _), answer in zip(asked, answers, strict=True)}

    async def _ask(self, port: int | None, path: str) -> tuple[int, str]:
        if port is None:
            return 0, "it starts"
        assert self._session is not None
        try:
            async with self._session.get(f"http://127.0.0.1:{port}{path}") as response:
                return response.status, await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            return 0, f"it does not answer: {type(error).__name__}"
