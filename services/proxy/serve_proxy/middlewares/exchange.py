"""What the ready-made middlewares share: refusing a request, changing its headers, and those of its answer.

Why answers need a hook: one that is streamed is on its way before the handler returns, and its headers with it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Final

from aiohttp import web

from serve_proxy.core.problems import Problem
from serve_proxy.http.middlewares import EXCHANGE
from serve_proxy.http.request_heads import replace_headers
from serve_proxy.http.responses import problem_response

API_KEY_NAME: Final = web.RequestKey("muster.api_key_name", str)
"""Whose key a request bears; set when it was checked."""

ChangeAnswer = Callable[[web.StreamResponse], None]


class _Changes(tuple[ChangeAnswer, ...]):
    """What is to be done to an answer's headers."""

    __slots__ = ()


_CHANGES: Final = web.RequestKey("muster.answer_changes", _Changes)


class _ChangedRequest(web.BaseRequest):
    """A request whose answer is changed; its clones are of this class too."""

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        for change in self.get(_CHANGES, ()):
            change(response)


def change_answer(request: web.BaseRequest, change: ChangeAnswer) -> None:
    """Call ``change`` with an answer that is sent before the handler returns, just before its headers are."""
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
    """The address of whoever asks: the connection's other end, or what trusted load balancers say of it."""
    exchange = request.get(EXCHANGE)
    return (request.remote or "") if exchange is None else exchange.client.rpartition(":")[0]


def refusal(request: web.BaseRequest, problem: Problem) -> web.Response:
    """``problem`` in the form of all errors of a proxy."""
    exchange = request.get(EXCHANGE)
    return problem_response(problem, uuid.uuid4().hex if exchange is None else exchange.request_id)


def add_vary(response: web.StreamResponse, *names: str) -> None:
    """Say that the answer depends on these headers of the request."""
    known = [part.strip() for line in response.headers.getall("Vary", []) for part in line.split(",")]
    lower = {name.lower() for name in known}
    if "*" in lower:
        return
    known += [name for name in names if name.lower() not in lower]
    response.headers["Vary"] = ", ".join(name for name in known if name)
