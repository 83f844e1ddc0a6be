"""The pages of rollouts: all of them, and one live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute

from serve_common.api.rollout_views import RolloutView
from serve_common.errors import BadField
from serve_common.names import deployment_tag
from serve_console.core.rollouts_page import build_detail, build_rows, find_events
from serve_console.core.system import System
from serve_console.core.timeline import TimelineItem
from serve_console.shell.sessions import PersonSession
from serve_console.web.live import Build, Fragment, LiveStreams, whole
from serve_console.web.shared import Shared

_PARTS: Final = "rollouts_parts.html"
_TOPIC: Final = "rollouts"


@final
class RolloutPages:
    """Their routes."""

    def __init__(self, shared: Shared, streams: LiveStreams) -> None:
        self._shared = shared
        self._streams = streams

    def routes(self) -> list[BaseRoute]:
        """The pages and their streams."""
        get = self._shared.get
        return [
            get("/rollouts", self._show_all),
            get("/live/rollouts", self._live_all),
            get("/rollouts/{name:path}", self._show),
            get("/live/rollouts/{name:path}", self._live),
        ]

    async def _show_all(self, request: Request, session: PersonSession) -> Response:
        system = await self._shared.hub.fresh()
        self._streams.note_page(_TOPIC, system, self._build_all)
        started, ended = build_rows(system)
        return self._shared.renderer.page(
            request,
            session,
            "rollouts.html",
            page="rollouts",
            live=f"/live/rollouts?seen={system.version}",
            system=system,
            open_rows=started,
            ended_rows=ended,
        )

    async def _live_all(self, request: Request, session: PersonSession) -> Response:
        return self._streams.respond(request, session, _TOPIC, self._build_all)

    def _build_all(self, system: System) -> Sequence[Fragment]:
        part = self._shared.renderer.part
        started, ended = build_rows(system)
        is_read = system.status is not None
        fragments = [
            Fragment(
                "open-rollouts",
                (is_read, bool(ended), tuple(row.name for row in started)),
                lambda: part(_PARTS, "open_rows", started, ended, is_read),
            ),
            Fragment("ended", tuple(map(repr, ended)), lambda: part(_PARTS, "ended_rows", ended)),
        ]
        fragments += [whole(f"rollout-{row.name}", part(_PARTS, "open_row", row)) for row in started]
        return fragments

    async def _show(self, request: Request, session: PersonSession) -> Response:
        path = request.path_params["name"].rstrip("/")
        name = _parse_name(path)
        if name != path:
            return RedirectResponse(f"/rollouts/{name}", status_code=307)
        system = await self._shared.hub.fresh()
        topic, build = self._get_topic(session, name)
        view = system.rollouts.get(name)
        if view is None and system.status is not None and system.find_deployment(name) is None:
            raise HTTPException(404)
        self._streams.note_page(topic, system, build)
        return self._shared.renderer.page(
            request,
            session,
            "rollout.html",
            page="rollouts",
            live=f"/live/rollouts/{name}?seen={system.version}",
            system=system,
            name=name,
            detail=None if view is None else build_detail(view),
            timeline=[] if view is None else self._find_events(view),
            may_control=session.may("control_rollout"),
            may_start=session.may("start_rollout"),
        )

    async def _live(self, request: Request, session: PersonSession) -> Response:
        name = _parse_name(request.path_params["name"])
        topic, build = self._get_topic(session, name)
        return self._streams.respond(request, session, topic, build)

    def _get_topic(self, session: PersonSession, name: str) -> tuple[str, Build]:
        """What tabs of one rollout share: the buttons differ by role."""
        control, start = session.may("control_rollout"), session.may("start_rollout")

        def build(system: System) -> Sequence[Fragment]:
            return self._build(system, name, may_control=control, may_start=start)

        return f"rollout {name} {control} {start}", build

    def _build(self, system: System, name: str, *, may_control: bool, may_start: bool) -> Sequence[Fragment]:
        part, view = self._shared.renderer.part, system.rollouts.get(name)
        if view is None:
            return [whole("body", part(_PARTS, "no_rollout", name, may_start))]
        detail = build_detail(view)
        timeline = self._find_events(view)
        return [
            # The frame of another rollout of the same deployment is sent as a whole.
            Fragment(
                "body",
                (detail.goal_id, detail.row.started_at),
                lambda: part(_PARTS, "detail", detail, timeline, may_control, may_start),
            ),
            whole("state", part(_PARTS, "state", detail)),
            whole("actions", part(_PARTS, "actions", detail, may_control, may_start)),
            whole("progress", part(_PARTS, "progress", detail)),
            whole("gates", part(_PARTS, "gates", detail)),
            whole("found", part(_PARTS, "found", detail)),
            whole("facts", part(_PARTS, "facts", detail)),
            Fragment("timeline", tuple(map(repr, timeline)), lambda: part(_PARTS, "timeline", timeline)),
        ]

    def _find_events(self, view: RolloutView) -> list[TimelineItem]:
        return find_events(view, self._shared.hub.events)


def _parse_name(path: str) -> str:
    """The full name of a deployment in an address."""
    try:
        return deployment_tag(path)
    except BadField as error:
        raise HTTPException(404) from error
