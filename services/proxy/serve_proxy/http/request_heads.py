"""What a request says of itself, as aiohttp holds it.

Why apart: the library hands some of it out only in forms that cost more than the whole way through this proxy.
"""

from __future__ import annotations

from urllib.parse import quote

from aiohttp import HttpVersion11, hdrs, web
from multidict import CIMultiDict, CIMultiDictProxy

from serve_proxy.core.headers import as_bytes, is_host, is_only_chunked
from serve_proxy.core.problems import BadRequest, UnknownCoding


def check_head(request: web.BaseRequest) -> None:
    """Refuse what the parser lets pass, and have the connection closed where its bytes may be taken in two ways.

    Raises `BadRequest` and `UnknownCoding`; nothing that follows on the connection can then be believed.
    """
    message = request._message  # noqa: SLF001 - told nowhere else
    if message.version.major != 1:  # the parser lets 0.9 and 2.0 pass, when nothing follows
        request._version = HttpVersion11  # noqa: SLF001 - the answer would claim the other one
        raise BadRequest("version", "only HTTP/1.0 and HTTP/1.1 are spoken here")
    if message.chunked:
        if not is_only_chunked(message.raw_headers):
            raise UnknownCoding("transfer-encoding", "only chunked is understood here")
        is_last = message.version < HttpVersion11  # others on the way may not know chunks (RFC 9112, 6.1)
    elif hdrs.TRANSFER_ENCODING in message.headers:
        raise UnknownCoding("transfer-encoding", "only chunked is understood here")
    else:
        is_last = False
    if not (is_host(as_bytes(message.headers.get(hdrs.HOST, ""))) and is_host(authority_of(request))):
        raise BadRequest("host", "is no name or address")
    if message.upgrade:
        upgrade = ",".join(message.headers.getall(hdrs.UPGRADE, ()))
        if not is_socket_wanted(request, as_bytes(upgrade)):
            is_last = True  # the parser drops what came behind it
    if is_last:
        request._message = message._replace(should_close=True)  # noqa: SLF001 - `keep_alive` reads it there


def is_socket_wanted(request: web.BaseRequest, upgrade: bytes) -> bool:
    """True for an upgrade to a WebSocket; ``upgrade`` is the header. The parser has then stopped at this request."""
    return upgrade.strip().lower() == b"websocket" and request._message.upgrade  # noqa: SLF001 - told nowhere else


def replace_headers(request: web.BaseRequest, raw: tuple[tuple[bytes, bytes], ...]) -> None:
    """Give ``request``, a clone, other headers.

    `clone(headers=…)` makes the raw form of the others, and fails for values that are not UTF-8.
    """
    pairs = ((name.decode("latin-1"), value.decode("utf-8", "surrogateescape")) for name, value in raw)
    headers = CIMultiDictProxy(CIMultiDict(pairs))
    request._message = request._message._replace(headers=headers, raw_headers=raw)  # noqa: SLF001 - see above
    request._headers = headers  # noqa: SLF001 - as above


def peer_of(request: web.BaseRequest) -> str:
    """Address of the client as ``host:port``."""
    name = request.protocol.peername
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else ""


def scheme_of(request: web.BaseRequest) -> str:
    """By which the client came: http or https."""
    return "https" if request.secure else "http"


def authority_of(request: web.BaseRequest) -> bytes:
    """The host that the target itself names, as clients of forward proxies send it; empty when it names none."""
    if request.raw_path.startswith("/"):
        return b""
    return as_bytes(request._message.url.raw_authority)  # noqa: SLF001 - the request's own form has lost it


def target_of(request: web.BaseRequest) -> str:
    """Path and query as the client sent them, in ASCII."""
    target = request.raw_path
    if not target.startswith("/"):
        target = request.rel_url.raw_path_qs  # the absolute form, which clients send to proxies
    if not target.isascii():
        target = quote(target.encode("utf-8", "surrogateescape"), safe="/?#[]@!$&'()*+,;=:%~")
    return target
