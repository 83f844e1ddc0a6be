"""How an endpoint is reached, and how its requests are told apart.

Why an endpoint's: several backends may serve it, and the same backend may serve several endpoints.
"""

from __future__ import annotations

import re

import msgspec

from serve_common.errors import BadField
from serve_common.limits import check_between

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class EndpointOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an endpoint's requests are told apart."""

    shard_key_header: str = "X-Serve-Shard-Key"
    """Requests with the same value of this header go to the same backend and replica; empty pins none."""
    backend_header: str = ""
    """Request header whose value selects one of the endpoint's backends, also one of weight 0; a value that names none
    is refused with 400. Empty disables it."""
    relative_slo_ms: float | None = None
    """Deadline, from arrival, of requests that bear none of their own; None means the request timeout."""


_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")


def check_endpoint_options(options: EndpointOptions, field: str = "options") -> EndpointOptions:
    """Return ``options`` when every field is acceptable; otherwise raise `BadField` with the field's path."""
    for name in ("shard_key_header", "backend_header"):
        value: str = getattr(options, name)
        if value and not _HEADER_NAME.fullmatch(value):
            raise BadField(f"{field}.{name}", f"{value[:80]!r} cannot be the name of a header")
    if options.relative_slo_ms is not None:
        check_between(options.relative_slo_ms, 1, 86_400_000, f"{field}.relative_slo_ms")
    return options
