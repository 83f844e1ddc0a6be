"""What all pages use: the shared state, the sessions, and rendering."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from serve_common.clock import Clock
from serve_common.names import short_name
from serve_common.runtime.tasks import TaskOwner
from serve_console.core.figures import (
    format_count,
    format_milliseconds,
    format_percent,
    format_rate,
)
from serve_console.core.plain_text import clean_text, strip_escapes
from serve_console.core.system import System
from serve_console.settings import ConsoleSettings
from serve_console.shell.hub import Hub
from serve_console.shell.sessions import PersonSession, Sessions
from serve_console.web.security import check_csrf, sign_in_address

PACKAGE: Final = Path(__file__).parents[1]
EVENT_STREAM: Final = "text/event-stream"
_LINE_END: Final = re.compile(r"\r\n|\r|\n")
_THEMES: Final = frozenset({"light", "dark"})

Handler: TypeAlias = Callable[[Request, PersonSession], Awaitable[Response]]


def encode_event(name: str, data: str) -> bytes:
    """An event of the format text/event-stream, in which a carriage return ends a line, too."""
    lines = "".join(f"data: {line}\n" for line in _LINE_END.split(data))
    return f"event: {_LINE_END.sub(' ', name)}\n{lines}\n".encode()


def digest_of_static() -> str:
    """Changes with any static file, so that browsers may keep them for good."""
    found = hashlib.sha256()
    for path in sorted((PACKAGE / "static").rglob("*")):
        if path.is_file():
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:12]


class Renderer:
    """Renders templates; escapes everything, and refuses unknown variables."""

    def __init__(self, settings: ConsoleSettings) -> None:
        self.static = f"/static/{digest_of_static()}"
        self._env = Environment(
            loader=FileSystemLoader(PACKAGE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
            finalize=_make_plain,
        )
        self._env.filters.update(
            clean=clean_text,
            count=format_count,
            dots=_name_dots,
            milliseconds=format_milliseconds,
            percent=format_percent,
            rate=format_rate,
            short_name=short_name,
            weights=_name_weights,
        )
        self._env.globals["links"] = settings

    def page(
        self,
        request: Request,
        session: PersonSession | None,
        template: str,
        *,
        page: str = "",
        live: str = "",
        system: System | None = None,
        status: int = 200,
        **variables: Any,
    ) -> HTMLResponse:
        """Render a whole page. ``page`` is the entry of the navigation, ``live`` the address of its stream."""
        theme = request.cookies.get("muster_theme", "")
        trouble = None if system is None else system.trouble
        text = self._env.get_template(template).render(
            static=self.static,
            person=None if session is None else session.person,
            may=(lambda _verb: False) if session is None else session.may,
            may_call=session is not None and session.may_call,
            csrf="" if session is None else session.csrf,
            page=page,
            live=live,
            theme=theme if theme in _THEMES else None,
            system=system,
            banner=None if trouble is None else get_banner(system),
            **{"flashes": [], **variables},
        )
        return HTMLResponse(text, status_code=status)

    def part(self, template: str, macro: str, *arguments: Any, **named: Any) -> Markup:
        """Render one macro of a template; the same markup as within the page."""
        return Markup(getattr(self._env.get_template(template).module, macro)(*arguments, **named))  # noqa: S704


def _make_plain(value: Any) -> Any:
    """What is printed for the value of any expression; markup has been through this already."""
    return strip_escapes(value) if type(value) is str else value


def _name_weights(split: Sequence[tuple[str, float]]) -> list[dict[str, Any]]:
    """What the macro ``split_bar`` takes."""
    return [{"name": short_name(name), "weight": weight} for name, weight in split]


def _name_dots(dots: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    """What the macro ``dots`` takes."""
    return [{"name": name, "state": state} for name, state in dots]


def get_banner(system: System | None) -> dict[str, str] | None:
    """Variables of the banner that says what is away; None: nothing is."""
    trouble = None if system is None else system.trouble
    if trouble is None:
        return None
    kind = "warn" if trouble.kind in {"leader", "store"} else "bad"
    return {"kind": kind, "text": trouble.text, "hint": trouble.hint}


class Shared(msgspec.Struct, frozen=True):
    """Parts that every page's routes are made with."""

    settings: ConsoleSettings
    hub: Hub
    sessions: Sessions
    renderer: Renderer
    clock: Clock
    tasks: TaskOwner
    find_session: Callable[[Request], Awaitable[PersonSession | None]]

    @property
    def end_of_session(self) -> bytes:
        """The last events of a tab whose session is over: it says so, and its stream does not try again."""
        banner = self.renderer.part("macros.html", "signed_out")
        return encode_event("banner", banner) + encode_event("signed-out", "")

    def get(self, path: str, handler: Handler) -> BaseRoute:
        """A route for people who are signed in; others are sent to the sign-in page.

        A stream gets `end_of_session`: a page may have lost its stream before its session was over, as while a
        computer sleeps or the console restarts.
        """

        async def endpoint(request: Request) -> Response:
            session = await self.find_session(request)
            if session is None:
                if "HX-Request" in request.headers:
                    return Response(status_code=401, headers={"HX-Redirect": "/sign-in"})
                if request.headers.get("accept") == EVENT_STREAM:
                    return Response(self.end_of_session, media_type=EVENT_STREAM)
                target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
                return RedirectResponse(sign_in_address(target), status_code=303)
            return await handler(request, session)

        return Route(path, endpoint, methods=["GET"])

    def post(self, path: str, handler: Handler) -> BaseRoute:
        """A route for forms of people who are signed in, each with the session's CSRF token."""

        async def endpoint(request: Request) -> Response:
            session = await self.find_session(request)
            if session is None and "HX-Request" in request.headers:
                return Response(status_code=401, headers={"HX-Redirect": "/sign-in"})
            if session is None:
                return RedirectResponse("/sign-in", status_code=303)
            try:
                await check_csrf(request, session.csrf)
                return await handler(request, session)
            finally:
                await request.close()  # files of the form

        return Route(path, endpoint, methods=["POST"])
