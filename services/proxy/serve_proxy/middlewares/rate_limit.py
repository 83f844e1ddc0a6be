"""``serve_proxy.middlewares.rate_limit:rate_limit``: limits the requests per second of each caller.

| variable | default | meaning |
| --- | --- | --- |
| ``MUSTER_RATE_LIMIT_PER_S`` | required | sustained requests per second of a caller; 0.2 is one in 5 s |
| ``MUSTER_RATE_LIMIT_BURST`` | the rate, at least 1 | requests allowed at once after a quiet time |
| ``MUSTER_RATE_LIMIT_BY`` | key | ``key``: the key's name (put ``api_keys`` first); ``address``; ``header:<name>`` |
| ``MUSTER_RATE_LIMIT_KEYS_MAX`` | 10000 | callers that are remembered |

Requests without the key or header are counted by their address (IPv6: by its /64 network), which load balancers in
front forward as far as ``MUSTER_FORWARDED_HOPS`` trusts them. Each proxy process counts for itself: with three of them
a caller may send up to three times as much.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections import OrderedDict
from typing import Final, final

import msgspec
from aiohttp import web

from serve_common.clock import TokenBucket
from serve_common.errors import BadField
from serve_common.runtime.settings import Environment
from serve_proxy.core.problems import Problem
from serve_proxy.http.middlewares import Handler
from serve_proxy.middlewares.exchange import API_KEY_NAME, client_host, refusal

BY_KEY: Final = "key"
BY_ADDRESS: Final = "address"
BY_HEADER: Final = "header"
KEY_LENGTH_MAX: Final = 256


class RateRules(msgspec.Struct, frozen=True, kw_only=True):
    """The rate limit of each caller at one proxy process."""

    rate_per_s: float
    """Requests per second."""
    burst: int
    """Requests that a caller may send at once."""
    by: str
    """What identifies a caller: `BY_KEY`, `BY_ADDRESS` or `BY_HEADER`."""
    header: str = ""
    """The header's name, for `BY_HEADER`."""
    keys_max: int = 10_000
    """Callers that are remembered; the one that was quiet for longest is forgotten first."""

    def key(self, *, api_key_name: str, header_value: str, client: str) -> str:
        """The bucket key of a request; by the address of its ``client`` if the configured property is missing.

        How callers are distinguished decides how the limit can be evaded.
        """
        if self.by == BY_KEY and api_key_name:
            return f"key {api_key_name}"
        if self.header and header_value:
            return f"header {header_value[:KEY_LENGTH_MAX]}"
        return f"address {_network(client)}"


def _network(address: str) -> str:
    """The address; for IPv6 its /64 network, because a client usually has a whole one."""
    try:
        parsed = ipaddress.ip_address(address.strip("[]").partition("%")[0])
    except ValueError:
        return address[:KEY_LENGTH_MAX]
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)


def read_rate_rules(environment: Environment) -> RateRules:
    """Read ``MUSTER_RATE_LIMIT_…`` from ``environment``. Raises `BadField` naming the variable."""
    name = "MUSTER_RATE_LIMIT_PER_S"
    environment.text(name)  # it must be set
    rate_per_s = environment.seconds(name, 0, 0.001, 1_000_000)
    by = environment.text("MUSTER_RATE_LIMIT_BY", BY_KEY).lower()
    kind, _, header = by.partition(":")
    if kind not in (BY_KEY, BY_ADDRESS, BY_HEADER) or bool(header) != (kind == BY_HEADER):
        raise BadField("MUSTER_RATE_LIMIT_BY", f"{by[:80]!r} is none of key, address and header:<name>")
    return RateRules(
        rate_per_s=rate_per_s,
        burst=environment.integer("MUSTER_RATE_LIMIT_BURST", max(1, math.ceil(rate_per_s)), 1, 10_000_000),
        by=kind,
        header=header,
        keys_max=environment.integer("MUSTER_RATE_LIMIT_KEYS_MAX", 10_000, 1, 10_000_000),
    )


@final
class CallerBuckets:
    """A `TokenBucket` for each key.

    Why bounded: callers choose their addresses, and each one costs memory here. The bucket that was unused for longest
    is dropped first: it would have been full again the soonest.
    """

    def __init__(self, *, rate_per_s: float, burst: float, keys_max: int) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._keys_max = keys_max
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()
        """The least recently used first."""

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: str, now: float) -> float:
        """Take a token from the bucket of ``key``; returns 0, or the seconds until one is available."""
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = TokenBucket(self._rate_per_s, self._burst)
        self._buckets.move_to_end(key)
        if len(self._buckets) > self._keys_max:
            self._buckets.popitem(last=False)
        return 0.0 if bucket.take(now) else bucket.wait_s(now)


@final
class RateCheck:
    """The middleware that applies the rate limit."""

    def __init__(self, rules: RateRules) -> None:
        self._rules = rules
        self._buckets = CallerBuckets(rate_per_s=rules.rate_per_s, burst=rules.burst, keys_max=rules.keys_max)

    async def __call__(self, request: web.BaseRequest, handler: Handler) -> web.StreamResponse:
        """Pass the request on, or respond 429."""
        rules = self._rules
        key = rules.key(
            api_key_name=request.get(API_KEY_NAME, ""),
            header_value=request.headers.get(rules.header, "") if rules.header else "",
            client=client_host(request),
        )
        wait_s = self._buckets.take(key, time.monotonic())
        if not wait_s:
            return await handler(request)
        problem = Problem(
            status=429,
            code="rate_limited",
            message=f"more than {rules.rate_per_s:g} requests a second",
            headers=(("Retry-After", str(math.ceil(wait_s))),),
        )
        return refusal(request, problem)


def __getattr__(name: str) -> RateCheck:
    """Create `rate_limit` on access: only then are its settings required."""
    if name != "rate_limit":
        raise AttributeError(name)
    return RateCheck(read_rate_rules(Environment()))
