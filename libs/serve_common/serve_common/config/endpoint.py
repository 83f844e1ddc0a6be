"""Options of an endpoint, and HTTP options that all proxies apply to every request."""

from __future__ import annotations

import re

import msgspec

from serve_common.config.validation import check_between, check_import_path
from serve_common.errors import BadField

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class EndpointOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an endpoint routes its requests and sets their deadlines.

    Why not options of a backend: several backends may serve one endpoint, and one backend several endpoints.
    """

    shard_key_header: str = "X-Serve-Shard-Key"
    """Request header whose value pins requests to one backend and replica; empty disables it."""
    backend_header: str = ""
    """Request header whose value selects one of the endpoint's backends, also one of weight 0; a value that names none
    is refused with 400. Empty disables it."""
    relative_slo_ms: float | None = None
    """Milliseconds from arrival to the deadline of requests that set none; None means the request timeout."""


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


MIDDLEWARES_MAX = 32


BODY_BYTES_MAX = 64 * 1024 * 1024 * 1024
"""Upper limit of `HttpOptions.body_bytes_max`."""


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """HTTP options that proxies apply to every request.

    Why not settings of the proxies: these are changed while the proxies run, and on all of them at once.
    """

    request_timeout_s: float = 60.0
    """Seconds from a request's arrival to the start of its response."""
    body_bytes_max: int = 10 * 1024 * 1024
    """Largest accepted request body, in bytes."""
    header_timeout_s: float = 10.0
    """Seconds for a client to send the head of a request, from its first byte."""
    body_rate_min: int = 500
    """Bytes per second, averaged over ten seconds, that a client must send of a body or receive of a response; 0
    disables it."""
    keep_alive_timeout_s: float = 90.0
    """Seconds that a connection may be idle between two requests."""
    middlewares: list[str] = []
    """Middlewares as ``module:attribute``, imported by the proxies; at most `MIDDLEWARES_MAX`, the first is
    the outermost."""
    access_log: bool = False
    """Whether each HTTP request is logged in one line when it has ended."""


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
