"""Log lines of deployments for all tabs that watch them: one subscription for each deployment, while a tab is open."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Iterator
from typing import Final, final

import msgspec
import structlog

from muster.client.requests import Feed, Listen
from serve_common.clock import Clock
from serve_common.errors import LimitReached, ServeError
from serve_common.names import short_name
from serve_common.protocol.reports import (
    REPLAY_LINES_MAX,
    LogFilter,
    ReplayRecentLogs,
    get_kind,
    level_number,
    read_line,
)
from serve_common.protocol.subjects import RECALLED, Subjects
from serve_common.runtime.tasks import OwnedTask, TaskOwner
from serve_console.core.log_lines import LogBuffer, LogEntry, parse_entry
from serve_console.shell.sessions import PersonSession

_log = structlog.get_logger(__name__)

FEEDS_MAX: Final = 200
"""Most deployments whose logs are watched at once."""
FEEDS_OF_PERSON_MAX: Final = 100
"""Most of them that one person watches."""
RETAINED_MAX: Final = 400
"""Lines that a feed retains for tabs that come later."""
_REPLAY_S: Final = 0.7
"""Seconds for processes to send their retained lines."""
_RETRY_S: Final = 2.0
_LINE_BYTES_MAX: Final = 64 * 1024


@final
class LogTab:
    """What one tab wants to see, and what waits for it."""

    def __init__(self, session: PersonSession, now: float, *, level: str = "", request_id: str = "") -> None:
        """``level`` is the lowest one; an empty ``request_id`` matches all."""
        self.session = session
        self.buffer = LogBuffer(now)
        self.state = ""
        """Why no lines come; empty: they do."""
        self._number = level_number(level) if level else -1
        self._request_id = request_id

    def add(self, entry: LogEntry) -> None:
        """Take a line, if it matches."""
        if level_number(entry.level) >= self._number and self._request_id in ("", entry.request_id):
            self.buffer.add(entry)


class _Feed:
    """The lines of one deployment."""

    def __init__(self) -> None:
        self.tabs: list[LogTab] = []
        self.retained: deque[LogEntry] = deque(maxlen=RETAINED_MAX)
        self.task: OwnedTask | None = None
        self.state = ""

    def add(self, entry: LogEntry) -> None:
        self.retained.append(entry)
        for tab in self.tabs:
            tab.add(entry)

    def set_state(self, state: str) -> None:
        self.state = state
        for tab in self.tabs:
            tab.state = state


@final
class LogFeeds:
    """All feeds of the process."""

    def __init__(self, subjects: Subjects, listen: Listen, clock: Clock, tasks: TaskOwner) -> None:
        """``listen`` opens feeds, as `listen_to_stack` does."""
        self._subjects = subjects
        self._listen = listen
        self._clock = clock
        self._tasks = tasks
        self._feeds: dict[str, _Feed] = {}

    def __len__(self) -> int:
        return len(self._feeds)

    def check_limits(self, name: str, session: PersonSession) -> None:
        """Raises `LimitReached` if the person of the session cannot watch the deployment as well."""
        person = session.person.name
        own = {
            watched
            for watched, feed in self._feeds.items()
            if any(tab.session.person.name == person for tab in feed.tabs)
        }
        if name not in own and len(own) >= FEEDS_OF_PERSON_MAX:
            raise LimitReached(f"{person} watches the logs of {len(own)} deployments already")
        if name not in self._feeds and len(self._feeds) >= FEEDS_MAX:
            raise LimitReached(f"the logs of {len(self._feeds)} deployments are watched already")

    @contextlib.contextmanager
    def watch(self, name: str, tab: LogTab) -> Iterator[None]:
        """Give the tab the deployment's lines for the block, retained ones first. Raises `LimitReached`."""
        self.check_limits(name, tab.session)
        feed = self._feeds.setdefault(name, _Feed())
        for entry in feed.retained:
            tab.add(entry)
        tab.state = feed.state
        feed.tabs.append(tab)
        if feed.task is None or feed.task.is_done:
            feed.task = self._tasks.start(self._follow(name, feed), f"logs {short_name(name)}")
        try:
            yield
        finally:
            feed.tabs.remove(tab)
            if not feed.tabs:
                del self._feeds[name]
                feed.task.cancel()

    async def _follow(self, name: str, feed: _Feed) -> None:
        while True:
            tab = next((each for each in feed.tabs if not each.session.is_over), None)
            if tab is not None:
                try:
                    await self._receive(name, feed, tab.session)
                    continue
                except (ServeError, OSError) as error:
                    _log.info("log_feed_lost", deployment=name, reason=str(error))
                    feed.set_state("NATS is away; lines from meanwhile may be missing.")
            await asyncio.sleep(_RETRY_S)

    async def _receive(self, name: str, feed: _Feed, session: PersonSession) -> None:
        """Until the session ends, whose rights these are."""
        token = secrets.token_hex(8)
        wanted = LogFilter(kinds=("replica",), backend_tag=name)
        subjects = [self._subjects.logs("replica", name), self._subjects.recalled_log(token)]
        async with self._listen(session.stack.address, subjects) as lines:
            request = ReplayRecentLogs(token=token, limit=REPLAY_LINES_MAX, filter=wanted)
            await lines.publish(self._subjects.log_replay, msgspec.json.encode(request))
            await self._replay_recent(lines, feed, wanted)
            feed.set_state("")
            while not session.is_over:
                for entry in await self._read(lines, wanted, 1.0, takes_recalled=False):
                    feed.add(entry)

    async def _replay_recent(self, lines: Feed, feed: _Feed, wanted: LogFilter) -> None:
        """Retained lines by their time, without those that the feed has, and new ones after them."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _REPLAY_S
        found: dict[LogEntry, None] = {}
        while (left_s := deadline - loop.time()) > 0:
            found.update(dict.fromkeys(await self._read(lines, wanted, left_s, takes_recalled=True)))
            while len(found) > 4 * RETAINED_MAX:
                del found[next(iter(found))]
        known = set(feed.retained)
        fresh = sorted((entry for entry in found if entry not in known), key=lambda entry: entry.at)
        for entry in fresh[-RETAINED_MAX:]:
            feed.add(entry)

    async def _read(
        self, lines: Feed, wanted: LogFilter, within_s: float, *, takes_recalled: bool
    ) -> list[LogEntry]:
        """The lines of the next message; none after ``within_s``."""
        message = await lines.receive(within_s)
        # A full queue never waits: without this a flood would leave no time to anything else.
        await asyncio.sleep(0)
        if message is None:
            return []
        kind = self._subjects.parse_log_kind(message.subject)
        if kind == RECALLED:
            if not takes_recalled:
                return []
            kind = message.subject.rpartition(".")[2]
        now = self._clock.now()
        entries = []
        for data in message.payload.splitlines():
            line = read_line(data[:_LINE_BYTES_MAX])
            if wanted.matches(get_kind(line, kind), line):
                entries.append(parse_entry(line, now))
        return entries
