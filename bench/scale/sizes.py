"""How large each row of the table is, what its parts are called, and when each of them speaks.

Why all parts grow together: the question is what one change costs beside *other* backends, hosts and proxies, so a
backend keeps its ten replicas and everything around it grows.
"""

from __future__ import annotations

from typing import Final

import msgspec

from serve_common.names import HostId, ProxyId

REPLICAS_PER_BACKEND: Final = 10
_SMALLEST: Final = 10


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """How much there is of everything."""

    replicas: int
    hosts: int
    proxies: int
    backends: int


def size_of(replicas: int) -> Size:
    """The size with so many replicas; raises ValueError for what does not divide evenly."""
    if replicas < _SMALLEST * REPLICAS_PER_BACKEND or replicas % REPLICAS_PER_BACKEND:
        raise ValueError(
            f"{replicas} replicas: at least 100 and a multiple of {REPLICAS_PER_BACKEND} are needed"
        )
    tenth = replicas // REPLICAS_PER_BACKEND
    return Size(replicas=replicas, hosts=tenth, proxies=tenth, backends=tenth)


def backend_name(index: int) -> str:
    """What the backend with that index is deployed as."""
    return f"b{index:05d}"


def host_id(index: int) -> HostId:
    """The id of the host with that index."""
    return HostId(f"host-{index:05d}")


def proxy_id(index: int) -> ProxyId:
    """The id of the proxy with that index."""
    return ProxyId(f"proxy-{index:05d}")


def spread(count: int, of: int) -> list[int]:
    """``count`` different indices below ``of`` (fewer where there are not so many), evenly apart."""
    count = min(count, of)
    return [position * of // count for position in range(count)]


def turns(count: int, before_s: float, now_s: float, period_s: float) -> list[int]:
    """Whose turn came after ``before_s`` until ``now_s``, when ``count`` take turns evenly in each period.

    Nobody has more than one turn, however late we are: a report that was missed is not sent twice.
    """
    first = int(before_s / period_s * count) + 1
    last = int(now_s / period_s * count)
    return [turn % count for turn in range(max(first, last - count + 1), last + 1)]
