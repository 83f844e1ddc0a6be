"""An ASGI application's start-up and shutdown, run once in the replica around everything that it serves.

Why in a task of its own: an application's lifespan is one call that stays open between start-up and shutdown, and what
it opened must be closed by the same task.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, final

import structlog
from starlette.types import ASGIApp, Message

from serve_common.tasks import TaskOwner, cancellations
from serve_replica_host.replica.import_path import UserCodeUnusable
from serve_replica_host.replica.tracebacks import error_line, user_traceback

_log = structlog.get_logger(__name__)

_END_TIMEOUT_S: Final = 5.0
"""For a lifespan that has said that it is done to really end."""


@final
class Lifespan:
    """One application; all methods run on the user loop."""

    def __init__(self, application: ASGIApp) -> None:
        self.application = application
        self.state: dict[str, Any] = {}
        """What the start-up left for requests; each gets a copy."""
        self._is_supported = True
        self._events: asyncio.Queue[Message] = asyncio.Queue()
        self._said: asyncio.Queue[Message | None] = asyncio.Queue()
        self._failure: BaseException | None = None
        self._tasks = TaskOwner("lifespan")

    async def start(self) -> None:
        """Returns when the application has started. Raises what its start-up raises, or `UserCodeUnusable`."""
        self._tasks.start(self._run(), "run")
        self._events.put_nowait({"type": "lifespan.startup"})
        said = await self._said.get()
        if said is None:
            # As every ASGI server has it: who raises before a word about lifespan does not know the protocol.
            self._is_supported = False
            if self._failure is not None and not isinstance(self._failure, Exception):
                raise self._failure  # that says no more than that it wants to end
            if self._failure is not None:
                _log.info("lifespan_unsupported", error=error_line(self._failure))
        elif said["type"] == "lifespan.startup.failed":
            await self._ended()
            if self._failure is not None:
                raise self._failure
            raise UserCodeUnusable(f"the application's start-up failed: {said.get('message', '')}")

    async def stop(self) -> None:
        """Run the shutdown, if the application has one; what it raises is logged."""
        if not self._is_supported:
            return
        self._is_supported = False
        self._events.put_nowait({"type": "lifespan.shutdown"})
        said = await self._said.get()
        if said is not None:
            await self._ended()
        if said is None or said["type"] != "lifespan.shutdown.complete":
            told = "" if self._failure is None else user_traceback(self._failure)
            _log.error("shutdown_failed", error=(said or {}).get("message", ""), traceback=told)

    async def _ended(self) -> None:
        """After its last word an application may still raise what it was about."""
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await self._said.get()
        except TimeoutError:
            _log.warning("lifespan_did_not_end", timeout_s=_END_TIMEOUT_S)
        await self._tasks.close(_END_TIMEOUT_S)

    async def _run(self) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": self.state}
        try:
            await self.application(scope, self._events.get, self._said.put)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and cancellations():
                raise
            self._failure = error
        finally:
            self._said.put_nowait(None)
