"""A configuration with some of its fields changed.

Why by names: a command, a file and a command line each give only the fields that are to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from serve_common.errors import BadField
from serve_common.values.backend_config import BackendConfig
from serve_common.values.endpoint_options import EndpointOptions
from serve_common.values.http_options import HttpOptions

Merged = TypeVar("Merged", BackendConfig, EndpointOptions, HttpOptions)


def merged(config: Merged, partial: Mapping[str, Any], field: str) -> Merged:
    """``config`` with the given fields changed, of the right types but not checked any further.

    Of a group of fields such as ``circuit_breaker`` those that are not given stay too.

    Raises `BadField` with the path of a field that is unknown or of another type.
    """
    known = type(config).__struct_fields__
    for name in partial:
        if name not in known:
            raise BadField(f"{field}.{name[:80]}", "is unknown")
    whole = {name: getattr(config, name) for name in known}
    changed = {name: _within(whole[name], value) for name, value in partial.items()}
    try:
        return msgspec.convert({**msgspec.to_builtins(whole), **changed}, type(config))
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        raise BadField(f"{field}.{path.rstrip('`')}" if path else field, text) from error


def _within(known: Any, given: Any) -> Any:
    if isinstance(known, msgspec.Struct) and isinstance(given, Mapping):
        return {**msgspec.to_builtins(known), **given}
    return given
