"""The application: all pages, static files, and errors as pages."""

from __future__ import annotations

import contextlib
from typing import Final

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Scope

from serve_common.errors import BusAuthorizationFailed, ServeError
from serve_console.shell.sessions import PersonSession
from serve_console.web.changes import ChangePages
from serve_console.web.deployment import DeploymentPage
from serve_console.web.events import EventPages
from serve_console.web.goals import GoalPages
from serve_console.web.hosts import HostsPages
from serve_console.web.live import LiveStreams
from serve_console.web.now import NowPage
from serve_console.web.rollouts import RolloutPages
from serve_console.web.security import BODY_BYTES_MAX, SecurityHeaders
from serve_console.web.shared import PACKAGE, Shared
from serve_console.web.sign_in import SignInPages
from serve_console.web.try_it import TryPage

_log = structlog.get_logger(__name__)

_TITLES: Final = {
    400: "That is not possible", 403: "Not allowed", 404: "There is no such page", 405: "Not allowed",
    409: "Refused", 413: "That is too large", 429: "Too much at once", 503: "Not at the moment",
}  # fmt: skip


class _StaticFiles(StaticFiles):
    """Static files whose address has their digest, so that browsers keep them for good."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response


def build_app(shared: Shared, sign_in: SignInPages, allowed_hosts: frozenset[str]) -> ASGIApp:
    """The ASGI application of a console, for browsers that reach it by one of these names, or by its address."""
    streams = LiveStreams(shared)
    routes: list[BaseRoute] = [
        Mount(shared.renderer.static, _StaticFiles(directory=PACKAGE / "static")),
        *sign_in.routes(shared),
        *NowPage(shared, streams).routes(),
        *RolloutPages(shared, streams).routes(),
        *HostsPages(shared, streams).routes(),
        *EventPages(shared, streams).routes(),
        *TryPage(shared).routes(),
        *ChangePages(shared).routes(),
        *GoalPages(shared).routes(),
        *DeploymentPage(shared, streams).routes(),
    ]
    errors = _Errors(shared)
    app = Starlette(
        routes=routes,
        middleware=[Middleware(GZipMiddleware, minimum_size=600, compresslevel=4)],
        exception_handlers={
            HTTPException: errors.on_http_error,
            ServeError: errors.on_serve_error,
            Exception: errors.on_failure,
        },
        max_body_size=BODY_BYTES_MAX,
    )
    # Around everything: Starlette's own middlewares would be within what shows the page of a failure.
    return SecurityHeaders(app, allowed_hosts)


class _Errors:
    """Shows errors as pages."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    async def on_http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = "" if error.detail == "Not Found" else error.detail
        return await self._page(request, error.status_code, message)

    async def on_serve_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ServeError)
        # NATS forbids it to the person's role, or the session has ended meanwhile.
        status = 403 if isinstance(error, BusAuthorizationFailed) else error.status_hint
        return await self._page(request, status, str(error))

    async def on_failure(self, request: Request, error: Exception) -> Response:
        _log.error("page_failed", path=request.url.path, exc_info=error)
        return await self._page(request, 500, "The console's log has the details.")

    async def _page(self, request: Request, status: int, message: str) -> Response:
        session: PersonSession | None = None
        with contextlib.suppress(ServeError):
            session = await self._shared.find_session(request)
        return self._shared.renderer.page(
            request,
            session,
            "error.html",
            status=status,
            title=_TITLES.get(status, "That did not work"),
            message=message,
            error_status=status,
        )
