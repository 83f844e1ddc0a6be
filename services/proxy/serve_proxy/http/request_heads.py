"""Properties of a request's head, as aiohttp stores them.

Why a module: the library's public forms of some of them cost more than everything else this proxy does.
"""

from __future__ import annotations

from urllib.parse import quote

from aiohttp import HttpVersion11, hdrs, web
from multidict import CIMultiDict, CIMultiDictProxy

from serve_proxy.core.headers import as_bytes, is_host, is_only_chunked
from serve_proxy.core.problems import BadRequest, UnknownCoding


def check_head(request: web.BaseRequest) -> None:
    """Reject invalid heads that the parser accepts; close the connection where its bytes are ambiguous.

    Raises `BadRequest` and `UnknownCoding`; the rest of the connection can then not be trusted.
    """
    message = request._message  # noqa: SLF001 - not public
    if message.version.major != 1:  # the parser lets 0.9 and 2.0 pass, when nothing follows
        request._version = HttpVersion11  # noqa: SLF001 - the response would use the other one
        raise BadRequest("version", "only HTTP/1.0 and HTTP/1.1 are spoken here")
    if message.chunked:
        if not is_only_chunked(message.raw_headers):
            raise UnknownCoding("transfer-encoding", "only chunked is understood here")
        is_last = message.version < HttpVersion11  # intermediaries may not support chunks (RFC 9112, 6.1)
    elif hdrs.TRANSFER_ENCODING in message.headers:
        raise UnknownCoding("transfer-encoding", "only chunked is understood here")
    else:
        is_last = False
    if not (is_host(as_bytes(message.headers.get(hdrs.HOST, ""))) and is_host(get_authority(request))):
        raise BadRequest("host", "is no name or address")
    if message.upgrade:
        upgrade = ",".join(message.headers.getall(hdrs.UPGRADE, ()))
        if not is_socket_wanted(request, as_bytes(upgrade)):
            is_last = True  # the parser drops the bytes after it
    if is_last:
        request._message = message._replace(should_close=True)  # noqa: SLF001 - `keep_alive` reads it there


def is_socket_wanted(request: web.BaseRequest, upgrade: bytes) -> bool:
    """True for an upgrade to a WebSocket; ``upgrade`` is the header. The parser has then stopped at this request."""
    return upgrade.strip().lower() == b"websocket" and request._message.upgrade  # noqa: SLF001 - not public


def replace_headers(request: web.BaseRequest, raw: tuple[tuple[bytes, bytes], ...]) -> None:
    """Replace the headers of ``request``, a clone.

    `clone(headers=…)` re-encodes the raw headers, and fails for values that are not UTF-8.
    """
    pairs = ((name.decode("latin-1"), value.decode("utf-8", "surrogateescape")) for name, value in raw)
    headers = CIMultiDictProxy(CIMultiDict(pairs))
    request._message = request._message._replace(headers=headers, raw_headers=raw)  # noqa: SLF001 - see above
    request._headers = headers  # noqa: SLF001 - as above


def get_peer(request: web.BaseRequest) -> str:
    """Address of the client as ``host:port``."""
    name = request.protocol.peername
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else ""


def get_scheme(request: web.BaseRequest) -> str:
    """Scheme of the client's connection: http or https."""
    return "https" if request.secure else "http"


def get_authority(request: web.BaseRequest) -> bytes:
    """The authority of an absolute-form target, as clients of forward proxies send it; otherwise empty."""
    if request.raw_path.startswith("/"):
        return b""
    return as_bytes(request._message.url.raw_authority)  # noqa: SLF001 - the request's own form has lost it


def get_target(request: web.BaseRequest) -> str:
    """Path and query as the client sent them, in ASCII."""
    target = request.raw_path
    if not target.startswith("/"):
        target = request.rel_url.raw_path_qs  # the absolute form, which clients send to proxies
    if not target.isascii():
        target = quote(target.encode("utf-8", "surrogateescape"), safe="/?#[]@!$&'()*+,;=:%~")
    return target
