"""Helpers of the ready-made middlewares: refuse a request, change its headers, change those of its response.

Why responses need a hook: the headers of a streamed response are sent before the handler returns.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Final

from aiohttp import web

from serve_proxy.core.problems import Problem
from serve_proxy.http.middlewares import EXCHANGE, replace_headers
from serve_proxy.http.responses import problem_response

API_KEY_NAME: Final = web.RequestKey("muster.api_key_name", str)
"""The name of a request's API key; set once the key was checked."""

ResponseHook = Callable[[web.StreamResponse], None]


class _Changes(tuple[ResponseHook, ...]):
    """Pending changes of a response's headers."""

    __slots__ = ()


_CHANGES: Final = web.RequestKey("muster.answer_changes", _Changes)


class _ChangedRequest(web.BaseRequest):
    """A request whose response is changed; its clones are of this class too."""

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        for change in self.get(_CHANGES, ()):
            change(response)


def on_response_prepare(request: web.BaseRequest, change: ResponseHook) -> None:
    """Call ``change`` with a response that is sent before the handler returns, just before its headers are sent."""
    request[_CHANGES] = _Changes((*request.get(_CHANGES, ()), change))
    request.__class__ = _ChangedRequest


def with_headers(
    request: web.BaseRequest, drop: frozenset[bytes], add: Iterable[tuple[bytes, bytes]] = ()
) -> web.BaseRequest:
    """A clone of ``request`` without the headers ``drop`` (in lower case) and with those in ``add``.

    Raises RuntimeError when the body has been read: the library cannot clone such a request.
    """
    clone = request.clone()
    raw = (*(pair for pair in request.raw_headers if pair[0].lower() not in drop), *add)
    replace_headers(clone, raw)
    return clone


def client_host(request: web.BaseRequest) -> str:
    """Address of the client: the connection's peer, or as forwarded by trusted load balancers."""
    exchange = request.get(EXCHANGE)
    return (request.remote or "") if exchange is None else exchange.client.rpartition(":")[0]


def refusal(request: web.BaseRequest, problem: Problem) -> web.Response:
    """The error response for ``problem``."""
    exchange = request.get(EXCHANGE)
    return problem_response(problem, str(uuid.uuid4()) if exchange is None else exchange.request_id)


def add_vary(response: web.StreamResponse, *names: str) -> None:
    """Add request headers on which the response depends to ``Vary``."""
    known = [part.strip() for line in response.headers.getall("Vary", []) for part in line.split(",")]
    lower = {name.lower() for name in known}
    if "*" in lower:
        return
    known += [name for name in names if name.lower() not in lower]
    response.headers["Vary"] = ", ".join(name for name in known if name)
