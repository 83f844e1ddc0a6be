"""The few paths below ``/-/`` that the proxy answers itself."""

from __future__ import annotations

from typing import Final

import msgspec
from aiohttp import web

from serve_proxy.shell.ingress import Ingress

OWN_PREFIX: Final = "/-/"


def answer_own_path(ingress: Ingress, method: str, path: str) -> web.Response:
    """``/-/healthz`` and ``/-/routes``; everything else below the prefix is 404."""
    if path not in ("/-/healthz", "/-/routes"):
        return _json(
            404, {"error": {"code": "not_found", "message": f"{path[:200]} is none of the proxy's paths"}}
        )
    if method not in ("GET", "HEAD"):
        response = _json(405, {"error": {"code": "method_not_allowed", "message": "allowed: GET, HEAD"}})
        response.headers["Allow"] = "GET, HEAD"
        return response
    if path == "/-/routes":
        return _json(200, ingress.routes.table.routes())
    reason = ingress.why_not_routing()
    if reason is None:
        return web.Response(text="ok\n")
    return web.Response(status=503, text=f"{reason}\n", headers={"Retry-After": "1"})


def _json(status: int, value: object) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")
