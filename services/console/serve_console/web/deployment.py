"""The page of one deployment: its load, logs, autoscaling, configuration and history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final
from urllib.parse import quote, urlencode

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute

from muster.client.requests import Listen, listen_to_stack
from serve_common.errors import BadField
from serve_common.names import DEFAULT_APPLICATION, deployment_tag
from serve_common.protocol.reports import LEVELS
from serve_common.protocol.subjects import Subjects
from serve_console.core.deployment_page import (
    ChartData,
    DeploymentPageView,
    build_charts,
    build_page,
    encode_points,
    list_actions,
    list_tabs,
)
from serve_console.core.system import System
from serve_console.core.timeline import TimelineItem, merge_timeline
from serve_console.shell.log_feeds import LogFeeds, LogTab
from serve_console.shell.sessions import PersonSession
from serve_console.web.deployment_queries import DeploymentQueries
from serve_console.web.live import Fragment, LiveStreams, whole
from serve_console.web.log_stream import LogStream
from serve_console.web.shared import Shared

_log = structlog.get_logger(__name__)

_PARTS: Final = "deployment_parts.html"
_TABS: Final = frozenset({"overview", "logs", "autoscaling", "configuration", "history"})
_POINTS: Final = 30
"""Newest points of the charts in each message, so that one that is lost leaves no gap."""
_ID_MAX: Final = 128
_GRAFANA: Final = "/d/muster-backend/backend"


@final
class DeploymentPage:
    """Its routes."""

    def __init__(self, shared: Shared, streams: LiveStreams, listen: Listen = listen_to_stack) -> None:
        """``listen`` opens the feeds of log lines."""
        self._shared = shared
        self._streams = streams
        self._queries = DeploymentQueries()
        subjects = Subjects(shared.settings.stack.subject_prefix)
        self._feeds = LogFeeds(subjects, listen, shared.clock, shared.tasks)

    def routes(self) -> list[BaseRoute]:
        """The page and its stream."""
        return [
            self._shared.get("/live/deployments/{name:path}", self._live),
            self._shared.get("/deployments/{name:path}", self._show),
        ]

    async def _show(self, request: Request, session: PersonSession) -> Response:
        name, tab = request.path_params["name"], _parse_tab(request)
        system = await self._shared.hub.fresh()
        page = build_page(system, name)
        if page is None:
            return _find_elsewhere(system, name)
        if tab == "autoscaling" and page.autoscaling is None:
            tab = "overview"
        variables = await self._read_tab(request, session, tab, page)
        topic = f"deployment {tab} {name}"
        self._streams.note_page(topic, system, lambda state: self._build(state, name, tab))
        query = {"tab": tab, "seen": str(system.version)}
        if tab == "logs":
            query |= {"level": variables["level"], "request_id": variables["request_id"]}
        return self._shared.renderer.page(
            request,
            session,
            "deployment.html",
            page="now",
            live=f"/live/deployments/{quote(name)}?{urlencode(query)}",
            system=system,
            deployment=page,
            tab=tab,
            tabs=list_tabs(page),
            operations=[action for action in list_actions(page) if session.may(action.verb)],
            grafana=self._link_grafana(name),
            **variables,
        )

    async def _read_tab(
        self, request: Request, session: PersonSession, tab: str, page: DeploymentPageView
    ) -> dict[str, Any]:
        """What only one tab shows."""
        if tab == "overview":
            await self._queries.read_recent(session, page.view)
            return {"charts": self._charts(page.view.name), "items": self._timeline(page.view.name)}
        if tab == "logs":
            level, request_id = _parse_log_filter(request)
            return {"level": level, "request_id": request_id, "levels": LEVELS}
        if tab == "autoscaling":
            return {"charts": self._charts(page.view.name, "replicas", "work")}
        if tab == "configuration":
            return await self._queries.read_configuration(request, session, page.view)
        return await self._queries.read_history(request, session, page.view)

    async def _live(self, request: Request, session: PersonSession) -> Response:
        name, tab = _check_tag(request.path_params["name"], self._shared.hub.system), _parse_tab(request)
        feed: LogStream | None = None
        if tab == "logs":
            self._feeds.check_limits(name, session)
            if self._shared.hub.system.find_deployment(name) is None:
                raise HTTPException(404)
            level, request_id = _parse_log_filter(request)
            log_tab = LogTab(session, self._shared.clock.now(), level=level, request_id=request_id)
            feed = LogStream(self._shared, self._feeds, name, log_tab)
        return self._streams.respond(
            request, session, f"deployment {tab} {name}", lambda state: self._build(state, name, tab), feed
        )

    def _build(self, system: System, name: str, tab: str) -> Sequence[Fragment]:
        part = self._shared.renderer.part
        page = build_page(system, name)
        if page is None:
            if system.status is None:
                return []
            return [
                Fragment("gone", "gone", lambda: part(_PARTS, "gone", name)),
                whole("state", part("macros.html", "badge", "deleted")),
                whole("wrong", ""),
            ]
        fragments = [
            whole("gone", ""),
            whole("state", part(_PARTS, "state", page.row)),
            whole("wrong", part(_PARTS, "wrong", page)),
        ]
        if tab == "overview":
            items = self._timeline(name)
            fragments += [
                whole("tiles", part(_PARTS, "tiles", page)),
                whole("facts", part(_PARTS, "facts", page)),
                whole("replicas", part(_PARTS, "replicas", page)),
                Fragment("timeline", items, lambda: part(_PARTS, "happened", items)),
                self._points(self._charts(name)),
            ]
        if tab == "autoscaling" and page.autoscaling is not None:
            scaling = page.autoscaling
            fragments += [
                whole("scaling", part(_PARTS, "scaling", scaling, page.row)),
                self._points(self._charts(name, "replicas", "work")),
            ]
        return fragments

    def _charts(self, name: str, *keys: str) -> list[ChartData]:
        return build_charts(list(self._shared.hub.history.get(name, ())), keys)

    def _points(self, charts: list[ChartData]) -> Fragment:
        times = charts[0].times
        points = {
            key: [values[-_POINTS:] for values in series] for key, series in encode_points(charts).items()
        }
        key = times[-1] if times else None
        return Fragment("points", key, lambda: self._shared.renderer.part(_PARTS, "points", points))

    def _timeline(self, name: str) -> list[TimelineItem]:
        return merge_timeline(name, self._shared.hub.events, self._queries.get_recent(name))

    def _link_grafana(self, name: str) -> str:
        base = self._shared.settings.grafana_url.rstrip("/")
        return f"{base}{_GRAFANA}?{urlencode({'var-backend': name})}" if base else ""


def _check_tag(name: str, system: System) -> str:
    """The name, if a deployment has it or can have had it. Raises HTTPException."""
    if system.find_deployment(name) is not None:
        return name
    try:
        is_tag = deployment_tag(name) == name
    except BadField:
        is_tag = False
    if not is_tag:
        raise HTTPException(404)
    return name


def _parse_tab(request: Request) -> str:
    tab = request.query_params.get("tab", "overview")
    if tab not in _TABS:
        raise BadField("tab", f"{tab[:40]!r} is none of {', '.join(sorted(_TABS))}")
    return tab


def _parse_log_filter(request: Request) -> tuple[str, str]:
    level = request.query_params.get("level", "")
    if level and level not in LEVELS:
        raise BadField("level", f"{level[:40]!r} is none of {', '.join(LEVELS)}")
    request_id = request.query_params.get("request_id", "").strip()
    if len(request_id) > _ID_MAX:
        raise BadField("request_id", f"is longer than {_ID_MAX} characters")
    return level, request_id


def _find_elsewhere(system: System, name: str) -> Response:
    """Where the page is of a name that is written as its user typed it. Raises HTTPException otherwise."""
    if system.status is None:
        raise HTTPException(503, "Nothing could be read from the stack yet; try again in a moment.")
    full = f"{DEFAULT_APPLICATION}/{name}"
    if "/" not in name and system.find_deployment(full) is not None:
        return RedirectResponse(f"/deployments/{quote(full)}", status_code=303)
    raise HTTPException(404)
