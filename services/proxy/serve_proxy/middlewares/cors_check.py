"""CORS at a proxy's edge: answers preflights, and lets browsers hand answers to pages of other origins."""

from __future__ import annotations

from functools import partial
from typing import Final, final

from aiohttp import web

from serve_proxy.adapters.middlewares import Handler
from serve_proxy.core.problems import Problem
from serve_proxy.middlewares.cors_rules import CorsRules
from serve_proxy.middlewares.exchange import add_vary, change_answer, refusal

_REQUESTED_METHOD: Final = "Access-Control-Request-Method"
_REQUESTED_HEADERS: Final = "Access-Control-Request-Headers"


@final
class CorsCheck:
    """A middleware."""

    def __init__(self, rules: CorsRules) -> None:
        self._rules = rules

    async def __call__(self, request: web.BaseRequest, handler: Handler) -> web.StreamResponse:
        """Answer a preflight, or add to the answer what the browser needs; errors need it as well."""
        origin = request.headers.get("Origin")
        if origin is not None and request.method == "OPTIONS" and _REQUESTED_METHOD in request.headers:
            return self._preflight(request, origin)
        mark = partial(self._mark, origin)
        change_answer(request, mark)
        try:
            response = await handler(request)
        except web.HTTPException as answer:
            mark(answer)
            raise
        if not response.prepared:
            mark(response)
        return response

    def _mark(self, origin: str | None, response: web.StreamResponse) -> None:
        if self._rules.depends_on_origin:
            add_vary(response, "Origin")
        if origin is not None:
            # Only the proxy knows who may call: what the application said of it would be doubled.
            for name in [name for name in response.headers if name.lower().startswith("access-control-")]:
                response.headers.popall(name, None)
            response.headers.extend(self._rules.answer(origin))

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
