"""The page of events, live, and of the history: who changed what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import structlog
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from serve_common.api.queries import GetHistory
from serve_common.api.views import EventView, HistoryView
from serve_common.errors import BadField, ServeError
from serve_console.core.events_page import (
    HISTORY_PAGE,
    KINDS,
    EventBlocks,
    EventSelection,
    HistoryPage,
    build_history,
    parse_filter,
    select_events,
)
from serve_console.core.system import System
from serve_console.shell.sessions import PersonSession
from serve_console.web.live import Build, Fragment, LiveStreams, whole
from serve_console.web.shared import Shared

_log = structlog.get_logger(__name__)

_PARTS: Final = "events_parts.html"
_DIGITS_MAX: Final = 18
_RENDERED_MAX: Final = 3000
"""Rendered events that are retained, for all filters together."""


@final
class EventPages:
    """Their routes."""

    def __init__(self, shared: Shared, streams: LiveStreams) -> None:
        self._shared = shared
        self._streams = streams
        self._rendered: dict[EventView, Markup] = {}

    def routes(self) -> list[BaseRoute]:
        """The page and its stream."""
        return [self._shared.get("/events", self._show), self._shared.get("/live/events", self._live)]

    async def _show(self, request: Request, session: PersonSession) -> Response:
        wanted = parse_filter(request.query_params)
        if request.query_params.get("tab") == "history":
            return await self._show_history(request, session, wanted)
        system = await self._shared.hub.fresh()
        topic, build = self._get_topic(wanted)
        self._streams.note_page(topic, system, build)
        blocks = self._select(wanted)
        more = f"&{wanted.query}" if wanted.query else ""
        return self._shared.renderer.page(
            request,
            session,
            "events.html",
            page="events",
            live=f"/live/events?seen={system.version}{more}",
            system=system,
            wanted=wanted,
            kinds=KINDS,
            blocks=blocks,
            latest=self._render(blocks.latest),
            earlier=self._render(blocks.earlier),
        )

    async def _live(self, request: Request, session: PersonSession) -> Response:
        topic, build = self._get_topic(parse_filter(request.query_params))
        return self._streams.respond(request, session, topic, build)

    async def _show_history(
        self, request: Request, session: PersonSession, wanted: EventSelection
    ) -> Response:
        system = self._shared.hub.system
        before = request.query_params.get("before", "")
        if before and not (before.isascii() and before.isdigit() and len(before) <= _DIGITS_MAX):
            raise BadField("before", "must be the number of an entry")
        history, note = HistoryPage([], None), ""
        try:
            history = await self._read_history(session, wanted.subject, int(before) if before else None)
        except ServeError as error:
            _log.info("history_unreadable", reason=str(error))
            note = f"The history cannot be read at the moment: {error}"
        return self._shared.renderer.page(
            request,
            session,
            "history.html",
            page="events",
            live=f"/live/events?seen={system.version}&kind=none",
            system=system,
            wanted=wanted,
            history=history,
            before=before,
            note=note,
        )

    async def _read_history(self, session: PersonSession, subject: str, before: int | None) -> HistoryPage:
        """One page; a deployment's name also without its application ``default``, as its user typed it."""
        names = [subject] if not subject or "/" in subject else [subject, f"default/{subject}"]
        found: list[HistoryView] = []
        for name in names:
            query = GetHistory(limit=HISTORY_PAGE + 1, subject=name or None, before=before)
            found = found or await session.stack.live.call(query)
        return build_history(found)

    def _get_topic(self, wanted: EventSelection) -> tuple[str, Build]:
        def build(_system: System) -> Sequence[Fragment]:
            return self._build(wanted)

        return f"events {wanted.query}", build

    def _build(self, wanted: EventSelection) -> Sequence[Fragment]:
        blocks = self._select(wanted)
        return [
            whole("event-count", self._part("count", blocks, wanted)),
            whole("event-none", self._part("no_events", blocks, wanted)),
            Fragment("event-latest", blocks.latest, lambda: self._render(blocks.latest)),
            Fragment("event-earlier", blocks.earlier, lambda: self._render(blocks.earlier)),
        ]

    def _select(self, wanted: EventSelection) -> EventBlocks:
        return select_events(reversed(self._shared.hub.events), wanted)

    def _part(self, macro: str, *arguments: Any) -> Markup:
        return self._shared.renderer.part(_PARTS, macro, *arguments)

    def _render(self, events: Sequence[EventView]) -> Markup:
        """Rows of events. Each is rendered once for all tabs and filters, as a flood would cost too much otherwise."""
        rows = []
        for event in events:
            row = self._rendered.get(event)
            if row is None:
                row = self._rendered[event] = self._part("event_row", event)
            rows.append(row)
        while len(self._rendered) > _RENDERED_MAX:
            del self._rendered[next(iter(self._rendered))]
        return Markup().join(rows)
