"""Log lines as events of a tab's stream."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Final, final
from urllib.parse import quote

from serve_console.shell.log_feeds import LogFeeds, LogTab
from serve_console.web.shared import Shared, encode_event

_PARTS: Final = "deployment_parts.html"


@final
class LogStream:
    """Implements `serve_console.web.live.TabFeed`."""

    def __init__(self, shared: Shared, feeds: LogFeeds, name: str, tab: LogTab) -> None:
        """``tab`` says which of the lines of the deployment ``name``."""
        self._shared = shared
        self._feeds = feeds
        self._name = name
        self._tab = tab
        self._state = ""

    def open(self) -> AbstractContextManager[None]:
        """Collect for the block."""
        return self._feeds.watch(self._name, self._tab)

    def take(self) -> bytes:
        """The events since the last call; empty: none."""
        part, events = self._shared.renderer.part, b""
        if self._tab.state != self._state:
            self._state = self._tab.state
            events += encode_event("log-state", part(_PARTS, "log_state", self._state))
        left_out, entries = self._tab.buffer.take(self._shared.clock.now())
        if left_out or entries:
            base = f"/deployments/{quote(self._name)}?tab=logs&request_id="
            events += encode_event("log", part(_PARTS, "log_batch", left_out, entries, base))
        return events
