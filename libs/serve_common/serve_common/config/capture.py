"""Which requests of an endpoint proxies capture, and what they leave out of them."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from serve_common.errors import BadField
from serve_common.json_paths import parse_json_paths
from serve_common.values import check_between

CAPTURED_BODY_BYTES_MAX: Final = 64 * 1024
"""Largest captured body, in bytes; of a larger one only the size is captured."""
NAMES_MAX: Final = 64
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")


class CaptureConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Which requests of an endpoint are captured with their responses, and what is redacted.

    Proxies redact before a captured request leaves them. Headers and query parameters that usually have secrets
    (``Authorization``, cookies, API keys) are always redacted.
    """

    share: float
    """Share of the requests that is captured, above 0 and at most 1; each request is chosen at random."""
    bodies: bool = False
    """Whether bodies of at most 64 KiB are captured too; otherwise only their sizes."""
    redact: list[str] = []
    """JSON paths of values to redact in bodies, such as ``$.user``, ``$.items[*].name`` or ``$..email``. With any, a
    body that is not JSON is left out."""
    redact_headers: list[str] = []
    """Further headers to redact."""
    redact_query: list[str] = []
    """Further query parameters to redact."""


def check_capture_config(config: CaptureConfig, field: str = "") -> CaptureConfig:
    """Return ``config`` when every field is acceptable; otherwise raise `BadField` with the field's path.

    ``field`` is the path of the config itself; empty where its fields are those of a request.
    """
    before = f"{field}." if field else ""
    check_between(config.share, 1e-6, 1, f"{before}share")
    parse_json_paths(config.redact, f"{before}redact")
    for name in ("redact_headers", "redact_query"):
        values: list[str] = getattr(config, name)
        if len(values) > NAMES_MAX:
            raise BadField(f"{before}{name}", f"has {len(values)} names; at most {NAMES_MAX} are allowed")
        for at, value in enumerate(values):
            if not _NAME.fullmatch(value):
                raise BadField(f"{before}{name}[{at}]", f"{value[:80]!r} cannot be such a name")
    if config.redact and not config.bodies:
        raise BadField(f"{before}redact", "needs bodies: without them there is nothing to redact")
    return config
