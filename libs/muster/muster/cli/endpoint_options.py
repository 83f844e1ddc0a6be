"""Options for the fields of `EndpointOptions`, the same for every command that takes them.

Why apart from the backends' options: they change how requests are told apart and never touch a replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from muster.cli import values_given
from muster.cli.config_options import named_by_option
from muster.cli.signature import option
from serve_common.errors import BadField
from serve_common.values.endpoint_options import EndpointOptions, check_endpoint_options
from serve_common.values.merging import merged

_PANEL: Final = "Requests"
_FIELDS: Final = (
    ("shard_key_header", str, "Same value of this header, same replica; '' is none.", "HEADER"),
    ("backend_header", str, "Request header that selects a backend; empty disables it.", "HEADER"),
    ("relative_slo_ms", float, "Deadline of requests that bear none, from arrival.", "MS"),
)
"""Field by field: name, type, text, metavar."""


def _text_with_default(name: str, text: str) -> str:
    default = getattr(EndpointOptions(), name)
    return f"{text} Default: {default}." if default else text


ENDPOINT_OPTIONS: Final = tuple(
    option(name, kind, _text_with_default(name, text), panel=_PANEL, metavar=metavar)
    for name, kind, text, metavar in _FIELDS
)
"""Of whole `EndpointOptions`."""
ENDPOINT_CHANGES: Final = tuple(
    option(name, kind, text, metavar=metavar) for name, kind, text, metavar in _FIELDS
)
"""Of some fields: what is not given stays."""

_NAMES: Final = frozenset(name for name, *_rest in _FIELDS)


def endpoint_options_of(given: Mapping[str, Any]) -> EndpointOptions:
    """What was given, and defaults for the rest. Raises `BadField` naming the option."""
    return _checked({name: value for name, value in given.items() if name in _NAMES})


def partial_endpoint_options(
    given: Mapping[str, Any], options: str | None, directory: Path
) -> dict[str, Any]:
    """Only what was given: the fields of the JSON object ``options``, and options over them. Raises `BadField`."""
    partial = {**values_given.read_object(options, directory, "--options"), **given}
    if not partial:
        raise BadField("options", "nothing is given; --help shows them")
    _checked(partial)
    return partial


def _checked(fields: Mapping[str, Any]) -> EndpointOptions:
    try:
        return check_endpoint_options(
            merged(EndpointOptions(), fields, "endpoint_options"), "endpoint_options"
        )
    except BadField as error:
        raise named_by_option(error, "endpoint_options") from error
