"""Options for the fields of an endpoint's configuration, as in `config_options`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final

import msgspec

from muster.cli import parsing
from muster.cli.config_options import name_option
from muster.cli.queries import option
from serve_common.config.backend import EndpointOptions, ErrorFormat, check_endpoint_options, merged
from serve_common.errors import BadField

_ENDPOINT_PANEL: Final = "Requests"
_ENDPOINT_FIELDS: Final = (
    (
        "shard_key_header",
        str,
        "Request header whose value keeps requests at one backend and replica; '' disables it.",
        "HEADER",
    ),
    (
        "backend_header",
        str,
        "Request header that selects one of the endpoint's backends; '' disables it.",
        "HEADER",
    ),
    (
        "relative_slo_ms",
        float,
        (
            "Milliseconds from arrival until a request is cancelled and answered with 504, unless it sets a "
            "deadline of its own, as by the header X-Serve-Relative-SLO-MS. Never later than "
            "request_timeout_s of 'muster http show'."
        ),
        "MILLISECONDS",
    ),
    (
        "error_format",
        ErrorFormat,
        "Form of the proxies' own errors: problem (JSON as of RFC 9457), or text (Ray Serve's text and statuses).",
        "FORMAT",
    ),
)
"""Options for the fields of `EndpointOptions`: name, type, help text, metavar. They never touch a replica."""


def _endpoint_text(name: str, text: str) -> str:
    default = getattr(EndpointOptions(), name)
    if isinstance(default, Enum):
        default = default.value
    return f"{text} Default: {default}." if default else text


ENDPOINT_OPTIONS: Final = tuple(
    option(name, kind, _endpoint_text(name, text), panel=_ENDPOINT_PANEL, metavar=metavar)
    for name, kind, text, metavar in _ENDPOINT_FIELDS
)
"""Options for complete `EndpointOptions`; help texts end with the default."""
ENDPOINT_CHANGES: Final = tuple(
    option(name, kind, text, metavar=metavar) for name, kind, text, metavar in _ENDPOINT_FIELDS
)
"""Options for partial `EndpointOptions`: fields that are not given stay as they are."""

_ENDPOINT_NAMES: Final = frozenset(name for name, *_rest in _ENDPOINT_FIELDS)


def build_endpoint_options(overrides: Mapping[str, Any]) -> EndpointOptions:
    """Build complete options: given fields, defaults for the rest. Raises `BadField` naming the option."""
    return _checked({name: value for name, value in overrides.items() if name in _ENDPOINT_NAMES})


def parse_endpoint_overrides(
    overrides: Mapping[str, Any], fields: str | None, directory: Path
) -> dict[str, Any]:
    """Collect the given fields: those of the JSON object ``fields``, overridden by options. Raises `BadField`."""
    partial = {**parsing.read_object(fields, directory, "--fields"), **msgspec.to_builtins(overrides)}
    if not partial:
        raise BadField("options", "nothing is given; --help shows them")
    _checked(partial)
    return partial


def _checked(fields: Mapping[str, Any]) -> EndpointOptions:
    try:
        return check_endpoint_options(
            merged(EndpointOptions(), msgspec.to_builtins(fields), "endpoint_options"), "endpoint_options"
        )
    except BadField as error:
        raise name_option(error, "endpoint_options") from error
