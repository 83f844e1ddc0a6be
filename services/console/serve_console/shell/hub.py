"""Reads the stack once for all open pages, with the rights of a person who is signed in.

Why one reader: a hundred tabs cost the controller what one costs. Nothing is read while nobody is signed in.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Final, final

import msgspec
import structlog

from muster.client.rates import compute_rates
from muster.client.requests import Feed, Listen, NoListeners, NoReply
from serve_common.api.queries import (
    GetAllApplications,
    GetAllEndpoints,
    GetEvents,
    GetLoad,
    GetRollouts,
)
from serve_common.api.views import EventView, LoadView, StatusView
from serve_common.clock import Clock
from serve_common.errors import (
    BusAuthorizationFailed,
    BusUnavailable,
    FencedOut,
    ServeError,
    TransientError,
)
from serve_common.protocol.subjects import UNREADABLE, Subjects
from serve_console.core.rollouts_page import OPEN_STATES
from serve_console.core.system import NOTHING_READ, RatesPoint, System, Trouble
from serve_console.shell.sessions import PersonSession, Sessions

_log = structlog.get_logger(__name__)

_WATCHED_S: Final = 1.0
"""Seconds between two reads while a page is open."""
_UNWATCHED_S: Final = 5.0
"""The same while people are signed in and no page is open: so that charts begin with a past."""
_LOAD_S: Final = 2.0
"""Seconds between two samples of the load: each scrapes all services."""
_AFTER_EVENT_S: Final = 0.25
"""Seconds between two reads when events come."""
_EVENT_ALONE_S: Final = 0.5
"""Seconds after which an event is shown without a new status."""
_ALL_S: Final = 10.0
"""Seconds after which what changes with events only is read again anyway."""
EVENTS_MAX: Final = 1000
POINTS_MAX: Final = 450
"""Samples of the load that are kept of each name: a quarter of an hour while a page is open."""
_NAMES_MAX: Final = 5000

_LEADER_AWAY = Trouble(
    "leader",
    "No controller leads at the moment.",
    "Requests are served as before; changes wait until one leads. What is shown is the last that was read.",
)
_BUS_AWAY = Trouble(
    "bus",
    "NATS is away.",
    "Requests over direct links are still served; nothing can be changed. What is shown is the last that was read.",
)
_STORE_AWAY = Trouble(
    "store", "Postgres does not answer.", "What runs goes on; changes are refused until it is back."
)
_REFUSED = Trouble(
    "refused", "NATS refuses everyone who is signed in.", "Sign in again; keys may have been rotated."
)


@final
class Hub:
    """The last state of the stack, recent events and loads; wakes those who wait for newer ones."""

    def __init__(self, sessions: Sessions, subjects: Subjects, listen: Listen, clock: Clock) -> None:
        """``listen`` opens feeds, as `listen_to_stack` does. `run`, `sample_load` and `follow_events` do the work."""
        self.system: System = NOTHING_READ
        self.events: deque[EventView] = deque(maxlen=EVENTS_MAX)
        """The newest events, the oldest first."""
        self.history: dict[str, deque[RatesPoint]] = {}
        """Samples of the load by name, the oldest first."""
        self._sessions = sessions
        self._subjects = subjects
        self._listen = listen
        self._clock = clock
        self._watchers = 0
        self._changed = asyncio.Condition()
        self._poke = asyncio.Event()
        self._load: LoadView | None = None
        self._all_read_at = 0.0
        self._events_are_whole = False
        self._is_closed = False
        self._shown_at = 0.0

    @property
    def watchers(self) -> int:
        """How many pages wait for changes."""
        return self._watchers

    @property
    def is_closed(self) -> bool:
        """Whether the process ends."""
        return self._is_closed

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Read often for the block."""
        self._watchers += 1
        self._poke_if_old()
        try:
            yield
        finally:
            self._watchers -= 1

    async def wait_newer(self, version: int) -> System:
        """Wait for a state after ``version``; the present one if it is, or if the process ends."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_closed or self.system.version > version)
        return self.system

    async def fresh(self, within_s: float = 1.5) -> System:
        """A state that is at most a second old, or after ``within_s`` the last one there is."""
        if self._clock.now() - self.system.read_at > _WATCHED_S and not self._is_closed:
            version = self.system.version
            self._poke.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self.wait_newer(version)
        return self.system

    async def changed(self) -> None:
        """Read everything anew, as a person has changed something."""
        self._all_read_at = 0.0
        self._poke.set()

    async def close(self) -> None:
        """Wake everyone who waits, for good."""
        self._is_closed = True
        async with self._changed:
            self._changed.notify_all()

    async def run(self) -> None:
        """Read again and again."""
        while True:
            reader = self._sessions.find_reader()
            if reader is not None:
                await self._read(reader)
                await asyncio.sleep(_AFTER_EVENT_S)
            interval_s = _WATCHED_S if self._watchers else _UNWATCHED_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, interval_s - _AFTER_EVENT_S)):
                    await self._poke.wait()
            self._poke.clear()

    async def follow_events(self) -> None:
        """Receive events as they are published."""
        while True:
            reader = self._sessions.find_reader()
            if reader is not None:
                try:
                    async with self._listen(reader.stack.address, [self._subjects.events]) as feed:
                        self._events_are_whole = False
                        await self._take_events(reader, feed)
                    continue
                except (ServeError, OSError) as error:
                    _log.info("events_feed_lost", reason=str(error))
            await asyncio.sleep(1.0)

    async def _take_events(self, reader: PersonSession, feed: Feed) -> None:
        while not reader.is_over:
            message = await feed.receive(1.0)
            if message is None:
                continue
            try:
                event = msgspec.json.decode(message.payload, type=EventView)
            except UNREADABLE:
                continue
            self.events.append(event)
            self._all_read_at = 0.0
            self._poke.set()
            if self._clock.now() - self._shown_at > _EVENT_ALONE_S:
                # The status may come late, as from a leader that hangs; an event needs none.
                await self._show(self.system)

    def _poke_if_old(self) -> None:
        if self._clock.now() - self.system.read_at > _WATCHED_S:
            self._poke.set()

    async def _read(self, reader: PersonSession) -> None:
        try:
            system: System | None = await self._read_system(reader)
        except ServeError as error:
            system = await self._explain(reader, error)
        if system is None:
            self._poke.set()
            return
        if system.trouble is not None and system.trouble.kind != "store":
            self._events_are_whole = False
        await self._show(system)

    async def _explain(self, reader: PersonSession, error: ServeError) -> System | None:
        """The last state with why nothing newer could be read; None: another session shall read at once."""
        if reader.is_over:  # somebody signed out meanwhile
            return None
        match error:
            case BusAuthorizationFailed():
                _log.warning("session_refused", person=reader.person.name, reason=str(error))
                await self._sessions.end_session(reader)
                if self._sessions.find_reader() is not None:
                    return None
                trouble = _REFUSED
            case BusUnavailable():
                trouble = _BUS_AWAY
            case NoListeners() | NoReply() | TransientError() | FencedOut():
                _log.info("no_leader_answers", reason=str(error))
                trouble = _LEADER_AWAY
            case _:
                _log.warning("status_unreadable", reason=str(error))
                trouble = Trouble("leader", f"The status cannot be read: {error}", "")
        return msgspec.structs.replace(self.system, trouble=trouble)

    async def _show(self, system: System) -> None:
        self._shown_at = self._clock.now()
        self.system = msgspec.structs.replace(system, version=self.system.version + 1)
        async with self._changed:
            self._changed.notify_all()

    async def _read_system(self, reader: PersonSession) -> System:
        admin, before = reader.stack.live, self.system
        status = await admin.fetch_status()
        now = self._clock.now()
        applications, endpoints, rollouts = before.applications, before.endpoints, before.rollouts
        is_old = now - self._all_read_at >= _ALL_S
        if is_old or before.status is None or before.status.snapshot_id != status.snapshot_id:
            self._all_read_at = now
            applications = {view.name: view for view in await admin.call(GetAllApplications())}
            endpoints = {view.endpoint_tag: view for view in await admin.call(GetAllEndpoints())}
            is_old = True
        if is_old or any(view.state in OPEN_STATES for view in rollouts.values()):
            rollouts = {view.backend_tag: view for view in await admin.call(GetRollouts())}
        if not self._events_are_whole:
            await self._read_events(reader)
        return System(
            version=0,
            read_at=now,
            status=status,
            applications=applications,
            endpoints=endpoints,
            rollouts=rollouts,
            rates={name: points[-1].rates for name, points in self.history.items()},
            unreachable=() if self._load is None else tuple(self._load.unreachable),
            trouble=None if status.store_available else _STORE_AWAY,
        )

    async def sample_load(self) -> None:
        """Sample the load again and again.

        Why apart from `run`: a service that does not answer delays a sample, and must delay nothing else.
        """
        while True:
            reader, status = self._sessions.find_reader(), self.system.status
            if reader is not None and status is not None:
                try:
                    self._add_load(await reader.stack.live.call(GetLoad()), status)
                except ServeError as error:
                    _log.info("load_unreadable", reason=str(error))
            await asyncio.sleep(_LOAD_S if self._watchers else _UNWATCHED_S)

    def _add_load(self, after: LoadView, status: StatusView) -> None:
        before, self._load = self._load, after
        if before is None or after.at <= before.at:
            return
        known = set[str]()
        for rates in compute_rates(before, after, status, status.autoscaling):
            known.add(rates.name)
            if len(self.history) < _NAMES_MAX or rates.name in self.history:
                points = self.history.setdefault(rates.name, deque(maxlen=POINTS_MAX))
                points.append(RatesPoint(after.at, rates))
        for name in self.history.keys() - known:
            del self.history[name]

    async def _read_events(self, reader: PersonSession) -> None:
        """Merge what the controller still has with what came over the feed."""
        found = await reader.stack.live.call(GetEvents(limit=EVENTS_MAX))
        merged = {
            (event.at, event.kind, event.subject, event.message): event for event in (*found, *self.events)
        }
        self.events.clear()
        self.events.extend(sorted(merged.values(), key=lambda event: event.at))
        self._events_are_whole = True
