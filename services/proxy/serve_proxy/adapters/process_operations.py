"""The operations port of a container with several proxy processes: one page of metrics, ready when all of them are.

Why one port: probes, scrapes and people find a container as they find one with a single process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Final, final

import aiohttp

from serve_common.runtime.health import Heartbeat, WhyNot
from serve_common.runtime.operations import NAMES_PARAMETER, OperationsSite
from serve_common.runtime.settings import OperationsSettings
from serve_common.runtime.tasks import TaskOwner
from serve_proxy.core.processes import merge_metrics
from serve_proxy.ports import Child

_ASK_TIMEOUT_S: Final = 2.0
_CLOSE_TIMEOUT_S: Final = 1.0
_OK: Final = 200
_NOT_LISTENING: Final = 0
_HANGS: Final = -1


@final
class ProcessOperations:
    """Serves ``/metrics``, ``/healthz`` and ``/readyz`` for all children."""

    def __init__(
        self, settings: OperationsSettings, children: Mapping[int, Child], why_not_ready: WhyNot
    ) -> None:
        """``children`` is looked at with each question, by another thread."""
        self._heartbeat = Heartbeat(settings.unhealthy_after_s)
        self._site = OperationsSite(settings, _ChildrenPages(children, self._heartbeat, why_not_ready))
        self._tasks = TaskOwner("process_operations")

    @property
    def port(self) -> int:
        """Where it listens; after `start` the real one."""
        return self._site.port

    async def start(self) -> None:
        """Listen; raises OSError when the port is taken."""
        self._tasks.start(self._heartbeat.run(), "heartbeat")
        await self._site.start()

    async def close(self) -> None:
        """Stop listening."""
        await self._tasks.close(_CLOSE_TIMEOUT_S)
        await self._site.close()


@final
class _ChildrenPages:
    """What all children say, asked anew for each answer."""

    def __init__(self, children: Mapping[int, Child], heartbeat: Heartbeat, why_not_ready: WhyNot) -> None:
        self._children = children
        self._heartbeat = heartbeat
        self._why_not_ready = why_not_ready
        self._session: aiohttp.ClientSession | None = None

    async def metrics(self, names: Collection[str]) -> bytes:
        # Who does not answer is left out: its absence shows, and the others are not lost with it.
        parameters = [(NAMES_PARAMETER, name) for name in names]
        pages = {
            number: text
            for number, (status, text) in (await self._ask_all("/metrics", parameters)).items()
            if status == _OK
        }
        return (await asyncio.to_thread(merge_metrics, pages)).encode()

    async def why_not_healthy(self) -> str | None:
        return self._heartbeat.why_not_healthy() or await self._complaints("/healthz", listening_only=True)

    async def why_not_ready(self) -> str | None:
        why = self._heartbeat.why_not_healthy() or self._why_not_ready()
        return why or await self._complaints("/readyz", listening_only=False)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _complaints(self, path: str, *, listening_only: bool) -> str | None:
        """``listening_only``: one that starts, or has just ended, is the parent's to look after, and it does."""
        lines = [
            f"process {number}: {text.strip()}"
            for number, (status, text) in (await self._ask_all(path)).items()
            if status != _OK and not (listening_only and status == _NOT_LISTENING)
        ]
        return "\n".join(lines) or None

    async def _ask_all(
        self, path: str, parameters: Collection[tuple[str, str]] = ()
    ) -> dict[str, tuple[int, str]]:
        """Status and body by the number of the process, or what stands for them when there is no answer."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ASK_TIMEOUT_S))
        session = self._session
        asked = sorted(dict(self._children).items())
        answers = await asyncio.gather(
            *(_ask(session, child.operations_port, path, parameters) for _, child in asked)
        )
        return {str(number): answer for (number, _), answer in zip(asked, answers, strict=True)}


async def _ask(
    session: aiohttp.ClientSession, port: int | None, path: str, parameters: Collection[tuple[str, str]]
) -> tuple[int, str]:
    if port is None:
        return _NOT_LISTENING, "it starts"
    try:
        async with session.get(f"http://127.0.0.1:{port}{path}", params=list(parameters)) as response:
            return response.status, await response.text()
    except TimeoutError:
        return _HANGS, f"it does not answer within {_ASK_TIMEOUT_S:g} s"
    except aiohttp.ClientError as error:
        return _NOT_LISTENING, f"it does not answer: {type(error).__name__}"
