"""What differs between two things that were decided, in words.

Why one place: a plan, and later a rollback, must say the same of the same change, and must not repeat large values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final, TypeVar

import msgspec
from immutables import Map

from serve_common.values.backend_config import BackendConfig
from serve_common.values.http_options import HttpOptions
from serve_common.wires.host import ReplicaGoal
from serve_controller.core.objects import BackendVersion, EndpointConfig

Name = TypeVar("Name", bound=str)

HEARD_BY_REPLICAS: Final = frozenset(BackendConfig.__struct_fields__) & frozenset(
    ReplicaGoal.__struct_fields__
)
"""Options that a running replica must hear of; all others are light."""
_UNSHOWN: Final = frozenset({"user_config", "init_args", "init_kwargs", "runtime_env"})
"""May be large, or secret."""
_SHOWN_LENGTH_MAX: Final = 80


def shown_value(value: Any) -> str:
    """A value for people, cut."""
    if value is None or value == "":
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict | list):
        return _cut(msgspec.json.encode(value).decode())
    return _cut(str(msgspec.to_builtins(value)))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_LENGTH_MAX else f"{text[: _SHOWN_LENGTH_MAX - 1]}…"


def changed_fields(before: msgspec.Struct, after: msgspec.Struct, names: Collection[str] = ()) -> list[str]:
    """Each field (of ``names``, or of all) that differs, such as ``num_replicas 3 → 5``."""
    words = []
    for name in before.__struct_fields__:
        if names and name not in names:
            continue
        old, new = getattr(before, name), getattr(after, name)
        if old == new:
            continue
        if isinstance(old, msgspec.Struct) and isinstance(new, msgspec.Struct):
            words += [f"{name}.{word}" for word in changed_fields(old, new)]
        elif name in _UNSHOWN:
            words.append(f"{name} changes")
        else:
            words.append(f"{name} {shown_value(old)} → {shown_value(new)}")
    return words


def code_change(before: BackendVersion, after: BackendVersion) -> str:
    """Why replicas of ``before`` are replaced by those of ``after``."""
    parts = []
    if before.version != after.version:
        parts.append(f"version {shown_value(before.version)} → {shown_value(after.version)}")
    fields = changed_fields(before.replica_config, after.replica_config)
    if fields:
        parts.append(f"the code changes: {', '.join(fields)}")
    if not parts and after.version is None:
        return "the code may have changed: no version is named"
    return "; ".join(parts) or "the code is started anew"


def config_change(before: BackendVersion, after: BackendVersion) -> str:
    """Why replicas of ``before`` are reconfigured."""
    fields = changed_fields(before.backend_config, after.backend_config, HEARD_BY_REPLICAS)
    return ", ".join(fields) or "a newer configuration"


def light_changes(before: BackendConfig, after: BackendConfig) -> list[str]:
    """What changes without a word to any replica, less ``num_replicas``."""
    light = frozenset(BackendConfig.__struct_fields__) - HEARD_BY_REPLICAS - {"num_replicas"}
    return changed_fields(before, after, light)


def http_changes(before: HttpOptions, after: HttpOptions) -> list[str]:
    """What changes for all proxies."""
    return changed_fields(before, after)


def shown_traffic(traffic: Iterable[tuple[str, float]]) -> str:
    """Where requests go: ``default/a 70 %, default/b 30 %``."""
    return ", ".join(f"{tag} {100 * share:g} %" for tag, share in sorted(traffic)) or "nowhere"


def endpoint_changes(before: EndpointConfig, after: EndpointConfig) -> list[str]:
    """What changes of how an endpoint is reached and where it sends requests."""
    words = changed_fields(before, after, ("route",))
    if sorted(before.methods) != sorted(after.methods):
        words.append(f"methods {', '.join(before.methods)} → {', '.join(after.methods)}")
    for name, old, new in (
        ("traffic", before.traffic, after.traffic),
        ("shadows", before.shadows, after.shadows),
    ):
        if old != new:
            words.append(f"{name} {shown_traffic(old.items())} → {shown_traffic(new.items())}")
    return words + changed_fields(before.options, after.options)


def changed_names(before: Map[Name, Any], after: Map[Name, Any]) -> list[Name]:
    """Names under which there is something else, nothing any more, or something new; in order."""
    if before is after:
        return []
    gone = [name for name in before if name not in after]
    others = [
        name for name, value in after.items() if (known := before.get(name)) is not value and known != value
    ]
    return sorted(gone + others)
