"""The operations port of a container with several proxy processes: one page of metrics, ready when all of them are.

Why one port: probes and scrapes then need not know how many processes a container runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Final, final

import aiohttp

from serve_common.runtime.health import HealthProbe
from serve_common.runtime.operations import NAMES_PARAMETER
from serve_proxy.core.processes import merge_metrics
from serve_proxy.ports import Child

_PAGE_TIMEOUT_S: Final = 2.0
_OK: Final = 200
_NOT_LISTENING: Final = 0
_HANGS: Final = -1


@final
class ChildrenPages:
    """`OperationsPages` merged from all children, which are queried for each response."""

    def __init__(self, children: Mapping[int, Child], readiness_error: HealthProbe) -> None:
        """``children`` is read for each request, by another thread."""
        self._children = children
        self._readiness_error = readiness_error
        self._session: aiohttp.ClientSession | None = None

    async def metrics(self, names: Collection[str]) -> bytes:
        # A child that does not respond is left out: its absence shows, and the others are still exported.
        parameters = [(NAMES_PARAMETER, name) for name in names]
        pages = {
            number: text
            for number, (status, text) in (await self._query_all("/metrics", parameters)).items()
            if status == _OK
        }
        return (await asyncio.to_thread(merge_metrics, pages)).encode()

    async def health_error(self) -> str | None:
        return await self._collect_errors("/healthz", listening_only=True)

    async def readiness_error(self) -> str | None:
        return self._readiness_error() or await self._collect_errors("/readyz", listening_only=False)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _collect_errors(self, path: str, *, listening_only: bool) -> str | None:
        """Errors of the children; ``listening_only`` ignores children that do not listen: the parent restarts them."""
        lines = [
            f"process {number}: {text.strip()}"
            for number, (status, text) in (await self._query_all(path)).items()
            if status != _OK and not (listening_only and status == _NOT_LISTENING)
        ]
        return "\n".join(lines) or None

    async def _query_all(
        self, path: str, parameters: Collection[tuple[str, str]] = ()
    ) -> dict[str, tuple[int, str]]:
        """Status and body by process number; a placeholder status and a reason where there is no response."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PAGE_TIMEOUT_S))
        session = self._session
        children = sorted(dict(self._children).items())
        responses = await asyncio.gather(
            *(_query(session, child.operations_port, path, parameters) for _, child in children)
        )
        return {str(number): response for (number, _), response in zip(children, responses, strict=True)}


async def _query(
    session: aiohttp.ClientSession, port: int | None, path: str, parameters: Collection[tuple[str, str]]
) -> tuple[int, str]:
    if port is None:
        return _NOT_LISTENING, "it starts"
    try:
        async with session.get(f"http://127.0.0.1:{port}{path}", params=list(parameters)) as response:
            return response.status, await response.text()
    except TimeoutError:
        return _HANGS, f"it does not answer within {_PAGE_TIMEOUT_S:g} s"
    except aiohttp.ClientError as error:
        return _NOT_LISTENING, f"it does not answer: {type(error).__name__}"
