"""The client behind forwarding proxies, and the deadline of a request."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from serve_common.errors import DeadlineExceeded
from serve_common.protocol.frames import Headers
from serve_proxy.core.headers import ABSOLUTE_SLO, RELATIVE_SLO, TIMEOUT, RequestHeaders
from serve_proxy.core.problems import BadRequest

_SCHEMES: Final = {b"http": "http", b"https": "https", b"ws": "http", b"wss": "https"}
_ADDRESS_LENGTH_MAX: Final = 64


@lru_cache(maxsize=4096)
def _build_direct_headers(peer: str, scheme: str, host: bytes) -> Headers:
    """Forwarding headers of a client that no other proxy forwarded; the same for all requests of a connection."""
    added = [(b"x-forwarded-proto", scheme.encode()), (b"x-forwarded-host", host)]
    return [(b"x-forwarded-for", _get_host(peer)), *added] if peer else added


def _get_host(peer: str) -> bytes:
    return peer.rpartition(":")[0].encode()


def forward(read: RequestHeaders, peer: str, scheme: str) -> tuple[str, str]:
    """Add ``X-Forwarded-…`` to the forwarded headers; return `RequestSpec.client` and `RequestSpec.scheme`.

    ``peer`` is the connection's other end as ``host:port``, ``scheme`` is http or https. Call it once per request.

    Why received values are not believed as they are: any client can write ``X-Forwarded-For``. Only the operator knows
    how many load balancers are in front of the proxy, and configures it (`ProxySettings.forwarded_hops`); the entries
    of those are kept, and this proxy adds the address that it sees itself.
    """
    forwarded = read.forwarded
    if not read.forwarded_for and not read.forwarded_proto and not read.has_forwarded_host:
        forwarded += _build_direct_headers(peer, scheme, read.host)
        return peer, scheme
    client = get_client(read.forwarded_for, peer)
    if read.forwarded_for:
        forwarded.append((b"x-forwarded-for", b"%b, %b" % (read.forwarded_for, _get_host(peer))))
    elif peer:
        forwarded.append((b"x-forwarded-for", _get_host(peer)))
    if read.forwarded_proto:
        scheme = _SCHEMES.get(read.forwarded_proto.strip().lower(), scheme)
    else:
        forwarded.append((b"x-forwarded-proto", scheme.encode()))
    if not read.has_forwarded_host:
        forwarded.append((b"x-forwarded-host", read.host))
    return client, scheme


def get_client(forwarded_for: bytes, peer: str) -> str:
    """The first client in ``X-Forwarded-For`` as ``host:port``, or else the ``peer``."""
    if not forwarded_for:
        return peer
    first = forwarded_for.partition(b",")[0].strip()
    if 0 < len(first) <= _ADDRESS_LENGTH_MAX and first.isascii() and first.decode().isprintable():
        return _with_port(first.decode())
    return peer


def _with_port(address: str) -> str:
    """``host:port`` of an address with or without a port, or of an IPv6 address in brackets; port 0 if it has none."""
    if address.startswith("["):
        host, _, rest = address[1:].partition("]")
        return f"{host}{rest}" if rest.startswith(":") else f"{host}:0"
    return address if address.count(":") == 1 else f"{address}:0"


_NUMBER: Final = re.compile(rb"\d{1,15}(\.\d{1,9})?")


def earliest_deadline(
    read: RequestHeaders, deadline: float, endpoint_slo_ms: float | None, *, now: float, wall_now: float
) -> float:
    """The deadline of a request, by the clock of ``now`` as ``deadline`` is; all in seconds.

    ``deadline`` is the proxy's own and ``endpoint_slo_ms`` applies to requests without one; ``wall_now`` is seconds
    since 1970. Raises `BadRequest` naming the header, `DeadlineExceeded` for one that has passed.

    Why an invalid number is an error: a client that sets a deadline and silently gets none waits far too long.
    """
    if not read.has_slo:
        return deadline if endpoint_slo_ms is None else min(deadline, now + endpoint_slo_ms / 1000)
    if read.relative_slo_ms is not None:
        deadline = min(deadline, now + _positive(RELATIVE_SLO, read.relative_slo_ms) / 1000)
    if read.timeout_s is not None:
        deadline = min(deadline, now + _positive(TIMEOUT, read.timeout_s))
    if read.absolute_slo_ms is not None:
        left_s = _positive(ABSOLUTE_SLO, read.absolute_slo_ms) / 1000 - wall_now
        if left_s <= 0:
            raise DeadlineExceeded(f"the time that {ABSOLUTE_SLO} names has passed")
        deadline = min(deadline, now + left_s)
    return deadline


def _positive(name: str, value: bytes) -> float:
    text = value.strip()
    number = float(text) if _NUMBER.fullmatch(text) else 0.0
    if number <= 0:
        raise BadRequest(name, f"{value[:40].decode('latin-1')!r} is not a number above 0")
    return number
