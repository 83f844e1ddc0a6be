"""What all proxies apply to every request, whatever endpoint it is for.

Why values and no settings of the proxies: they are changed while the proxies run, and on all of them at once.
"""

from __future__ import annotations

import msgspec

from serve_common.errors import BadField
from serve_common.limits import check_between, check_import_path

MIDDLEWARES_MAX = 32


BODY_BYTES_MAX = 64 * 1024 * 1024 * 1024
"""Highest `HttpOptions.body_bytes_max`."""


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What proxies apply to every request."""

    request_timeout_s: float = 60.0
    """How long a request may take from its arrival to its answer."""
    body_bytes_max: int = 10 * 1024 * 1024
    header_timeout_s: float = 10.0
    """How long a client may take to send the head of a request, from its first byte."""
    body_rate_min: int = 500
    """Bytes a second, on average over ten seconds, that a client must send of a body or take of an answer; 0: any."""
    keep_alive_timeout_s: float = 90.0
    """How long a connection may be idle between two requests."""
    middlewares: list[str] = []
    """``module:attribute`` each, imported by the proxies; the first is the outermost."""
    access_log: bool = False
    """A line of log for each HTTP request, when it has ended."""


def check_http_options(options: HttpOptions, field: str = "options") -> HttpOptions:
    """Return ``options`` when every field is within its limits; otherwise raise `BadField` with the field's path."""
    check_between(options.request_timeout_s, 0.1, 86_400, f"{field}.request_timeout_s")
    check_between(options.body_bytes_max, 1, BODY_BYTES_MAX, f"{field}.body_bytes_max")
    check_between(options.header_timeout_s, 0.1, 3600, f"{field}.header_timeout_s")
    check_between(options.body_rate_min, 0, 10**9, f"{field}.body_rate_min")
    check_between(options.keep_alive_timeout_s, 0.1, 3600, f"{field}.keep_alive_timeout_s")
    if len(options.middlewares) > MIDDLEWARES_MAX:
        raise BadField(f"{field}.middlewares", f"has more than {MIDDLEWARES_MAX} entries")
    for index, path in enumerate(options.middlewares):
        check_import_path(path, f"{field}.middlewares[{index}]")
    return options
