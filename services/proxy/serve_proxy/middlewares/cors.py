"""``serve_proxy.middlewares.cors:cors``: cross-origin requests from browsers.

| variable | default | meaning |
| --- | --- | --- |
| ``MUSTER_CORS_ALLOW_ORIGINS`` | required | origins such as ``https://app.example.com``; ``*`` for any |
| ``MUSTER_CORS_ALLOW_METHODS`` | GET,HEAD,POST,PUT,PATCH,DELETE | ``*`` for any |
| ``MUSTER_CORS_ALLOW_HEADERS`` | ``*`` | request headers that a page may send |
| ``MUSTER_CORS_EXPOSE_HEADERS`` | X-Request-ID,Retry-After | response headers that a page may read besides the usual |
| ``MUSTER_CORS_ALLOW_CREDENTIALS`` | false | ``true`` lets browsers send cookies; not with origin ``*`` |
| ``MUSTER_CORS_MAX_AGE_S`` | 600 | seconds for which a browser caches the response to a preflight |

Lists are separated by commas. ``https://*.example.com`` is the origins of all hosts below ``example.com``.

A preflight never reaches a replica: the response is 204, or 403 with the reason. CORS headers that the application sets
itself are replaced.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Final, final
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from serve_common.errors import BadField
from serve_common.runtime.settings import Environment
from serve_proxy.core.problems import Problem
from serve_proxy.http.middlewares import Handler
from serve_proxy.middlewares.exchange import add_vary, on_response_prepare, refusal

_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*")
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
ORIGINS_MAX: Final = 1_000
REQUESTED_HEADERS_MAX: Final = 100
_METHODS_DEFAULT: Final = "GET,HEAD,POST,PUT,PATCH,DELETE"

Headers = list[tuple[str, str]]


class CorsRules(msgspec.Struct, frozen=True, kw_only=True):
    """Which cross-origin requests are allowed.

    Why free of HTTP types: which pages may call is a matter of security, and is tested as a table of cases.
    """

    origins: frozenset[str]
    """Origins in the form in which browsers send them."""
    wildcards: tuple[tuple[str, str], ...] = ()
    """Prefix and suffix of the origins configured with ``*.``."""
    any_origin: bool = False
    methods: tuple[str, ...]
    """Methods in upper case; ``*`` alone is any."""
    headers: tuple[str, ...]
    """Request headers in lower case; ``*`` alone is any."""
    expose_headers: tuple[str, ...] = ()
    allow_credentials: bool = False
    max_age_s: int = 600
    """Seconds for which a browser may cache the response to a preflight. Default 600."""

    def allows_origin(self, origin: str) -> bool:
        """True when pages of ``origin`` may call."""
        if self.any_origin or origin in self.origins:
            return True
        for start, end in self.wildcards:
            if origin.startswith(start) and origin.endswith(end):
                middle = origin[len(start) : len(origin) - len(end)]
                if middle and all(character.isalnum() or character in "-." for character in middle):
                    return True
        return False

    @property
    def depends_on_origin(self) -> bool:
        """True when the response depends on the origin; caches must know."""
        return not self.any_origin

    def preflight_headers(self, origin: str) -> Headers:
        """Headers of a response to a page of ``origin``; none when it may not call."""
        headers = self._origin_headers(origin)
        if headers and self.expose_headers:
            headers.append(("Access-Control-Expose-Headers", ", ".join(self.expose_headers)))
        return headers

    def preflight(self, origin: str, method: str, requested: str) -> Headers | str:
        """Headers of the response to a preflight, or why the call is not allowed.

        ``requested`` is the value of ``Access-Control-Request-Headers``, empty for none.
        """
        if not self.allows_origin(origin):
            return "this origin may not call"
        if self.methods != ("*",) and method.upper() not in self.methods:
            return f"method {method[:40]} may not be used from another origin"
        names = [name.strip() for name in requested.split(",") if name.strip()]
        if len(names) > REQUESTED_HEADERS_MAX or not all(_TOKEN.fullmatch(name) for name in names):
            return "the requested headers cannot be understood"
        if self.headers != ("*",):
            for name in names:
                if name.lower() not in self.headers:
                    return f"header {name[:80]} may not be sent from another origin"
        headers = self._origin_headers(origin)
        allowed = method.upper() if self.methods == ("*",) else ", ".join(self.methods)
        headers.append(("Access-Control-Allow-Methods", allowed))
        if names:
            headers.append(("Access-Control-Allow-Headers", ", ".join(names)))
        headers.append(("Access-Control-Max-Age", str(self.max_age_s)))
        return headers

    def _origin_headers(self, origin: str) -> Headers:
        if not self.allows_origin(origin):
            return []
        headers = [("Access-Control-Allow-Origin", "*" if self.any_origin else origin)]
        if self.allow_credentials:
            headers.append(("Access-Control-Allow-Credentials", "true"))
        return headers


def read_cors_rules(environment: Environment) -> CorsRules:
    """Read ``MUSTER_CORS_…`` from ``environment``. Raises `BadField` naming the variable."""
    name = "MUSTER_CORS_ALLOW_ORIGINS"
    origins: set[str] = set()
    wildcards: list[tuple[str, str]] = []
    configured = _split_list(environment.text(name))
    if not configured:
        raise BadField(name, "names no origin")
    if len(configured) > ORIGINS_MAX:
        raise BadField(name, f"names {len(configured)} origins; at most {ORIGINS_MAX} are allowed")
    for origin in configured:
        if origin in ("*", "null"):
            origins.add(origin)
        elif "*" in origin:
            wildcards.append(_read_wildcard(origin, name))
        else:
            origins.add(_read_origin(origin, name))
    any_origin = "*" in origins
    if any_origin and len(configured) > 1:
        raise BadField(name, "is * for any origin, or a list; not both")
    allow_credentials = _read_boolean(environment, "MUSTER_CORS_ALLOW_CREDENTIALS")
    if any_origin and allow_credentials:
        raise BadField(
            "MUSTER_CORS_ALLOW_CREDENTIALS", f"would let any page act for its visitor; name origins in {name}"
        )
    methods = tuple(
        method.upper() for method in _read_tokens(environment, "MUSTER_CORS_ALLOW_METHODS", _METHODS_DEFAULT)
    )
    headers = tuple(header.lower() for header in _read_tokens(environment, "MUSTER_CORS_ALLOW_HEADERS", "*"))
    return CorsRules(
        origins=frozenset(origins),
        wildcards=tuple(wildcards),
        any_origin=any_origin,
        methods=methods,
        headers=headers,
        expose_headers=tuple(
            _read_tokens(environment, "MUSTER_CORS_EXPOSE_HEADERS", "X-Request-ID,Retry-After")
        ),
        allow_credentials=allow_credentials,
        max_age_s=environment.integer("MUSTER_CORS_MAX_AGE_S", 600, 0, 86_400),
    )


def _split_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _read_tokens(environment: Environment, name: str, default: str) -> list[str]:
    tokens = _split_list(environment.text(name, default))
    for token in tokens:
        if not _TOKEN.fullmatch(token):
            raise BadField(name, f"{token[:80]!r} is no name that HTTP allows")
    if "*" in tokens and len(tokens) > 1:
        raise BadField(name, "is * for any, or a list; not both")
    return tokens


def _read_boolean(environment: Environment, name: str) -> bool:
    text = environment.text(name, "false").lower()
    if text not in ("true", "false"):
        raise BadField(name, f"{text[:40]!r} is neither true nor false")
    return text == "true"


def _read_origin(text: str, name: str) -> str:
    """Normalize ``scheme://host[:port]`` to what a browser sends. Raises `BadField`."""
    try:
        parts = urlsplit(text.lower())
        port = parts.port
    except ValueError as error:
        raise BadField(name, f"{text[:200]!r} is no origin: {error}") from error
    host = parts.hostname
    rest = parts.path or parts.query or parts.fragment or parts.username or parts.password
    if not host or rest or not _SCHEME.fullmatch(parts.scheme):
        raise BadField(name, f"{text[:200]!r} is no origin; write scheme://host or scheme://host:port, or *")
    if ":" in host:
        host = f"[{host}]"
    if port is None or port == _DEFAULT_PORTS.get(parts.scheme):
        return f"{parts.scheme}://{host}"
    return f"{parts.scheme}://{host}:{port}"


def _read_wildcard(text: str, name: str) -> tuple[str, str]:
    """Prefix and suffix of ``scheme://*.host[:port]``, which allows all subdomains. Raises `BadField`."""
    start, star, end = text.partition("://*.")
    if not star or "*" in end or "." not in end.partition(":")[0]:
        raise BadField(
            name, f"{text[:200]!r}: a * may only stand for hosts below a domain, as in https://*.example.com"
        )
    scheme, _, host = _read_origin(f"{start}://{end}", name).partition("://")
    return f"{scheme}://", f".{host}"


_REQUESTED_METHOD: Final = "Access-Control-Request-Method"
_REQUESTED_HEADERS: Final = "Access-Control-Request-Headers"


@final
class CorsCheck:
    """The middleware that applies the CORS rules."""

    def __init__(self, rules: CorsRules) -> None:
        self._rules = rules

    async def __call__(self, request: web.BaseRequest, handler: Handler) -> web.StreamResponse:
        """Respond to a preflight, or add the CORS headers to the response; errors need them as well."""
        origin = request.headers.get("Origin")
        if origin is not None and request.method == "OPTIONS" and _REQUESTED_METHOD in request.headers:
            return self._preflight(request, origin)
        mark = partial(self._add_headers, origin)
        on_response_prepare(request, mark)
        try:
            response = await handler(request)
        except web.HTTPException as error:
            mark(error)
            raise
        if not response.prepared:
            mark(response)
        return response

    def _add_headers(self, origin: str | None, response: web.StreamResponse) -> None:
        if self._rules.depends_on_origin:
            add_vary(response, "Origin")
        if origin is not None:
            # The proxy decides who may call: headers set by the application would be duplicates.
            for name in [name for name in response.headers if name.lower().startswith("access-control-")]:
                response.headers.popall(name, None)
            response.headers.extend(self._rules.preflight_headers(origin))

    def _preflight(self, request: web.BaseRequest, origin: str) -> web.Response:
        method = request.headers[_REQUESTED_METHOD]
        requested = ",".join(request.headers.getall(_REQUESTED_HEADERS, []))
        outcome = self._rules.preflight(origin, method, requested)
        if isinstance(outcome, str):
            response = refusal(request, Problem(status=403, code="cors_refused", message=outcome))
        else:
            response = web.Response(status=204, headers=outcome)
        add_vary(response, "Origin", _REQUESTED_METHOD, _REQUESTED_HEADERS)
        return response


def __getattr__(name: str) -> CorsCheck:
    """Create `cors` on access: only then are its settings required."""
    if name != "cors":
        raise AttributeError(name)
    return CorsCheck(read_cors_rules(Environment()))
