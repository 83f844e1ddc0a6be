"""What a rate limit is told, and by which key it counts a request.

Why apart from HTTP: how a caller is told from another one is what a limit can be dodged by.
"""

from __future__ import annotations

import ipaddress
import math
from typing import Final

import msgspec

from serve_common.errors import BadField
from serve_common.settings import Environment

BY_KEY: Final = "key"
BY_ADDRESS: Final = "address"
BY_HEADER: Final = "header"
KEY_LENGTH_MAX: Final = 256


class RateRules(msgspec.Struct, frozen=True, kw_only=True):
    """How much each caller may ask of one proxy process."""

    rate_per_s: float
    burst: int
    by: str
    """`BY_KEY`, `BY_ADDRESS` or `BY_HEADER`."""
    header: str = ""
    """Its name, for `BY_HEADER`."""
    keys_max: int = 10_000

    def key(self, *, api_key_name: str, header_value: str, client: str) -> str:
        """What a request is counted by; where it lacks that, the address of its ``client``."""
        if self.by == BY_KEY and api_key_name:
            return f"key {api_key_name}"
        if self.header and header_value:
            return f"header {header_value[:KEY_LENGTH_MAX]}"
        return f"address {_network(client)}"


def _network(address: str) -> str:
    """The address; of an IPv6 one its first 64 bits, for every client has a whole network of them."""
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
    """The rules in ``SERVE_RATE_LIMIT_…``; raises `BadField` naming the variable."""
    name = "SERVE_RATE_LIMIT_PER_S"
    environment.text(name)  # it must be set
    rate_per_s = environment.seconds(name, 0, 0.001, 1_000_000)
    by = environment.text("SERVE_RATE_LIMIT_BY", BY_KEY).lower()
    kind, _, header = by.partition(":")
    if kind not in (BY_KEY, BY_ADDRESS, BY_HEADER) or bool(header) != (kind == BY_HEADER):
        raise BadField("SERVE_RATE_LIMIT_BY", f"{by[:80]!r} is none of key, address and header:<name>")
    return RateRules(
        rate_per_s=rate_per_s,
        burst=environment.integer("SERVE_RATE_LIMIT_BURST", max(1, math.ceil(rate_per_s)), 1, 10_000_000),
        by=kind,
        header=header,
        keys_max=environment.integer("SERVE_RATE_LIMIT_KEYS_MAX", 10_000, 1, 10_000_000),
    )
