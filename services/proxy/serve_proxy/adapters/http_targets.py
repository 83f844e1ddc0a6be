"""What a request says of itself, as aiohttp holds it.

Why apart: the library hands some of it out only in forms that cost more than the whole way through this proxy.
"""

from __future__ import annotations

from urllib.parse import quote

from aiohttp import web


def is_socket_wanted(request: web.BaseRequest, upgrade: bytes) -> bool:
    """True for an upgrade to a WebSocket; ``upgrade`` is the header. The parser has then stopped at this request."""
    return upgrade.strip().lower() == b"websocket" and request._message.upgrade  # noqa: SLF001 - told nowhere else


def peer_of(request: web.BaseRequest) -> str:
    """Address of the client as ``host:port``."""
    name = request.protocol.peername
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else ""


def target_of(request: web.BaseRequest) -> str:
    """Path and query as the client sent them, in ASCII."""
    target = request.raw_path
    if not target.startswith("/"):
        target = request.rel_url.raw_path_qs  # the absolute form, which clients send to proxies
    if not target.isascii():
        target = quote(target.encode("utf-8", "surrogateescape"), safe="/?#[]@!$&'()*+,;=:%~")
    return target
