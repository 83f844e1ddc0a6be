"""The page of hosts and proxies: where replicas run, and who answers requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from serve_console.core.hosts_page import build_hosts_page
from serve_console.core.system import System
from serve_console.shell.sessions import PersonSession
from serve_console.web.live import Build, Fragment, LiveStreams, whole
from serve_console.web.shared import Shared

_PARTS: Final = "hosts_parts.html"


@final
class HostsPages:
    """Its routes."""

    def __init__(self, shared: Shared, streams: LiveStreams) -> None:
        self._shared = shared
        self._streams = streams

    def routes(self) -> list[BaseRoute]:
        """The page and its stream."""
        return [self._shared.get("/hosts", self._show), self._shared.get("/live/hosts", self._live)]

    async def _show(self, request: Request, session: PersonSession) -> Response:
        system = await self._shared.hub.fresh()
        topic, build = self._get_topic(session)
        self._streams.note_page(topic, system, build)
        return self._shared.renderer.page(
            request,
            session,
            "hosts.html",
            page="hosts",
            live=f"/live/hosts?seen={system.version}",
            system=system,
            view=build_hosts_page(system),
            may_drain=session.may("drain_host"),
        )

    async def _live(self, request: Request, session: PersonSession) -> Response:
        topic, build = self._get_topic(session)
        return self._streams.respond(request, session, topic, build)

    def _get_topic(self, session: PersonSession) -> tuple[str, Build]:
        may_drain = session.may("drain_host")

        def build(system: System) -> Sequence[Fragment]:
            return self._build(system, may_drain=may_drain)

        return f"hosts {may_drain}", build

    def _build(self, system: System, *, may_drain: bool) -> Sequence[Fragment]:
        part, view = self._shared.renderer.part, build_hosts_page(system)
        fragments = [
            whole("controller", part(_PARTS, "controller", view)),
            whole("waiting", part(_PARTS, "waiting", view)),
            Fragment(
                "hosts",
                (system.status is not None, tuple(host.host_id for host in view.hosts)),
                lambda: part(_PARTS, "hosts", view, may_drain),
            ),
            whole("proxies", part(_PARTS, "proxies", view)),
        ]
        fragments += [
            whole(f"host-{host.host_id}", part(_PARTS, "host", host, may_drain)) for host in view.hosts
        ]
        return fragments
