"""What keeps other sites' pages and scripts out: headers of every response, and checks of every form."""

from __future__ import annotations

import hmac
import ipaddress
import re
from typing import Final
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_UNSAFE: Final = re.compile(r"[\x00-\x20\x7f\\]")
_SAFE: Final = frozenset({"GET", "HEAD"})
_FORM_FIELDS_MAX: Final = 500
_FORM_FILES_MAX: Final = 4
FORM_PART_BYTES_MAX: Final = 32 * 1024 * 1024
BODY_BYTES_MAX: Final = 48 * 1024 * 1024
"""Largest body of any request."""
SIGN_IN_BYTES_MAX: Final = 64 * 1024
"""Largest body of a form for which nobody has to be signed in."""


class SecurityHeaders:
    """ASGI middleware: the headers above, ``no-store`` for pages, and refusal of other hosts' names."""

    def __init__(self, app: ASGIApp, allowed_hosts: frozenset[str]) -> None:
        """``allowed_hosts`` are names in lower case; see `is_allowed_host`."""
        self._app = app
        self._allowed_hosts = allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        host = Headers(scope=scope).get("host", "")
        if is_allowed_host(host, self._allowed_hosts):
            await self._app(scope, receive, send_with_headers)
            return
        text = f"This console is not reached as {host[:200]!r}: MUSTER_CONSOLE_ALLOWED_HOSTS does not have that name.\n"
        await PlainTextResponse(text, status_code=421)(scope, receive, send_with_headers)


def is_allowed_host(host: str, allowed: frozenset[str]) -> bool:
    """Whether pages are served under the name in a Host header: an address, ``localhost``, or one of ``allowed``.

    Why: another site's name may lead to the console's address for a moment (DNS rebinding), and browsers then take the
    site's scripts for the console's own. An address cannot be made to lead elsewhere.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name in allowed or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def check_origin(request: Request) -> None:
    """Refuse a form that another site's page sent. Raises `HTTPException`."""
    origin = request.headers.get("origin")
    if request.method in _SAFE or origin is None:
        return
    try:
        site = urlsplit(origin).netloc.lower()
    except ValueError:
        site = ""
    if not site or site != request.headers.get("host", "").lower():
        raise HTTPException(403, "The form was sent by a page of another site.")


async def check_csrf(request: Request, token: str) -> None:
    """Refuse a form without the token of its page. Raises `HTTPException`."""
    check_origin(request)
    token_sent = request.headers.get("x-csrf-token")
    if token_sent is None:
        form = await request.form(
            max_fields=_FORM_FIELDS_MAX, max_files=_FORM_FILES_MAX, max_part_size=FORM_PART_BYTES_MAX
        )
        token_sent = str(form.get("csrf", ""))
    if not hmac.compare_digest(token_sent.encode(), token.encode()):
        raise HTTPException(403, "The page is too old to send this form; load it again.")


def is_local_path(target: str) -> bool:
    """Whether a redirect to ``target`` stays on this site."""
    # Browsers take a backslash for a slash, and leave control characters out.
    return target.startswith("/") and not target.startswith("//") and _UNSAFE.search(target) is None


def sign_in_address(target: str) -> str:
    """The sign-in page, which leads to ``target`` afterwards."""
    return "/sign-in" if target == "/" or not is_local_path(target) else f"/sign-in?next={quote(target)}"
