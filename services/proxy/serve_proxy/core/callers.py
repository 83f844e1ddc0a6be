"""Who asks, and by what: what a proxy tells an application about the client that it hides.

Why what came is not believed: anybody can write ``X-Forwarded-For``. Only whoever runs the proxy knows how many load
balancers are in front of it, and says so (`ProxySettings.forwarded_hops`); what they said is kept, and this proxy adds
the address that it saw itself.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from serve_common.wires.frames import Headers
from serve_proxy.core.headers import RequestHeaders

_SCHEMES: Final = {b"http": "http", b"https": "https", b"ws": "http", b"wss": "https"}
_ADDRESS_LENGTH_MAX: Final = 64


@lru_cache(maxsize=4096)
def _of_direct_client(peer: str, scheme: str, host: bytes) -> Headers:
    """What is told of a client that no other proxy told of; the same for all requests of a connection."""
    told = [(b"x-forwarded-proto", scheme.encode()), (b"x-forwarded-host", host)]
    return [(b"x-forwarded-for", _host_of(peer)), *told] if peer else told


def _host_of(peer: str) -> bytes:
    return peer.rpartition(":")[0].encode()


def forward(read: RequestHeaders, peer: str, scheme: str) -> tuple[str, str]:
    """Add ``X-Forwarded-…`` to what goes on, and return who asked and by what: `Ask.client` and `Ask.scheme`.

    ``peer`` is the connection's other end as ``host:port``, ``scheme`` is http or https. To be called once a request.
    """
    forwarded = read.forwarded
    if not read.forwarded_for and not read.forwarded_proto and not read.has_forwarded_host:
        forwarded += _of_direct_client(peer, scheme, read.host)
        return peer, scheme
    client = client_of(read.forwarded_for, peer)
    if read.forwarded_for:
        forwarded.append((b"x-forwarded-for", b"%b, %b" % (read.forwarded_for, _host_of(peer))))
    elif peer:
        forwarded.append((b"x-forwarded-for", _host_of(peer)))
    if read.forwarded_proto:
        scheme = _SCHEMES.get(read.forwarded_proto.strip().lower(), scheme)
    else:
        forwarded.append((b"x-forwarded-proto", scheme.encode()))
    if not read.has_forwarded_host:
        forwarded.append((b"x-forwarded-host", read.host))
    return client, scheme


def client_of(forwarded_for: bytes, peer: str) -> str:
    """Who asked first as ``host:port``, by what was told in ``X-Forwarded-For``, or else the ``peer``."""
    if not forwarded_for:
        return peer
    first = forwarded_for.partition(b",")[0].strip()
    if 0 < len(first) <= _ADDRESS_LENGTH_MAX and first.isascii() and first.decode().isprintable():
        return _with_port(first.decode())
    return peer


def _with_port(address: str) -> str:
    """``host:port`` of an address that may lack the port, or have it, or be an IPv6 one in brackets."""
    if address.startswith("["):
        host, _, rest = address[1:].partition("]")
        return f"{host}{rest}" if rest.startswith(":") else f"{host}:0"
    return address if address.count(":") == 1 else f"{address}:0"
