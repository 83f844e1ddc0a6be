"""A frame's head and body as the request that user code knows from Starlette and Ray Serve."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import unquote

from starlette.requests import Request
from starlette.types import Message

from serve_replica_host.replica.exchange import Exchange


def make_request(exchange: Exchange) -> Request:
    """The request with its whole body at hand; runs on the user loop."""
    head = exchange.head
    path = head.path
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": head.method,
        "scheme": head.scheme,
        "path": unquote(path) if "%" in path else path,
        "raw_path": path.encode("latin-1", "replace"),
        # By ASGI the path is the whole one, and root_path the part of it that routing has used up.
        "root_path": "" if head.route == "/" else head.route,
        "query_string": head.query.encode("latin-1", "replace"),
        "headers": head.headers,
        "client": _address(head.client),
        "server": None,
        "state": {},
    }
    return Request(scope, _Receive(exchange))


def _address(text: str) -> tuple[str, int] | None:
    host, _, port = text.rpartition(":")
    return (host, int(port)) if host and port.isdigit() else None


class _Receive:
    """ASGI's ``receive``: the body in one message, and later that the caller is gone."""

    __slots__ = ("_exchange", "_is_body_given")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._is_body_given = False

    async def __call__(self) -> Message:
        if not self._is_body_given:
            self._is_body_given = True
            return {"type": "http.request", "body": self._exchange.body, "more_body": False}
        gone = self._exchange.gone
        if gone is None:
            gone = self._exchange.gone = asyncio.Event()
        await gone.wait()
        return {"type": "http.disconnect"}
