"""The page of a goal: its progress live, then how it ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Final, final
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute

from serve_common.api.queries import GetHistory, WaitForGoal
from serve_common.api.views import GoalStatus, GoalView
from serve_common.errors import BadField, NotFound, ServeError
from serve_common.names import GoalId
from serve_console.core.change_kinds import CHANGES
from serve_console.core.goal_page import (
    GOAL_ID_LENGTH_MAX,
    GoalPage,
    GoalSubject,
    build_goal_page,
    describe_change,
    find_subject,
)
from serve_console.shell.sessions import PersonSession
from serve_console.web.shared import EVENT_STREAM, Shared, encode_event, get_banner

STREAMS_MAX: Final = 200
"""Most tabs that follow goals."""
STREAMS_OF_PERSON_MAX: Final = 100
"""Most of one person, so that nobody shuts the others out."""
_SLICE_S: Final = 1.0
_SLACK_S: Final = 2.0
"""Seconds that a reply may take beyond its own timeout."""
_SILENT_S: Final = 10.0
_HISTORY_MAX: Final = 200
_PARTS: Final = "goal_parts.html"
_AWAY: Final = (
    "No controller leads at the moment. The change goes on once one does; this page follows by itself."
)
_GONE: Final = "This goal is not known any more: it ended a while ago."


class _Progress:
    """The last state of one goal, read by one tab for all."""

    def __init__(self) -> None:
        self.tabs = 0
        self.lock = asyncio.Lock()
        self.view: GoalView | None = None
        self.trouble = ""
        self.read_at = 0.0


@final
class GoalPages:
    """Their routes."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._progress: dict[GoalId, _Progress] = {}
        self._open = Counter[str]()

    def routes(self) -> list[BaseRoute]:
        """The page and its stream."""
        return [
            self._shared.get("/goals/{goal_id}", self._show),
            self._shared.get("/live/goals/{goal_id}", self._live),
        ]

    async def _show(self, request: Request, session: PersonSession) -> Response:
        goal_id = _find_goal_id(request)
        view, trouble = GoalView(goal_id=goal_id, status=GoalStatus.PENDING), ""
        try:
            view = await session.stack.live.call(WaitForGoal(goal_id=goal_id, timeout_s=0.0))
        except (NotFound, BadField) as error:
            raise HTTPException(
                404, "There is no such goal, or it ended so long ago that it is not known any more."
            ) from error
        except ServeError:
            trouble = _AWAY
        subject = await self._find_subject(request, session, goal_id)
        system = await self._shared.hub.fresh()
        page = build_goal_page(view, subject, system, trouble)
        live = f"/live/goals/{quote(goal_id, safe='')}"
        if subject is not None:
            live += f"?{request.url.query}"
        return self._shared.renderer.page(
            request,
            session,
            "goal.html",
            live=live,
            system=system,
            title=describe_change(subject),
            goal=page,
            subject=subject,
            is_unchanged=request.query_params.get("changed") == "false",
        )

    async def _find_subject(
        self, request: Request, session: PersonSession, goal_id: GoalId
    ) -> GoalSubject | None:
        """What the goal is about: as history says, or else as the address does."""
        system = self._shared.hub.system
        try:
            history = await session.stack.live.call(GetHistory(limit=_HISTORY_MAX))
        except ServeError:
            history = []
        found = find_subject(goal_id, history, system)
        verb, name = (request.query_params.get(key, "")[:200] for key in ("verb", "name"))
        if found is not None or verb not in CHANGES:
            return found
        return GoalSubject(verb=verb, name=name, at=0.0, by="")

    async def _live(self, request: Request, session: PersonSession) -> Response:
        goal_id = _find_goal_id(request)
        if request.method == "HEAD":
            return Response(media_type=EVENT_STREAM)  # its stream would never end
        own = self._open[session.person.name]
        if own >= STREAMS_OF_PERSON_MAX or self._open.total() >= STREAMS_MAX:
            return Response("too many open pages", status_code=503)
        subject = await self._find_subject(request, session, goal_id)
        return StreamingResponse(
            self._stream(session, goal_id, subject),
            media_type=EVENT_STREAM,
            headers={"X-Accel-Buffering": "no"},
        )

    async def _stream(
        self, session: PersonSession, goal_id: GoalId, subject: GoalSubject | None
    ) -> AsyncIterator[bytes]:
        hub, sent = self._shared.hub, dict[str, str]()
        with hub.watch(), self._follow(goal_id, session.person.name) as progress:
            yield b"retry: 1000\n\n"
            silent_since = self._shared.clock.now()
            while not hub.is_closed:
                if session.is_over:
                    yield self._shared.end_of_session
                    return
                await self._read(session, goal_id, progress)
                view = progress.view or GoalView(goal_id=goal_id, status=GoalStatus.PENDING)
                page = build_goal_page(view, subject, hub.system, progress.trouble)
                changed = self._find_changed(session, page, sent)
                now = self._shared.clock.now()
                if changed:
                    yield changed
                    silent_since = now
                elif now - silent_since > _SILENT_S:
                    yield b": still here\n\n"
                    silent_since = now

    def _find_changed(self, session: PersonSession, page: GoalPage, sent: dict[str, str]) -> bytes:
        part, system = self._shared.renderer.part, self._shared.hub.system
        banner = get_banner(system)
        fragments = {
            "banner": "" if banner is None else part("macros.html", "banner", **banner),
            "goal-head": part(_PARTS, "head", page),
            "goal-body": part(_PARTS, "body", page, session.may),
        }
        changed = {name: html for name, html in fragments.items() if sent.get(name) != html}
        sent.update(changed)
        return b"".join(encode_event(name, html) for name, html in changed.items())

    @contextlib.contextmanager
    def _follow(self, goal_id: GoalId, person: str) -> Iterator[_Progress]:
        progress = self._progress.setdefault(goal_id, _Progress())
        progress.tabs += 1
        self._open[person] += 1
        try:
            yield progress
        finally:
            progress.tabs -= 1
            self._open -= Counter([person])
            if not progress.tabs:
                self._progress.pop(goal_id, None)

    async def _read(self, session: PersonSession, goal_id: GoalId, progress: _Progress) -> None:
        """Wait for a change of the goal for about a second, or of the system once it has ended."""
        clock, started_at = self._shared.clock, self._shared.clock.now()
        if progress.view is not None and progress.view.status is not GoalStatus.PENDING:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SILENT_S):
                    await self._shared.hub.wait_newer(self._shared.hub.system.version)
            return
        async with progress.lock:
            if progress.read_at > started_at:
                return  # another tab has just read it
            query = WaitForGoal(goal_id=goal_id, timeout_s=_SLICE_S)
            try:
                progress.view = await session.stack.live.call(query, attempt_s=_SLICE_S + _SLACK_S)
                progress.trouble = ""
            except NotFound:
                progress.trouble = _GONE
                await asyncio.sleep(_SLICE_S)
            except ServeError:
                progress.trouble = _AWAY
                await asyncio.sleep(_SLICE_S)
            progress.read_at = clock.now()


def _find_goal_id(request: Request) -> GoalId:
    goal_id: str = request.path_params["goal_id"]
    if len(goal_id) > GOAL_ID_LENGTH_MAX:
        raise HTTPException(404)
    return GoalId(goal_id)
