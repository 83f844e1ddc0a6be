"""The page Now: the whole stack at a glance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from serve_common.api.views import EventView
from serve_console.core.now_page import (
    NowGroup,
    NowRow,
    build_groups,
    compute_totals,
    find_troubled,
    get_key_line,
)
from serve_console.core.system import System
from serve_console.shell.sessions import PersonSession
from serve_console.web.live import Fragment, LiveStreams, whole
from serve_console.web.shared import Shared

_PARTS: Final = "now_parts.html"
_TOPIC: Final = "now"
_LATEST: Final = 8
"""Events that the page shows."""


@final
class NowPage:
    """Its routes."""

    def __init__(self, shared: Shared, streams: LiveStreams) -> None:
        self._shared = shared
        self._streams = streams

    def routes(self) -> list[BaseRoute]:
        """The page and its stream."""
        return [self._shared.get("/", self._show), self._shared.get("/live/now", self._live)]

    async def _show(self, request: Request, session: PersonSession) -> Response:
        system = await self._shared.hub.fresh()
        self._streams.note_page(_TOPIC, system, self._build)
        groups = build_groups(system)
        return self._shared.renderer.page(
            request,
            session,
            "now.html",
            page="now",
            live=f"/live/now?seen={system.version}",
            system=system,
            totals=compute_totals(system),
            groups=groups,
            attention=find_troubled(groups),
            latest=self._get_latest(),
        )

    async def _live(self, request: Request, session: PersonSession) -> Response:
        return self._streams.respond(request, session, _TOPIC, self._build)

    def _build(self, system: System) -> Sequence[Fragment]:
        part = self._shared.renderer.part
        groups = build_groups(system)
        structure = tuple((group.name, tuple(row.name for row in group.rows)) for group in groups)
        latest = self._get_latest()
        fragments = [
            whole("totals", part(_PARTS, "totals", compute_totals(system), system)),
            whole("attention", part(_PARTS, "attention", find_troubled(groups))),
            Fragment("latest", latest, lambda: part(_PARTS, "latest", latest)),
            Fragment("groups", structure, lambda: part(_PARTS, "groups", groups)),
        ]
        for group in groups:
            fragments.append(self._head(group))
            fragments += [self._row(row) for row in group.rows]
        return fragments

    def _get_latest(self) -> list[EventView]:
        """The newest events, the newest first."""
        events = self._shared.hub.events
        latest = [events[-1 - index] for index in range(min(_LATEST, len(events)))]
        return [msgspec.structs.replace(event, message=get_key_line(event.message)) for event in latest]

    def _head(self, group: NowGroup) -> Fragment:
        key = (group.status, group.message, group.route)
        return Fragment(
            f"group-{group.name}", key, lambda: self._shared.renderer.part(_PARTS, "group_head", group)
        )

    def _row(self, row: NowRow) -> Fragment:
        return Fragment(f"row-{row.name}", row, lambda: self._shared.renderer.part(_PARTS, "row_cells", row))
