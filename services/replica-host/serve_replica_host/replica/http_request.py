"""A frame's head as the request that user code knows from Starlette, Ray Serve and ASGI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

from starlette.requests import Request
from starlette.types import Receive, Scope

from serve_common.wires.frames import RequestHead

_ASGI: Final = {"version": "3.0", "spec_version": "2.4"}
_NO_STATE: Final[Mapping[str, Any]] = {}


def http_scope(head: RequestHead, state: Mapping[str, Any] = _NO_STATE) -> Scope:
    """ASGI's scope of an HTTP request; ``state`` is what the lifespan left."""
    scope = _scope("http", head, state)
    scope["method"] = head.method
    return scope


def websocket_scope(head: RequestHead, state: Mapping[str, Any] = _NO_STATE) -> Scope:
    """ASGI's scope of a WebSocket."""
    scope = _scope("websocket", head, state)
    scope["scheme"] = {"http": "ws", "https": "wss"}.get(head.scheme, head.scheme)
    offered = b",".join(value for name, value in head.headers if name == b"sec-websocket-protocol")
    scope["subprotocols"] = [word.strip() for word in offered.decode("latin-1").split(",") if word.strip()]
    scope["extensions"] = {"websocket.http.response": {}}
    return scope


def _scope(kind: str, head: RequestHead, state: Mapping[str, Any]) -> dict[str, Any]:
    path = head.path
    return {
        "type": kind,
        "asgi": _ASGI.copy(),
        "http_version": "1.1",
        "scheme": head.scheme,
        "path": unquote(path) if "%" in path else path,
        "raw_path": path.encode("latin-1", "replace"),
        # By ASGI the path is the whole one, and root_path the part of it that routing has used up.
        "root_path": "" if head.route == "/" else head.route,
        "query_string": head.query.encode("latin-1", "replace"),
        "headers": head.headers,
        "client": _address(head.client),
        "server": _server(head),
        "state": dict(state),
    }


def _address(text: str) -> tuple[str, int] | None:
    host, _, port = text.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdigit() else None


def _server(head: RequestHead) -> tuple[str, int] | None:
    """Who the client believes to talk to: the proxy's own address says nothing to user code."""
    for name, value in head.headers:
        if name == b"host":
            text = value.decode("latin-1")
            default = 443 if head.scheme in ("https", "wss") else 80
            return _address(text) or (text.strip("[]"), default)
    return None


class LazyRequest(Request):
    """A Starlette `Request` that is made when something of it is looked at: many handlers look at nothing."""

    def __init__(self, head: RequestHead, receive: Receive) -> None:
        """As `Request` of `http_scope`."""
        self._made_of = (head, receive)

    def __getattr__(self, name: str) -> Any:
        # Comes only for what is not there (yet).
        if "scope" in self.__dict__:
            raise AttributeError(name)
        head, receive = self._made_of
        super().__init__(http_scope(head), receive)
        return getattr(self, name)
