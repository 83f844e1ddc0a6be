"""The way from Ray's threads back to the host's event loop, and the loop's timers for the Ray thread.

Why apart: Ray's threads may still tell something when the loop is closed, and then nobody listens any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, final

import structlog

from serve_replica_host.adapters.ray_thread import RayThread

_log = structlog.get_logger(__name__)


@final
class HostLoop:
    """The loop that called `open`; the other methods may be called on any thread after that."""

    def __init__(self, thread: RayThread) -> None:
        self._thread = thread
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Take the running loop."""
        self._loop = asyncio.get_running_loop()

    def call(self, call: Callable[..., None], *arguments: Any) -> None:
        """Run ``call`` on the loop."""
        self._on_loop(lambda loop: loop.call_soon_threadsafe(call, *arguments))

    def call_ray_later(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Run ``call`` on the Ray thread, after ``delay_s``."""

        def later(loop: asyncio.AbstractEventLoop) -> None:
            loop.call_soon_threadsafe(loop.call_later, delay_s, self._thread.post, call, *arguments)

        self._on_loop(later)

    def _on_loop(self, call: Callable[[asyncio.AbstractEventLoop], Any]) -> None:
        assert self._loop is not None, "open comes first"
        try:
            call(self._loop)
        except RuntimeError as error:  # the loop is closed: the host ends
            _log.debug("event_after_the_end", error=str(error))
