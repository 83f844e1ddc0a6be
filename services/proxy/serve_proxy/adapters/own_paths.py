"""The few paths below ``/-/`` that the proxy answers itself."""

from __future__ import annotations

from typing import Final

import msgspec
from aiohttp import web

from serve_common.dispatch.errors import MethodNotAllowed
from serve_common.errors import NotFound
from serve_proxy.adapters.http_answers import problem_response
from serve_proxy.core.problems import problem_of
from serve_proxy.shell.ingress import Ingress

OWN_PREFIX: Final = "/-/"
ROUTES_PATH: Final = "/-/routes"
"""Who asks for it meets the middlewares, as every other client does; a health check does not."""


def answer_own_path(ingress: Ingress, method: str, path: str, request_id: str) -> web.Response:
    """``/-/healthz`` and ``/-/routes``; everything else below the prefix is 404."""
    if path not in ("/-/healthz", ROUTES_PATH):
        problem = problem_of(NotFound(f"{path[:200]} is none of the proxy's paths"))
        return problem_response(problem, request_id)
    if method not in ("GET", "HEAD"):
        return problem_response(problem_of(MethodNotAllowed(method, "GET, HEAD")), request_id)
    if path == ROUTES_PATH:
        body = msgspec.json.encode(ingress.routes.table.routes())
        return web.Response(body=body, content_type="application/json")
    reason = ingress.why_not_routing()
    if reason is None:
        return web.Response(text="ok\n")
    return web.Response(status=503, text=f"{reason}\n", headers={"Retry-After": "1"})
